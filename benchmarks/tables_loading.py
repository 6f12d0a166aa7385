"""Tables of the manual's pages on loading: a committed result in, Markdown out."""

from __future__ import annotations

import statistics
from typing import Any


def loaders_block(result: dict[str, Any]) -> str:
    """Return the race of data loaders."""
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']}, torch {result['torch']}. Turns of some epochs "
        "each, interleaved; medians over turns, and the lowest and highest ratio within a turn.",
    ]
    for job in dict.fromkeys(row["job"] for row in result["rows"]):
        lines += [
            "",
            f"**{job}**",
            "",
            "| loader | s per epoch | first batch, ms (most) | speed-up |",
            "|---|---|---|---|",
        ]
        lines += [_loader_row(row) for row in result["rows"] if row["job"] == job]
    return "\n".join(lines)


def _loader_row(row: dict[str, Any]) -> str:
    chosen = f": {row['note'].split(':')[0]}" if row["loader"].endswith("auto") and row["note"] else ""
    return (
        f"| {row['loader']}{chosen} | {row['epoch_s']:.3f} | {row['first_ms']:.1f} ({row['first_most_ms']:.1f}) | "
        f"{row['speedup']:.2f}x [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}] |"
    )


def jpeg_block(result: dict[str, Any]) -> str:
    """Return the race of ways from JPEG files to batches."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']}, {result['cores']} cores. {result['files']}. "
        f"{versions}. Turns interleaved; medians of turns, lowest and highest ratio within a turn.",
    ]
    for job in dict.fromkeys(row["job"] for row in result["rows"]):
        lines += [
            "",
            f"**{_JPEG_JOBS[job]}**",
            "",
            "| way | CPU-ms an image | images/s | its CPU ÷ ours | its seconds ÷ ours |",
            "|---|---|---|---|---|",
        ]
        lines += [_jpeg_row(row) for row in result["rows"] if row["job"] == job]
    return "\n".join(lines)


_JPEG_JOBS = {"resize": "The whole image, 500x375 to 224x224", "train": "`RandomResizedCrop(224)` and a flip"}


def _jpeg_row(row: dict[str, Any]) -> str:
    ratios = [_spread(row[name]) if row[name] else "1" for name in ("cpu_ratio", "wall_ratio")]
    return (
        f"| {row['way']} | {statistics.median(row['cpu_ms_turns']):.2f} | "
        f"{statistics.median(row['images_per_s_turns']):.0f} | {ratios[0]} | {ratios[1]} |"
    )


def _spread(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"

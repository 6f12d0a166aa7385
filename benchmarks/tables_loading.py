"""Tables of the manual's pages on loading: a committed result in, Markdown out."""

from __future__ import annotations

import statistics
from typing import Any


def loaders_block(result: dict[str, Any]) -> str:
    """Return the race of data loaders."""
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']}, torch {result['torch']}. Turns of some epochs "
        "each, interleaved; medians over turns, and the lowest and highest ratio within a turn.",
        "",
        "The steps alone are the most that a loader can reach, whatever it is compared with. Of that speed the "
        "automatic mode reaches:",
        "",
        *_shares(result["rows"]),
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


def _shares(rows: list[dict[str, Any]]) -> list[str]:
    """Return, for each job with a step, which share of the possible speed the automatic mode reaches."""
    floors = {row["job"]: row for row in rows if row["loader"].startswith("no loading")}
    return [
        f"- {row['job']}{_decoder(row)}: {floors[row['job']]['epoch_s'] / row['epoch_s']:.0%}, "
        f"{row['speedup']:.2f}x of at most {floors[row['job']]['speedup']:.2f}x"
        for row in rows
        if row["job"] in floors and row["loader"].endswith("continuous, auto")
    ]


def _decoder(row: dict[str, Any]) -> str:
    name, colon, _ = row["loader"].partition(": ")
    return f", by `{name}`" if colon else ""


def _loader_row(row: dict[str, Any]) -> str:
    chosen = f": {row['note'].split(':')[0]}" if row["loader"].endswith("auto") and row["note"] else ""
    return (
        f"| {row['loader']}{chosen} | {row['epoch_s']:.3f} | {row['first_ms']:.1f} ({row['first_most_ms']:.1f}) | "
        f"{row['speedup']:.2f}x [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}] |"
    )


def lengths_block(result: dict[str, Any]) -> str:
    """Return how well batches of samples of different lengths use the ranks."""
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']}. {'; '.join(result['lengths'])}. Efficiency is "
        "the share of the ranks' time that goes into samples, if in every step they wait for the slowest, reckoned "
        "from the lengths: a sample costs length · (1 + length / L0). Planning is CPU time for 100,000 samples.",
    ]
    for lengths, padded in dict.fromkeys((row["lengths"], row["padded"]) for row in result["rows"]):
        lines += [
            "",
            f"**{lengths}, {'padded to the longest of the batch' if padded else 'not padded'}**",
            "",
            "| batches | efficiency | padding | steps | planning |",
            "|---|---|---|---|---|",
        ]
        lines += [_lengths_row(row) for row in result["rows"] if row["lengths"] == lengths and row["padded"] is padded]
    return "\n".join(lines)


def _lengths_row(row: dict[str, Any]) -> str:
    planned = row["plan_s_per_100k"]
    plan = "" if planned is None else f"{planned:.2f} s"
    return f"| {row['policy']} | {row['efficiency']:.1%} | {row['padding']:.1%} | {row['steps']} | {plan} |"


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

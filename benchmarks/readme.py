"""Fill the marked blocks of README.md and the manual from committed results: no figure is typed by hand.

    python -m benchmarks.readme [--check]

The newest file of each kind under benchmarks/results/ is used; `--check` changes nothing and exits with 1 if a page is
out of date.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from accel.files import write_atomic

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"


def newest(pattern: str) -> dict[str, Any] | None:
    """Return the newest result file that matches, by its date."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(_RESULTS.glob(pattern))]
    return max(found, key=lambda result: result["date"]) if found else None


def demo_block(result: dict[str, Any]) -> str:
    """Return the demo's table as Markdown."""
    machine = result["machine"]
    lines = [
        f"`{result['command']}`, {result['date']}, {machine['device']}, {machine['cores']} cores, "
        f"torch {machine['torch']}. {result['data']}; {result['what']}.",
        "",
        "| variant | speed-up [95 %] | ms per step | search cost | test accuracy (3 seeds) | promised |",
        "|---|---|---|---|---|---|",
    ]
    variants = result["variants"]
    plain = variants["plain"]["accuracy"]
    lines.append(f"| plain | 1 | {variants['default']['plain_ms']:.1f} | | {statistics.fmean(plain):.2f} % | |")
    for name in ("default", "reduced"):
        v = variants[name]
        lines.append(
            f'| `allow="{"reordered" if name == "default" else name}"` | {v["speedup"]:.2f}x '
            f"[{v['low']:.2f}, {v['high']:.2f}] | {v['ms']:.1f} | {statistics.fmean(v['search_s']):.1f} s | "
            f"{statistics.fmean(v['accuracy']):.2f} % ({v['accuracy_difference']:+.2f}) | "
            f"{v['wanted']}x, ±0.5 |"
        )
    return "\n".join([*lines, "", *_strategy_lines(variants)])


def _strategy_lines(variants: dict[str, Any]) -> list[str]:
    """One row per strategy that had a trial under `allow="reduced"`, over the seeds."""
    seeds = variants["reduced"]["strategies"]
    names = sorted({name for seed in seeds for name in seed})
    lines = ["| strategy | gain in its own trial, per seed | verdict |", "|---|---|---|"]
    for name in names:
        rows = [seed[name] for seed in seeds if name in seed]
        gains = ", ".join(f"{row['gain']:.2f}x [{row['gain_low']:.2f}, {row['gain_high']:.2f}]" for row in rows)
        lines.append(f"| `{name}` | {gains} | {', '.join(row['status'] for row in rows)} |")
    return lines


def table_block(result: dict[str, Any]) -> str:
    """Return the never-slower table as Markdown."""
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']}, torch {result['torch']}. "
        f"Accelerated ÷ plain step time after the search; below 1 is faster; limit {result['limit']}.",
        "",
        "| loop | plain ms | accelerated ÷ plain [95 %] |",
        "|---|---|---|",
    ]
    for row in result["loops"]:
        lines.append(
            f"| {row['loop']} | {row['plain_ms']:.2f} | {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}] |"
        )
    return "\n".join(lines)


def faults_block(result: dict[str, Any]) -> str:
    """Return the fault matrix as Markdown."""
    summary, rivals = result["summary"], result["summary"]["rivals"]
    names = list(rivals)
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']}, torch {result['torch']}. Saved: share of a "
        f"step's (or sample's) time, as predicted or found by experiment, and by the remedy itself, "
        f"{result['pairs']} interleaved pairs of fresh processes.",
        "",
        f"| | right | false alarms on {summary['controls']} healthy scripts |",
        "|---|---|---|",
        f"| accel | {summary['right']} of {summary['cases']} | {summary['false_alarms']} |",
        *(f"| {n} | {r['right']} of {r['cases']} | {r['false_alarms']} |" for n, r in rivals.items()),
        "",
        f"| script | accel says | accel: saves | the remedy saved | {' | '.join(names)}{' |' if names else ''}",
        "|---|---|---|---|" + "---|" * len(names),
    ]
    return "\n".join(lines + [_fault_row(case, names) for case in result["cases"]])


def _fault_row(case: dict[str, Any], rivals: list[str]) -> str:
    answer = case["answer"]
    told = answer["measured"] or answer["predicted"]
    said = f"`{answer['cause']}`" if answer["cause"] else "no verdict"
    remedy = f"{case['remedy']['saving']:.0%} ({case['case']['remedy']})" if case["remedy"] else ""
    others = [case["rivals"][name] for name in rivals]
    cells = [
        case["case"]["name"],
        said + ("" if case["right"] else " ✗"),
        f"{told['value']:.0%}" if told else "",
        remedy,
        *(f"{(found['verdict'] or 'nothing')[:60]}{'' if found['right'] else ' ✗'}" for found in others),
    ]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def simota_block(result: dict[str, Any]) -> str:
    """Return the race of SimOTA on a CPU."""
    race = result["cpu"]
    return "\n".join(
        [
            f"`{result['command']}`, {result['date']}, {result['machine']}, torch {result['torch']}, "
            f"{race['threads']} threads, {race['rounds']} interleaved rounds; median and 20 to 80 % of them.",
            "",
            "| | ms a batch | speed-up |",
            "|---|---|---|",
            f"| loop over images, as published | {race['loop_ms']:.0f} | 1 |",
            f"| `simota_assign` | {race['ours_ms']:.1f} | {race['ratio']:.1f}x "
            f"[{race['ratio_p20']:.1f}, {race['ratio_p80']:.1f}] |",
        ]
    )


def fcos_block(result: dict[str, Any]) -> str:
    """Return the races of FCOS targets on a CPU."""
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']}, torch {result['torch']}. {result['what']}; "
        f"interleaved rounds, median and quartiles.",
        "",
        "| | baseline ms | accel ms | speed-up |",
        "|---|---|---|---|",
    ]
    for row, found in result["ratios"].items():
        lines.append(
            f"| {row} | {found['baseline_ms']:.3g} | {found['ours_ms']:.3g} | {found['ratio']:.1f}x "
            f"[{found['low']:.1f}, {found['high']:.1f}] |"
        )
    return "\n".join(lines)


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


BLOCKS: dict[str, tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...]] = {
    "README.md": (
        ("demo", "demo-*.json", demo_block),
        ("table", "never-slower-reordered-*.json", table_block),
        ("faults", "fault-matrix-cpu-*.json", faults_block),
    ),
    "docs/loader.md": (("loaders", "loaders-cpu-*.json", loaders_block),),
    "docs/kernels.md": (
        ("simota", "simota-cpu-*.json", simota_block),
        ("fcos", "fcos-targets-cpu-*.json", fcos_block),
    ),
}
"""Page → its blocks: name, the results it is made from, and how."""


def filled(page: str, text: str) -> str:
    """Return a page with its blocks filled; a block without results stays as it is."""
    for name, pattern, make in BLOCKS[page]:
        result = newest(pattern)
        if result is not None:
            block = f"<!-- {name}:begin -->\n{make(result)}\n<!-- {name}:end -->"
            begin, end = text.index(f"<!-- {name}:begin -->"), text.index(f"<!-- {name}:end -->")
            text = text[:begin] + block + text[end + len(f"<!-- {name}:end -->") :]
    return text


@click.command()
@click.option("--check", is_flag=True, help="Exit with 1 if a page is out of date.")
def main(check: bool) -> None:
    """Fill the pages' figures."""
    old = {page: (_ROOT / page).read_text(encoding="utf-8") for page in BLOCKS}
    new = {page: filled(page, text) for page, text in old.items()}
    if check:
        sys.exit(old != new)
    for page, text in new.items():
        write_atomic(_ROOT / page, text)


if __name__ == "__main__":
    main()

"""Tables of the README and the manual, one per kind of result: a committed result in, Markdown out."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.demo_promise import wanted_text


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
            f"{wanted_text(v['wanted'])}, ±0.5 |"
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
    names, told = list(rivals), result.get("rivals_date", result["date"])
    when = result["date"] if told == result["date"] else f"{result['date']} ({' and '.join(names)}: {told})"
    lines = [
        f"`{result['command']}`, {when}, {result['machine']}, torch {result['torch']}. Saved: share of a "
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

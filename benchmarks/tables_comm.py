"""Tables of the manual's page on communication: a committed result in, Markdown out."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]


def hooks_block(result: Result) -> str:
    """Return steps on shaped links, by hook."""
    lines = [
        f"{result['date']}, {result['machine']}, {result['cores']} cores, torch {result['torch']}, gloo. Hosts are "
        "network namespaces; ranks: hosts x ranks of each; 25 M parameters, 100 MB of gradients. Each hook took turns "
        "with DDP itself in one launch; median, lowest and highest round. Commands stand in the result.",
        "",
        "| ranks | link | hook | s per step | speed-up | MB sent by a host | of theory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['shape']} | {row['rate']} | {row['method']} | {row['step_s']:.3f} | {_times(row)} | "
            f"{row['sent_mb']:.2f} | {row['of_theory']:.3f} |"
        )
    return "\n".join(lines)


def launches_block(result: Result) -> str:
    """Return how many launches ended well."""
    rows = [
        f"{row['good']} of {row['launches']} launches of {row['shape']} with {len(row['hooks'])} hooks each, "
        f"`{row['command']}`, ended well, replicas equal."
        for row in result["rows"]
    ]
    return f"{result['date']}, {result['machine']}, torch {result['torch']}: {' '.join(rows)}"


def costs_block(result: Result) -> str:
    """Return bytes, processor time and memory of each compressor."""
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']}, torch {result['torch']}: {result['what']}.",
        "",
        "| compressor | MB sent | of the gradients | CPU-ms | copies of the gradients kept |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['compressor']} | {row['sent_mb']:.3f} | {row['of_gradients']:.2%} | {row['cpu_ms']:.1f} "
            f"[{row['cpu_low_ms']:.1f}, {row['cpu_high_ms']:.1f}] | {row['copies']} |"
        )
    return "\n".join(lines)


def choice_block(result: Result) -> str:
    """Return what was chosen automatically, against the best fixed way."""
    lines = [
        f"{result['date']}, {result['machine']}, torch {result['torch']}, gloo. Ways take turns in one launch; median "
        "and 20 to 80 % of rounds. Commands stand in the result. DDP again: a second DDP in the same turns; it shows "
        "how far apart two of the same are.",
        "",
        "| ranks | link | model | allowed | chosen | speed-up over DDP | DDP again | step ÷ best fixed | predicted ÷ "
        "measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    again = {_setting(row): _times(row) for row in result["rows"] if row["method"] == "ddp again"}
    for row in result["rows"]:
        if row["method"].startswith("auto"):
            best = f"{row['of_best']:.3f} [{row['of_best_low']:.2f}, {row['of_best_high']:.2f}]"
            lines.append(
                f"| {row['shape']} | {row['rate']} | {row['model']} | {row['method'].removeprefix('auto ')} | "
                f"{row['chosen']} | {_times(row)} | {again.get(_setting(row), '')} | {best} | "
                f"{row['predicted_s'] / row['step_s']:.2f} |"
            )
    return "\n".join(lines)


def _setting(row: Result) -> tuple[Any, ...]:
    return row["shape"], row["rate"], row["model"]


def accuracy_block(result: Result) -> str:
    """Return accuracy after the same steps."""
    lines = [
        f"`python -m benchmarks.comm_accuracy`, {result['date']}, {result['machine']}, torch {result['torch']}. Same "
        f"weights, batches and learning rates for one seed; SGD with {_optimizers(result)}, which 1-bit and DGC take "
        "over, but for those called alone. Difference to dense gradients: mean, and the worst and best seed; in points "
        "of accuracy, or in parts of the loss.",
        "",
        "| task | sent | seeds | score | better than dense by | within the limit |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["compared"]:
        score = f"{row['mean']:.2f} {row['unit']}" if "%" in row["unit"] else f"{row['mean']:.4f} {row['unit']}"
        if "better_by" not in row:
            lines.append(f"| {row['task']} | {row['method']} | {row['seeds']} | {score} | | |")
            continue
        unit = "{:+.2f}" if row["limit"] > 0.1 else "{:+.2%}"
        mean, low, high = (unit.format(row[name]) for name in ("better_by", "lowest", "highest"))
        limit = f"{row['limit']:g}" if row["limit"] > 0.1 else f"{row['limit']:.0%}"
        lines.append(
            f"| {row['task']} | {row['method']} | {row['seeds']} | {score} | {mean} [{low}, {high}] | "
            f"{'yes' if row['within'] else 'no'} ({limit}) |"
        )
    return "\n".join(lines)


def _optimizers(result: Result) -> str:
    return "; ".join(dict.fromkeys(row.get("optimizer", "momentum=0.9") for row in result["rows"]))


def _times(row: Result) -> str:
    return f"{row['speedup']:.2f}x [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"

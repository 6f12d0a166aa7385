"""The table that decides, from what benchmarks/gpu/decisive.py has measured: rows, means, what was refused, targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu import targets
from benchmarks.render import Cell, Row, table
from benchmarks.spread import geometric_mean

COMPARED = (
    *(("by hand", "plain"), ("TF32", "plain"), ("compile", "plain"), ("reduced", "plain"), ("reordered", "plain")),
    *(("reduced", "compile"), ("reduced", "by hand"), ("second", "plain"), ("second", "by hand")),
)
ACCEL = ("reduced", "second", "reordered")
DECIDED = ("refused", "undone", "not tried")
JUDGED = {True: "met", False: "**missed**", None: "not judged"}


def ways(figures: Row) -> dict[str, dict[str, Row]]:
    """Return the rows that did not fail, by model and way."""
    models: dict[str, dict[str, Row]] = {}
    for part in ("table", "second"):
        for row in figures.get(part, {}).get("rows", []):
            if "failed" not in row:
                models.setdefault(row["model"], {})[row["way"]] = row
    return models


def ratios(models: dict[str, dict[str, Row]], way: str, base: str) -> dict[str, float]:
    """Return how many times as fast a way is as another, by model."""
    both = {model: rows for model, rows in models.items() if way in rows and base in rows}
    return {model: rows[way]["steps_per_s"] / rows[base]["steps_per_s"] for model, rows in both.items()}


def loss(rows: dict[str, Row], way: str) -> float | None:
    """Return the mean loss of ten steps after as many samples as the plain loop came to, in the same time."""
    count = len(rows["plain"]["losses"]) if "plain" in rows else 0
    losses: list[float] = rows[way]["losses"]
    return losses[count - 1] if 0 < count <= len(losses) else None


def text(figures: Row) -> str:
    """Return all tables as Markdown, which a terminal shows as well."""
    models = ways(figures)
    lines = [f"`{figures['command']}`, {figures['date']}, {figures['device']}, torch {figures['torch']}."]
    lines += _section("Ceilings", _ceilings(figures.get("ceilings", {})))
    if models:
        lines += ["", "Steps a second over the last 60 % of a process's time, and over its last 20 %; memory while it"]
        lines[-1] += " trains on, and at most; loss after as many samples as the plain loop had seen."
        lines += ["", *table(_columns(), _shown(models))]
    lines += _section("Geometric means", list(means(models)))
    lines += _section("Refused, undone or not tried", list(refused(models)))
    lines += _section("Seconds to compile", list(_compiling(figures)))
    lines += _section("Beside it", list(_races(figures)))
    if models:
        judged: dict[str, Cell] = {
            "target": lambda row: row["line"].replace("|", r"\|"),
            "asked": "{asked}",
            "found": lambda row: None if row["found"] is None else f"{row['found']:.3g}",
            "": lambda row: JUDGED[row["met"]],
        }
        green = figures.get("tests", {}).get("green", False)
        lines += ["", *table(judged, targets.held_to(lines_of(models), green))]
    if tests := figures.get("tests", {}).get("line"):
        lines += ["", f"Tests: {tests}"]
    return "\n".join(lines)


def block(result: Row) -> str:
    """Return the tables for the manual."""
    return (
        text(result) if ways(result) else "Nothing has been recorded yet: these calls are newer than all figures here."
    )


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", "", *(f"- {line}" for line in lines)] if lines else []


def _columns() -> dict[str, Cell]:
    return {
        "model": "{model}",
        "way": "{way}",
        "steps/s": lambda row: f"{row['steps_per_s']:.3g}, {row['end_steps_per_s']:.3g}",
        "over plain": _over("plain"),
        "over by hand": _over("by hand"),
        "GB": lambda row: f"{row['held_peak_mb'] / 1e3:.1f}, {row['peak_mb'] / 1e3:.1f}",
        "loss": lambda row: None if row["loss"] is None else f"{row['loss']:.4f}",
        "first step s": "{first_step_s:.1f}",
        "kept": lambda row: ", ".join(f"`{name}`" for name in row["kept"]) or None,
    }


def _over(base: str) -> Cell:
    def cell(row: Row) -> str | None:
        rows: dict[str, Row] = row["rows"]
        return f"{row['steps_per_s'] / rows[base]['steps_per_s']:.2f}x" if base in rows else None

    return cell


def _shown(models: dict[str, dict[str, Row]]) -> Iterator[Row]:
    for rows in models.values():
        for way, row in rows.items():
            yield {**row, "rows": rows, "loss": loss(rows, way)}


def means(models: dict[str, dict[str, Row]]) -> Iterator[str]:
    """Yield how the ways compare over all models that have both."""
    for way, base in COMPARED:
        if by_model := ratios(models, way, base):
            least = min(by_model, key=lambda model: by_model[model])
            mean = geometric_mean(list(by_model.values()))
            shown = f"{mean:.2f}x over {', '.join(by_model)}"
            yield f"{way} over {base}: {shown}; least {least}, {by_model[least]:.2f}x"


def refused(models: dict[str, dict[str, Row]]) -> Iterator[str]:
    """Yield what accel did not keep, and why."""
    for model, rows in models.items():
        for way in (way for way in ACCEL if way in rows):
            reasons: dict[str, list[str]] = {}
            for each in rows[way]["strategies"]:
                if each["status"] in DECIDED:
                    gain = "" if each["gain"] is None else f" at {each['gain']:.2f}x"
                    reason = f"{each['status']}{gain}{': ' if each['why'] else ''}{each['why']}"
                    reasons.setdefault(reason, []).append(f"`{each['name']}`")
            yield from (f"{model}, {way}: {', '.join(names)} {reason}" for reason, names in reasons.items())


def _ceilings(figures: Row) -> list[str]:
    parts = [f"copy {figures['copy_gb_per_s']:,.0f} GB/s"] if "copy_gb_per_s" in figures else []
    parts += [f"{name} products {value:,.3g} TFLOP/s" for name, value in figures.get("tflops", {}).items()]
    from_host: dict[str, float] = figures.get("from_host_gb_per_s", {})
    return [*parts, *(f"from {name} memory of the host {value:.1f} GB/s" for name, value in from_host.items())]


def _compiling(figures: Row) -> Iterator[str]:
    for row in figures.get("compiling", {}).get("rows", []):
        status = f", {row['status']}: {row['why']}" if row.get("status", "kept") != "kept" else ""
        figure = row.get("failed") or f"{row.get('compile_s', row['device_s']):.0f} s{status}"
        yield f"{row['model']}, {row['variant']}: {figure}"


def _races(figures: Row) -> Iterator[str]:
    for row in figures.get("overhead", {}).get("rows", []):
        more = f", {row['over_by_hand_us']:+.0f} µs" if "over_by_hand_us" in row else ""
        spread = f"[{row['low']:,.0f}, {row['high']:,.0f}]"
        yield f"a step of a small network, {row['way']}: {row['us']:,.0f} µs {spread}{more}"
    for name, (ratio, low, high) in figures.get("swin_graphs", {}).get("speedup", {}).items():
        yield f"Swin-T, {name}: {ratio:.2f}x [{low:.2f}, {high:.2f}]"
    for row in figures.get("graphs", {}).get("rows", []):
        yield f"captured step of a small {row['model']}: {_against(row)}"
    for row in figures.get("gradient_kernels", {}).get("rows", []):
        yield f"{row['op']}: {_against(row)}"
    for row in figures.get("simota_warps", {}).get("rows", []):
        yield f"SimOTA, {row['warps']} warps: {row.get('failed') or '{median:.2f} ms'.format(**row['device_ms'])}"


def _against(row: Row) -> str:
    if "failed" in row:
        return str(row["failed"])
    return ", ".join(f"{times:.2f}x over {rival}" for rival, times in row["speedup"].items())


def lines_of(models: dict[str, dict[str, Row]]) -> Iterator[targets.Line]:
    """Yield what the table is held to, and what was found."""
    for way, asked in (("reduced", 0.90), ("second", 0.97)):
        by_model = ratios(models, way, "by hand")
        yield f"{way} over by hand, geometric mean", ">=", asked, "x", _mean(by_model)
    least = [ratio for way in ACCEL for ratio in ratios(models, way, "plain").values()]
    yield "accel over plain, the least of all", ">=", 0.98, "x", min(least, default=None)
    both = [rows for rows in models.values() if "plain" in rows and "second" in rows]
    without = [rows for rows in both if "cuda_graphs" not in rows["second"]["kept"]]
    memory = [rows["second"]["held_peak_mb"] / rows["plain"]["held_peak_mb"] for rows in without]
    yield "memory of second over plain, without graphs, the most", "<=", 1.05, "x", max(memory, default=None)
    yield "loss: |accel - plain| / |plain - another seed|, the most", "<=", 1.0, "", max(_apart(models), default=None)


def _mean(by_model: dict[str, float]) -> float | None:
    return geometric_mean(list(by_model.values())) if by_model else None


def _apart(models: dict[str, dict[str, Row]]) -> Iterator[float]:
    for rows in models.values():
        found: dict[str, Any] = {way: loss(rows, way) for way in rows}
        plain, other = found.get("plain"), found.get("plain, another seed")
        if plain is not None and other is not None and plain != other:
            yield from (abs(found[way] - plain) / abs(plain - other) for way in ACCEL if found.get(way) is not None)

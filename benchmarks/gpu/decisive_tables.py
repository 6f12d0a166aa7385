"""The table that decides, from what benchmarks/gpu/decisive.py has measured: rows, means, what was refused, targets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu import targets
from benchmarks.gpu.results import is_green
from benchmarks.render import Cell, Row, table
from benchmarks.spread import geometric_mean

ACCEL = ("reduced", "second", "reordered")
RACES = ("overhead", "graphs", "gradient_kernels", "simota_warps", "swin_graphs")
"""Sections of `second`; all but the first need a GPU."""
DECIDED = ("inconclusive", "refused", "undone", "not tried")


def ways(figures: Row) -> dict[str, dict[str, Row]]:
    """Return the rows of this version, by model and way; a second run is one that had something to remember."""
    models: dict[str, dict[str, Row]] = {}
    for part in ("table", "second"):
        for row in figures.get(part, {}).get("rows", []):
            if "settled_peak_mb" in row and (row["way"] != "second" or row["remembered"]):
                models.setdefault(row["model"], {})[row["way"]] = row
    return models


def ratios(models: dict[str, dict[str, Row]], way: str, base: str) -> dict[str, float]:
    """Return how many times as fast a way is as another, by model; not while a search goes on."""
    both = {model: rows for model, rows in models.items() if way in rows and base in rows}
    both = {model: rows for model, rows in both.items() if rows[way]["search"] != "searching"}
    return {model: rows[way]["steps_per_s"] / rows[base]["steps_per_s"] for model, rows in both.items()}


def loss(rows: dict[str, Row], way: str) -> float | None:
    """Return the mean loss of ten steps after as many samples as the plain loop came to, in the same time."""
    references = [len(rows[name]["losses"]) for name in ("plain", "plain, another seed") if name in rows]
    count = min(references, default=0) if "plain" in rows else 0
    losses: list[float] = rows[way]["losses"]
    return losses[count - 1] if 0 < count <= len(losses) else None


def text(figures: Row) -> str:
    """Return all tables as Markdown, which a terminal shows as well; what matters most comes last."""
    models = ways(figures)
    lines = [f"`{figures['command']}`, {figures['date']}, {figures['device']}, torch {figures['torch']}."]
    if tests := figures.get("tests", {}).get("line"):
        lines[0] += f" Tests: {tests}."
    lines += _section("Ceilings", list(_ceilings(figures.get("ceilings", {}))))
    lines += _section("Seconds to compile, several at a time", list(_compiling(figures)))
    lines += _section("Beside it", list(_races(figures)))
    lines += _section("Refused, undone or not tried", list(refused(models)))
    if not models:
        return "\n".join(lines)
    lines += [
        "",
        "GB of memory while it trains on, and at most; loss after as many samples as the plain loop had seen:",
    ]
    lines += ["", *table(DETAILS, _details(models))]
    lines += [
        "",
        "Plain steps a second, and how many times as many in other ways, once each has settled:",
    ]
    lines += ["", *table(SPEEDS, _speeds(models)), ""]
    return "\n".join([*lines, *table(JUDGED, targets.held_to(lines_of(models), is_green(figures)))])


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", "", *(f"- {line}" for line in lines)] if lines else []


def _speeds(models: dict[str, dict[str, Row]]) -> Iterator[Row]:
    """Yield the ratios of each model, and their means."""
    over_plain = {way: ratios(models, way, "plain") for way in SHOWN}
    for model, rows in models.items():
        steps = f"{rows['plain']['steps_per_s']:.3g}" if "plain" in rows else ""
        yield {"model": model, "plain": steps, **{way: _times(found.get(model)) for way, found in over_plain.items()}}
    for base, words in (("plain", "geometric mean"), ("by hand", "geometric mean, over by hand")):
        means = {way: _times(_mean(ratios(models, way, base))) for way in SHOWN}
        yield {"model": words, "plain": "", **means}


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _details(models: dict[str, dict[str, Row]]) -> Iterator[Row]:
    for model, rows in models.items():
        for way in ("plain", "by hand", *ACCEL):
            if way in rows:
                by_hand = ratios(models, way, "by hand").get(model)
                yield {**rows[way], "over_by_hand": _times(by_hand), "loss": loss(rows, way)}


def _if_any(column: str, row: Row) -> str | None:
    return row[column] or None


SHOWN = ("TF32", "compile", "by hand", "reordered", "reduced", "second")
SPEEDS: dict[str, Cell] = {"model": "{model}", **{way: partial(_if_any, way) for way in ("plain", *SHOWN)}}
DETAILS: dict[str, Cell] = {
    "model": "{model}",
    "way": "{way}",
    "over by hand": "{over_by_hand}",
    "search": lambda row: row["search"] or None,
    "GB": lambda row: f"{row['settled_peak_mb'] / 1e3:.1f}, {row['peak_mb'] / 1e3:.1f}",
    "loss": lambda row: None if row["loss"] is None else f"{row['loss']:.4f}",
    "first step s": "{first_step_s:.1f}",
    "kept": lambda row: ", ".join(f"`{name}`" for name in row["kept"]) or None,
}
JUDGED: dict[str, Cell] = {
    "target": lambda row: row["line"].replace("|", r"\|"),
    "asked": "{asked}",
    "found": lambda row: None if row["found"] is None else f"{row['found']:.3g}",
    "": lambda row: {True: "met", False: "**missed**", None: "not judged"}[row["met"]],
}


def refused(models: dict[str, dict[str, Row]]) -> Iterator[str]:
    """Yield what accel did not keep, and why: what has one reason in the same ways is one line."""
    for model, rows in models.items():
        tried: dict[tuple[str, str], list[str]] = {}
        for way in (way for way in ACCEL if way in rows):
            for each in rows[way]["strategies"]:
                if each["status"] in DECIDED:
                    gain = "" if each["gain"] is None else f" at {each['gain']:.2f}x"
                    reason = f"{each['status']}{gain}{': ' if each['why'] else ''}{each['why']}"
                    tried.setdefault((each["name"], reason), []).append(way)
        lines: dict[tuple[str, str], list[str]] = {}
        for (name, reason), seen in tried.items():
            lines.setdefault((", ".join(seen), reason), []).append(f"`{name}`")
        yield from (f"{model}, {seen}: {', '.join(names)} {reason}" for (seen, reason), names in lines.items())


def _ceilings(figures: Row) -> Iterator[str]:
    if "copy_gb_per_s" in figures:
        yield f"copy {figures['copy_gb_per_s']:,.0f} GB/s"
    if tflops := figures.get("tflops"):
        yield "products, TFLOP/s: " + ", ".join(f"{name} {value:,.1f}" for name, value in tflops.items())
    if speeds := figures.get("from_host_gb_per_s"):
        yield "from the host, GB/s: " + ", ".join(f"{name} {value:.1f}" for name, value in speeds.items())


def _compiling(figures: Row) -> Iterator[str]:
    for row in figures.get("compiling", {}).get("rows", []):
        status = f", {row['status']}: {row['why']}" if row.get("status", "kept") != "kept" else ""
        figure = row.get("failed") or f"{row.get('compile_s', row['device_s']):.0f} s{status}"
        yield f"{row['model']}, {row['variant']}: {figure}"


def _races(figures: Row) -> Iterator[str]:
    for name in RACES:
        if "failed" in figures.get(name, {}):
            yield f"{name}: {figures[name]['failed']}"
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
        figure = row.get("failed") or "{median:.2f} ms".format_map(row["device_ms"])
        yield f"SimOTA, warps of a program {row['warps']}: {figure}"


def _against(row: Row) -> str:
    if "failed" in row:
        return str(row["failed"])
    return ", ".join(f"{times:.3g}x over {rival}" for rival, times in row["speedup"].items())


def lines_of(models: dict[str, dict[str, Row]]) -> Iterator[targets.Line]:
    """Yield what the table is held to, and what was found."""
    for way, asked in (("reduced", 0.90), ("second", 0.97)):
        by_model = ratios(models, way, "by hand")
        yield f"{way} over by hand, geometric mean", ">=", asked, "x", _mean(by_model)
    least = [ratio for way in ACCEL for ratio in ratios(models, way, "plain").values()]
    yield "accel over plain, the least of all", ">=", 0.98, "x", min(least, default=None)
    ended = [models[model] for model in ratios(models, "second", "plain")]
    without = [rows for rows in ended if "cuda_graphs" not in rows["second"]["kept"]]
    memory = [rows["second"]["settled_peak_mb"] / rows["plain"]["settled_peak_mb"] for rows in without]
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

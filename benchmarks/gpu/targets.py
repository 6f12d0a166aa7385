"""What the GPU suite's figures are held to: each line of the targets, what was asked, what was found, and if it is met.

Kernels are judged by what the device takes: the median of replays of a graph over inputs that no cache holds
(benchmarks/gpu/device_times.py). What a caller waits for, launched, stands beside it in the results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Figures = dict[str, Any]
Found = float | None
Line = tuple[str, str, float, str, Found]
"""What is asked, the sign, the figure, its unit, and what was found."""

SECTIONS = (
    "window_attention",
    "assignment",
    "optimizers",
    "graphs",
    "mixed_precision",
    "training",
    "copy_overlap",
)
"""That are held to targets."""
RIVALS = ("sdpa", "flex", "compile")
LEAST_BATCH = 32
"""From which on speed, and not the number of launches, is asked for."""
_SIGNS: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, ">": operator.gt}

_RATIOS = {
    "Swin-T training, fused over eager": "fused over eager",
    "Swin-T training, fused over compile alone": "fused over compile",
    "Swin-T training, fused and compiled over compile": "both over compile",
}
"""Lines whose figure is a median over turns."""


def judged(figures: Figures, green: bool) -> list[Figures]:
    """Return a row for each target; `found` is None where nothing was measured, and `met` where nothing is claimed.

    Args:
        figures: of the suite, section by section; sections may be missing, or hold a part of their rows.
        green: the tests passed, of the sources as they are.
    """
    rows = held_to(_lines(figures), green)
    for row in rows:
        if spread := _spread(figures, row["line"]):
            row["spread"] = spread
    return rows


def held_to(lines: Iterable[Line], green: bool) -> list[Figures]:
    """Return a row for each line; nothing is claimed where tests are not green."""
    rows: list[Figures] = []
    for line, sign, asked, unit, found in lines:
        met = None if found is None or not green else _SIGNS[sign](found, asked)
        rows.append({"line": line, "asked": f"{sign} {asked:.3g}{unit}", "found": found, "met": met})
    return rows


def _spread(figures: Figures, line: str) -> list[float]:
    """Return the least and the most of the turns; nothing where a line has no turns."""
    ratios: list[float] = figures.get("training", {}).get("speedup", {}).get(_RATIOS.get(line), [])
    return ratios[1:]


def _lines(figures: Figures) -> Iterator[Line]:
    window = _whole(figures, "window_attention")
    yield "window attention, both ways, B >= 32: share of roofline", ">=", 0.7, "", _roofline(window)
    yield "window attention, forward, B = 1", "<=", 10.0, " us", _forward_us(window)
    yield "window attention, both ways, B >= 32, over timm fused", ">=", 1.8, "x", _over(window, ("timm fused",))
    yield "window attention, both ways, B >= 32, over the best rival", ">=", 1.5, "x", _over(window, RIVALS)
    assignment = figures.get("assignment", {})
    yield "SimOTA, B = 64, 100 boxes", "<=", 2.0, " ms", _simota_ms(assignment.get("simota", []))
    yield "FCOS and FCOS3D targets, 8 images", "<=", 20.0, " us", _targets_us(_whole(figures, "assignment", "fcos"))
    optimizers = {row["op"]: row for row in figures.get("optimizers", {}).get("rows", []) if "failed" not in row}
    adamw = optimizers.get("adamw", {})
    yield "AdamW, 100 M parameters: share of bandwidth", ">=", 0.85, "", adamw.get("roofline")
    yield "AdamW, 100 M parameters, over torch fused", ">=", 1 / 1.05, "x", _speedup(adamw, "torch fused")
    three = optimizers.get("unscale, clip, adamw", {})
    yield "unscale, clip and AdamW, over torch's three", ">=", 1.4, "x", _speedup(three, "torch in three")
    yield "LAMB and LARS, over loops", ">=", 5.0, "x", _loops(optimizers)
    graphs = _whole(figures, "graphs")
    yield "captured steps over eager, MLP and transformer", ">=", 2.0, "x", _least(graphs, "eager")
    yield "captured steps over compile's own graphs", ">=", 1.05, "x", _least(graphs, "reduce-overhead")
    mixed = _whole(figures, "mixed_precision")
    yield "BERT-base at O2 over autocast, both dtypes", ">=", 1.15, "x", _worst(mixed, "speedup", min)
    yield "BERT-base at O2: memory of autocast's", "<=", 1.0, "x", _worst(mixed, "memory", max)
    training = figures.get("training", {})
    speedup = training.get("speedup", {})
    yield "Swin-T training, fused over eager", ">=", 1.2, "x", _first(speedup.get("fused over eager"))
    yield "Swin-T training, fused over compile alone", ">", 1.0, "x", _first(speedup.get("fused over compile"))
    yield "Swin-T training, fused and compiled over compile", ">", 1.0, "x", _first(speedup.get("both over compile"))
    yield "loss after 200 steps: |fused - eager| / |eager - eager again|", "<=", 2.0, "", _apart(training)
    ways = figures.get("copy_overlap", {}).get("ways", {})
    yield "step with batches copied one ahead", "<=", 1.02, "x", ways.get("continuous, one ahead", {}).get("ratio")


def _whole(figures: Figures, section: str, part: str = "rows") -> list[Figures]:
    """Return rows of a section; none where it was ended before it had them all: the worst may be among the others."""
    found: Figures = figures.get(section, {})
    return [] if "failed" in found else found.get(part, [])


def _times(rows: list[Figures], op: str) -> dict[int, Figures]:
    return {row["batch"]: row for row in rows if row["op"] == op and "failed" not in row}


def _roofline(rows: list[Figures]) -> Found:
    return min((r["roofline_both"] for b, r in _times(rows, "fused").items() if b >= LEAST_BATCH), default=None)


def _forward_us(rows: list[Figures]) -> Found:
    row = _times(rows, "fused").get(1)
    return None if row is None else float(row["forward_device_ms"]["median"]) * 1e3


def _over(rows: list[Figures], rivals: tuple[str, ...]) -> Found:
    """Return the least ratio over the batch sizes of the fastest rival to the fused op; rivals that failed aside."""
    ratios = []
    for batch, row in _times(rows, "fused").items():
        others = [_times(rows, name).get(batch) for name in rivals]
        took = [other["both_device_ms"]["median"] for other in others if other is not None]
        if batch >= LEAST_BATCH and took:
            ratios.append(min(took) / row["both_device_ms"]["median"])
    return min(ratios, default=None)


def _simota_ms(rows: list[Figures]) -> Found:
    found = [r for r in rows if (r["images"], r["boxes"], "failed" in r) == (64, 100, False)]
    return found[0]["device_ms"]["median"] if found else None


def _targets_us(rows: list[Figures]) -> Found:
    """Return the slowest of the assignments; None if one failed."""
    if not rows or any("failed" in row for row in rows):
        return None
    return 1e3 * max(float(row["ours_device_ms"]["median"]) for row in rows)


def _speedup(row: Figures, rival: str) -> Found:
    found_ratio: Found = row.get("speedup", {}).get(rival)
    return found_ratio


def _loops(rows: dict[str, Figures]) -> Found:
    """Return the smaller gain of LAMB and LARS, as a caller sees it; None if one is missing."""
    gains = [rows[op]["speedup_called"]["loop"] for op in ("lamb", "lars") if op in rows]
    return min(gains) if len(gains) == 2 else None


def _least(rows: list[Figures], rival: str) -> Found:
    """Return the smallest gain over a rival; None if a model is missing, or the rival failed on all."""
    if not rows or any("failed" in row for row in rows):
        return None
    return min((row["speedup"][rival] for row in rows if rival in row["speedup"]), default=None)


def _worst(rows: list[Figures], figure: str, of: Callable[[list[float]], float]) -> Found:
    """Return the worst of all rows; None if one failed."""
    if not rows or any("failed" in row for row in rows):
        return None
    return of([row[figure] for row in rows])


def _first(ratios: list[float] | None) -> Found:
    return ratios[0] if ratios else None


def _apart(training: Figures) -> Found:
    last = training.get("last_loss", {})
    if not {"eager", "fused", "eager again"} <= last.keys():
        return None
    noise = abs(last["eager"] - last["eager again"])
    apart = abs(last["fused"] - last["eager"])
    return apart / noise if noise else (0.0 if apart == 0 else float("inf"))


def table(rows: list[Figures]) -> str:
    """Return the targets as text, one a line."""
    words = {True: "met", False: "MISSED", None: "not judged"}
    lines = []
    for row in rows:
        found = "-" if row["found"] is None else f"{row['found']:.3g}"
        lines.append(f"{words[row['met']]:11} {row['line']:62} {row['asked']:>10}   found {found}")
    return "\n".join(lines)

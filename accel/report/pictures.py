"""Pictures on a page, made of SVG's elements: bars, the timeline of the steps and the roofline.

Places along a picture are in percent of its width, so that it stretches while its text keeps its size; heights are in
pixels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from accel.profiler.evidence import OpTime, Roofline
from accel.profiler.report import StepRow
from accel.report import words
from accel.report.blocks import Picture, Shape
from accel.report.terminal import clip
from accel.report.words import clean, finite, ms_text

SHADES = 10
"""Number of fill classes in the style sheet; phases beyond it share them, and are distinguished by their numbers."""
LABEL_CHARS = 34
"""Longest text drawn inside a picture; the whole is in its tooltip and in the tables."""
TIMELINE_HEIGHT = 180
ROOFLINE_HEIGHT = 280
_ROW_HEIGHT = 50
_AXIS_HEIGHT = 22
_TALL = 4.0
"""A step longer than this many medians is cut off, so that the others can be distinguished."""
_MARGIN = 0.2
"""Decades between an end of the roofline's scales and what lies nearest to it, at the least."""
_KINDS = {"matmul": "s0", "elementwise": "s1", "other": "s7"}
"""Kind of operator → fill class of its dot."""


# --- elements --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear scale from `low` at 0 % to `high` at 100 %."""

    high: float
    low: float = 0.0

    def place(self, value: float | None) -> float:
        """Return where `value` lies, in percent, clipped to the axis; 0 for what can't be drawn."""
        span = self.high - self.low
        value = finite(value)
        if value is None or not (math.isfinite(span) and span > 0):
            return 0.0
        return round(min(max((value - self.low) / span, 0.0), 1.0) * 100, 3)

    def ticks(self, unit: str = "") -> list[tuple[float, str]]:
        """Return about four round places on the axis, each with its text."""
        span = self.high - self.low
        # A span of almost nothing has no logarithm once divided.
        if not (math.isfinite(span) and span > 1e-300):
            return []
        power: float = 10.0 ** math.floor(math.log10(span / 4))
        step = next((power * factor for factor in (1, 2, 5) if span / (power * factor) <= 4), power * 10)
        first = math.ceil(self.low / step)
        values = [number * step for number in range(first, first + 6) if number * step <= self.high * (1 + 1e-9)]
        return [(self.place(value), f"{value:.6g}{unit}") for value in values]


class Part(NamedTuple):
    """A part of a bar, in the unit of its axis."""

    shade: str
    """Fill class."""
    name: str
    """Drawn inside, as far as there is room."""
    tooltip: str
    start: float
    end: float


class Bar(NamedTuple):
    """A bar of parts under its label."""

    label: str
    text: str
    """At the right end of the line of the label."""
    parts: Sequence[Part]


def shade(number: int) -> str:
    """Return the fill class of a phase by its number, from 1 on."""
    return f"s{(number - 1) % SHADES}"


def stacked(phases: Mapping[str, float], names: Sequence[str]) -> list[Part]:
    """Lay phases end to end, from zero.

    Args:
        phases: the ms of each.
        names: all phases in the order of their numbers.
    """
    parts, end = [], 0.0
    for name, ms in phases.items():
        start, end = end, end + _length(ms)
        number = names.index(name) + 1
        parts.append(Part(shade(number), f"{number} {name}", f"{name}: {ms_text(ms)} ms", start, end))
    return parts


def strip(parts: Iterable[Part], axis: Axis, top: float = 0, height: float = 14) -> list[Shape]:
    """Draw the parts of a bar."""
    shapes = []
    for part in parts:
        at = axis.place(part.start)
        box = {"x": f"{at}%", "y": top, "width": f"{round(axis.place(part.end) - at, 3)}%", "height": height}
        inside = [Shape("rect", {"class": f"segment {part.shade}", "width": "100%", "height": height})]
        if part.name and height >= 20:  # else there is no room for letters
            inside.append(_text(4, height - 6, _label(part.name), "inside"))
        shapes.append(Shape("svg", box, tooltip=part.tooltip, inside=inside))
    return shapes


def _length(value: float | None) -> float:
    """Return a number that can be drawn: 0 for what is missing, negative or infinite."""
    return max(finite(value) or 0.0, 0.0)


def _label(text: str) -> str:
    return clip(clean(text[:200]), LABEL_CHARS)


def _text(x: str | float, y: float, text: str, kind: str | None = None, anchor: str = "start") -> Shape:
    return Shape("text", {"class": kind, "x": x, "y": y, "text-anchor": anchor}, text)


def _tick(at: float, y: float, text: str) -> Shape:
    """Label a place on the horizontal axis; near an end the label stays inside the picture."""
    return _text(f"{at}%", y, text, "tick", "start" if at < 8 else "end" if at > 92 else "middle")


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Shape:
    return Shape("line", {"class": kind, "x1": f"{x1}%", "y1": y1, "x2": f"{x2}%", "y2": y2})


def _verticals(ticks: Iterable[tuple[float, str]], bottom: float) -> Iterator[Shape]:
    for at, text in ticks:
        yield _line("grid", at, 0, at, bottom)
        yield _tick(at, bottom + 15, text)


def _levels(ticks: Iterable[tuple[float, str]], height: float) -> Iterator[Shape]:
    """Draw the vertical axis, with its labels left of the picture."""
    for at, text in ticks:
        y = _down(at, height)
        yield _line("grid", 0, y, 100, y)
        yield _text(-6, y + 4, text, "tick", "end")


def _down(percent: float, height: float) -> float:
    return round(height * (1 - percent / 100), 2)


# --- bars ------------------------------------------------------------------------------------------------------------


def bars(name: str, title: str, rows: Sequence[Bar], axis: Axis, unit: str, mark: float | None = None) -> Picture:
    """Draw bars below one another on one scale.

    Args:
        name: unique in the document.
        title: of the picture.
        rows: the bars.
        axis: their scale.
        unit: what follows the numbers on the axis.
        mark: where a line crosses all of them.
    """
    bottom = _ROW_HEIGHT * len(rows)
    shapes = list(_verticals(axis.ticks(unit), bottom))
    for top, row in zip(range(0, bottom, _ROW_HEIGHT), rows, strict=True):
        shapes += [_text(0, top + 16, _label(row.label)), _text("100%", top + 16, _label(row.text), anchor="end")]
        shapes += strip(row.parts, axis, top + 23, 20)
    if mark is not None:
        shapes.append(_line("dashed", axis.place(mark), 0, axis.place(mark), bottom))
    return Picture(name=name, title=title, height=bottom + _AXIS_HEIGHT, shapes=shapes)


def phase_bars(title: str, by_label: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> Iterator[Picture]:
    """Draw bars of phases on one scale, unless there is nothing to draw.

    Args:
        title: of the picture.
        by_label: each bar's label, and the ms of its phases.
        names: all phases in the order of their numbers.
    """
    rows = [
        Bar(label, f"{ms_text(sum(map(_length, part.values())))} ms", stacked(part, names))
        for label, part in by_label.items()
        if part
    ]
    if rows:
        yield bars("phases", title, rows, Axis(high=max(row.parts[-1].end for row in rows)), " ms")


# --- timeline --------------------------------------------------------------------------------------------------------


def timeline(rows: Sequence[StepRow], names: Sequence[str]) -> Picture:
    """Draw each step as a column of its phases.

    Args:
        rows: the steps, at least one.
        names: all phases in the order of their numbers.
    """
    times = [_length(row.ms) for row in rows]
    median = statistics.median(times)
    axis = Axis(high=1.04 * max([ms for ms in times if ms <= _TALL * median] or times))
    y = _down(axis.place(median), TIMELINE_HEIGHT)
    shapes = [
        *_levels(axis.ticks(" ms"), TIMELINE_HEIGHT),
        *(_column(row, place, len(rows), names, axis) for place, row in enumerate(rows)),
        _line("dashed", 0, y, 100, y),
        *_step_ticks(rows),
        _text("50%", TIMELINE_HEIGHT + 31, "step", "tick", "middle"),
    ]
    shown = words.phase_names(row.phases_ms for row in rows)
    numbers = sorted(names.index(name) + 1 for name in shown)
    return Picture(
        name="timeline",
        title="Time of each step by phase",
        text=_timeline_text(rows, times, median, axis),
        height=TIMELINE_HEIGHT,
        framed=True,
        shapes=shapes,
        legend=[(shade(number), f"{number} {names[number - 1]}") for number in numbers],
    )


def _column(row: StepRow, place: int, count: int, names: Sequence[str], axis: Axis) -> Shape:
    gap = 0.15 if count <= 60 else 0.0
    at, width = f"{round((place + gap / 2) * 100 / count, 3)}%", f"{round((1 - gap) * 100 / count, 3)}%"
    by_name = {name: row.phases_ms[name] for name in words.phase_names([row.phases_ms])}
    shapes = []
    for part in stacked(by_name, names):
        top, bottom = (_down(axis.place(end), TIMELINE_HEIGHT) for end in (part.end, part.start))
        if bottom > top:
            box = {"x": at, "width": width, "y": top, "height": round(bottom - top, 2)}
            shapes.append(Shape("rect", {"class": part.shade, **box}))
    if _is_cut(row, axis):
        shapes.append(_text(f"{round((place + 0.5) * 100 / count, 3)}%", -2, "▲", "tick", "middle"))
    by_phase = "".join(f", {name} {ms_text(ms)}" for name, ms in by_name.items())
    return Shape("g", {}, tooltip=f"step {row.step}: {ms_text(row.ms)} ms{by_phase}", inside=shapes)


def _is_cut(row: StepRow, axis: Axis) -> bool:
    return max(sum(map(_length, row.phases_ms.values())), _length(row.ms)) > axis.high


def _step_ticks(rows: Sequence[StepRow]) -> Iterator[Shape]:
    """Label the first step, the last and up to three between them."""
    count = min(len(rows), 5)
    for place in sorted({round(n * (len(rows) - 1) / max(count - 1, 1)) for n in range(count)}):
        yield _tick(round((place + 0.5) * 100 / len(rows), 3), TIMELINE_HEIGHT + 15, f"{rows[place].step:.7g}")


def _timeline_text(rows: Sequence[StepRow], times: Sequence[float], median: float, axis: Axis) -> str:
    if len(rows) == 1:
        return f"step {rows[0].step}, {ms_text(times[0])} ms"
    spread = f"{ms_text(min(times))} to {ms_text(max(times))} ms, median {ms_text(median)} ms (dashed)"
    text = f"{len(rows)} steps from {rows[0].step} to {rows[-1].step}, {spread}"
    cut = [f"step {row.step} ({ms_text(row.ms)} ms)" for row in rows if _is_cut(row, axis)]
    more = f" and {len(cut) - 3} more" if len(cut) > 3 else ""
    return f"{text}; taller than the picture (▲): {', '.join(cut[:3])}{more}" if cut else text


# --- roofline --------------------------------------------------------------------------------------------------------


def roofline(ops: Sequence[OpTime], limits: Roofline | None) -> Iterator[Picture]:
    """Draw operators by what they do for each byte, under the limits of the device; both scales are logarithmic.

    Each operator is a dot with the number of its row in the table. Nothing is drawn where no operator or no roof can be
    placed.

    Args:
        ops: in the order of the table.
        limits: what was measured of the device.
    """
    dots = [
        (number, op, op.intensity, op.gflops)
        for number, op in enumerate(ops, start=1)
        if _usable(op.intensity) and _usable(op.gflops)
    ]
    peaks = sorted(peak for peak in limits.gflops.values() if _usable(peak)) if limits else []
    if limits is None or not dots or not peaks or not _usable(limits.gb_per_s):
        return
    copy = limits.gb_per_s
    x = _decades([*(intensity for *_, intensity, _ in dots), *(peak / copy for peak in peaks)])
    y = _decades([*(gflops for *_, gflops in dots), *peaks])
    shapes = [
        *_verticals(_powers(x), ROOFLINE_HEIGHT),
        *_levels(_powers(y), ROOFLINE_HEIGHT),
        _text(-6, -10, "GFLOP/s", "tick", "end"),
        _text("50%", ROOFLINE_HEIGHT + 31, "FLOP per byte", "tick", "middle"),
        *_roofs(peaks, copy, x, y),
    ]
    for number, op, intensity, gflops in dots:
        at, down = _log_place(x, intensity), _log_down(y, gflops)
        circle = {"class": f"dot {_KINDS.get(op.kind, 's7')}", "cx": f"{at}%", "cy": down, "r": 4.5}
        text = Shape("text", {"x": f"{at}%", "y": down + 4, "dx": 8}, str(number))
        tooltip = f"{op.name}: {ms_text(gflops)} GFLOP/s at {ms_text(intensity)} FLOP per byte"
        shapes.append(Shape("g", {}, tooltip=tooltip, inside=[Shape("circle", circle), text]))
    yield Picture(
        name="roofline",
        title="Roofline: GFLOP/s reached over FLOP per byte, both logarithmic",
        text="the numbers are those of the operators in the table",
        height=ROOFLINE_HEIGHT,
        framed=True,
        shapes=shapes,
        legend=[(fill, kind) for kind, fill in _KINDS.items()],
    )


def _usable(value: float | None) -> TypeGuard[float]:
    """Return whether a number can be drawn; values beyond any device would squeeze the others together."""
    return value is not None and 1e-9 < value < 1e15


def _decades(values: Sequence[float]) -> Axis:
    """Return a scale of decimal logarithms in whole decades, with a margin at both ends."""
    low, high = math.log10(min(values)), math.log10(max(values))
    return Axis(low=math.floor(low - _MARGIN), high=math.ceil(high + _MARGIN))


def _log_place(axis: Axis, value: float) -> float:
    return axis.place(math.log10(value))


def _log_down(axis: Axis, value: float) -> float:
    return _down(_log_place(axis, value), ROOFLINE_HEIGHT)


def _powers(axis: Axis) -> list[tuple[float, str]]:
    """Return at most seven powers of ten."""
    powers = range(int(axis.low), int(axis.high) + 1, math.ceil((axis.high - axis.low + 1) / 7))
    return [(axis.place(power), f"{10**power:,}" if 0 <= power < 7 else f"{10.0**power:g}") for power in powers]


def _roofs(peaks: Sequence[float], copy: float, x: Axis, y: Axis) -> Iterator[Shape]:
    """Draw the roof that copied bytes set, up to the highest of the matrix products, and those, the lowest first."""
    ridges = [(_log_place(x, peak / copy), _log_down(y, peak)) for peak in peaks]
    left = max(10.0**x.low, 10.0**y.low / copy)
    yield _line("roof", _log_place(x, left), _log_down(y, left * copy), *ridges[-1])
    for at, down in ridges:
        yield _line("roof", at, down, 100, down)

"""The roofline as a picture: operators by what they do for each byte, under the limits of the device, log by log.

Places are in percent of the picture, so that it stretches. Numbers are moved in pixels around their dots until they
cover neither a dot nor a roof nor one another, in a narrow picture and in a wide one; one without such a place is left
out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel.profiler.evidence import OpTime, Roofline
from accel.report.terminal import ms_text
from accel.report.webpage import Tick, label

HEIGHT = 280
"""Pixels."""
_WIDTHS = (300.0, 980.0)
"""Pixels in which labels must not collide: a telephone's page and a wide one."""
_LINE = 13.0
"""Pixels a line of text takes."""
_KINDS = {"matmul": "s0", "elementwise": "s1"}

# Where a label may stand, in pixels from its dot, the nearest first.
_OFFSETS = [
    *((9.0, 4.0), (-9.0, 4.0), (0.0, -9.0), (0.0, 18.0)),
    *((16.0, -12.0), (-16.0, -12.0), (16.0, 20.0), (-16.0, 20.0)),
    *((30.0, 4.0), (-30.0, 4.0), (26.0, -26.0), (-26.0, -26.0), (26.0, 34.0), (-26.0, 34.0), (0.0, -34.0), (0.0, 42.0)),
]


@dataclass(frozen=True, kw_only=True)
class LogAxis:
    """A logarithmic scale from `low` at 0 % to `high` at 100 %."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Return where `value` lies, in percent, clipped to the axis."""
        span = math.log10(self.high) - math.log10(self.low)
        return round(min(max((math.log10(value) - math.log10(self.low)) / span, 0.0), 1.0) * 100, 3)

    def ticks(self) -> list[Tick]:
        """Return at most seven powers of ten, or round numbers between two of them."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        values = [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first + 1) / 7)))]
        if len(values) < 2:
            around = (factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5))
            values = [value for value in around if self.low <= value <= self.high]
        return [self._tick(value) for value in values]

    def _tick(self, value: float) -> Tick:
        at = self.place(value)
        text = f"{value:,.0f}" if 1 <= value < 1e7 else f"{value:.0e}" if value >= 1e7 or value < 1e-3 else f"{value:g}"
        return Tick(at=at, text=text, anchor="start" if at < 4 else "end" if at > 96 else "middle")


@dataclass(frozen=True, kw_only=True)
class Roof:
    """A roof, from left to right, in percent."""

    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, kw_only=True)
class Level:
    """A level roof with its name, whose text stands `text_y` pixels from the top."""

    line: Roof
    text: str
    text_y: float


@dataclass(frozen=True, kw_only=True)
class Dot:
    """An operator, at (x, y) in percent; its number stands (dx, dy) pixels beside it."""

    number: int
    text: str
    shade: str
    x: float
    y: float
    dx: float
    dy: float
    anchor: str
    shown: bool
    """Whether there was a place for the number."""
    led: bool
    """Whether a line leads from the dot to its number."""


@dataclass(frozen=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def picture(ops: Sequence[OpTime], roofline: Roofline) -> dict[str, Any] | None:
    """Compute the picture, or None when no operator or no roof can be placed in it."""
    placed = [(number, op) for number, op in enumerate(ops, start=1) if _usable(op.intensity) and _usable(op.gflops)]
    peaks = {dtype: peak for dtype, peak in roofline.gflops.items() if _usable(peak)}
    if not placed or not peaks or not _usable(roofline.gb_per_s):
        return None
    ridges = [peak / roofline.gb_per_s for peak in peaks.values()]
    x = _axis([*(op.intensity or 0.0 for _, op in placed), *ridges], 2.0)
    y = _axis([*(op.gflops or 0.0 for _, op in placed), *peaks.values()], 2.5)
    levels = _levels(peaks, roofline.gb_per_s, x, y)
    slope = _slope(max(peaks.values()), roofline.gb_per_s, x, y)
    return {
        "height": HEIGHT,
        "x_ticks": x.ticks(),
        "y_ticks": y.ticks(),
        "slope": slope,
        "levels": levels,
        "dots": _dots(placed, x, y, slope, levels),
        "words": f"{len(placed)} operators from {ms_text(min(op.intensity or 0.0 for _, op in placed))} to "
        f"{ms_text(max(op.intensity or 0.0 for _, op in placed))} FLOP per byte",
    }


def _usable(value: float | None) -> bool:
    """Say whether a number can be drawn; what no device reaches would only squeeze the others together."""
    return value is not None and 1e-9 < value < 1e15


def _axis(values: Sequence[float], margin: float) -> LogAxis:
    return LogAxis(low=min(values) / margin, high=max(values) * margin)


def _down(percent: float) -> float:
    return round(100 - percent, 3)


def _slope(peak: float, gb_per_s: float, x: LogAxis, y: LogAxis) -> Roof:
    """Return the roof that the copied bytes set, as far as it lies in the picture."""
    left, right = max(x.low, y.low / gb_per_s), min(x.high, peak / gb_per_s)
    return Roof(
        x1=x.place(left),
        y1=_down(y.place(left * gb_per_s)),
        x2=x.place(right),
        y2=_down(y.place(right * gb_per_s)),
    )


def _levels(peaks: dict[str, float], gb_per_s: float, x: LogAxis, y: LogAxis) -> list[Level]:
    """Return the roofs that matrix products set; names of roofs close to one another are stacked."""
    levels: list[Level] = []
    last = math.inf
    for dtype, peak in sorted(peaks.items(), key=lambda item: item[1]):
        at = _down(y.place(peak))
        last = min(HEIGHT * at / 100 - 5, last - _LINE)
        line = Roof(x1=x.place(max(peak / gb_per_s, x.low)), y1=at, x2=100.0, y2=at)
        levels.append(Level(line=line, text=f"{label(dtype)} {ms_text(peak)}", text_y=round(last, 2)))
    return levels


def _dots(placed: list[tuple[int, OpTime]], x: LogAxis, y: LogAxis, slope: Roof, levels: Sequence[Level]) -> list[Dot]:
    points = [(x.place(op.intensity or 0.0), _down(y.place(op.gflops or 0.0))) for _, op in placed]
    taken = [_obstacles(points, slope, levels, width) for width in _WIDTHS]
    dots = []
    for (number, op), (at, down) in zip(placed, points, strict=True):
        free = (
            offset
            for offset in _OFFSETS
            if _is_free([_number_box(offset, number, at, down, w) for w in _WIDTHS], taken)
        )
        dx, dy = next(free, (0.0, 0.0))
        shown = (dx, dy) != (0.0, 0.0)
        if shown:
            for boxes, width in zip(taken, _WIDTHS, strict=True):
                boxes.append(_number_box((dx, dy), number, at, down, width))
        dots.append(
            Dot(
                number=number,
                text=f"{op.name}: {ms_text(op.gflops)} GFLOP/s at {ms_text(op.intensity)} FLOP per byte",
                shade=_KINDS.get(op.kind, "s7"),
                x=at,
                y=down,
                dx=dx,
                dy=dy,
                anchor="start" if dx > 0 else "end" if dx < 0 else "middle",
                shown=shown,
                led=math.hypot(dx, dy) > 19,
            )
        )
    return dots


def _obstacles(points: Sequence[tuple[float, float]], slope: Roof, levels: Sequence[Level], width: float) -> list[_Box]:
    """List what a number must not cover: every dot, the roofs and their names."""
    lines = [point for line in (slope, *(level.line for level in levels)) for point in _along(line)]
    places = [(at * width / 100, down * HEIGHT / 100, 5.0) for at, down in points]
    places += [(at * width / 100, down * HEIGHT / 100, 2.0) for at, down in lines]
    boxes = [_Box(left - half, top - half, left + half, top + half) for left, top, half in places]
    return boxes + [_Box(width - 7 * len(level.text), level.text_y - 10, width, level.text_y + 3) for level in levels]


def _along(line: Roof) -> list[tuple[float, float]]:
    """Return places on a line, near enough to one another that a number can't slip between them."""
    parts = [n / 60 for n in range(61)]
    return [(line.x1 + part * (line.x2 - line.x1), line.y1 + part * (line.y2 - line.y1)) for part in parts]


def _number_box(offset: tuple[float, float], number: int, at: float, down: float, width: float) -> _Box:
    size = 7.0 * len(str(number))
    left = at * width / 100 + offset[0] - (size if offset[0] < 0 else size / 2 if offset[0] == 0 else 0.0)
    base = down * HEIGHT / 100 + offset[1]
    return _Box(left - 1.5, base - 11, left + size + 1.5, base + 3)


def _is_free(number: Sequence[_Box], taken: Sequence[Sequence[_Box]]) -> bool:
    """Say whether a number covers nothing and lies within the picture, in each width."""
    for box, boxes, width in zip(number, taken, _WIDTHS, strict=True):
        if box.left < 0 or box.right > width or box.top < 0 or box.bottom > HEIGHT:
            return False
        if any(box.overlaps(other) for other in boxes):
            return False
    return True

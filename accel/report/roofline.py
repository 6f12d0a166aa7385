"""The roofline as a picture: operators by what they do for each byte, under the limits of the device, log by log.

Each operator is a dot with the number of its row in the table, which has the names; the roofs are named below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from accel.profiler.evidence import OpTime, Roofline
from accel.report.blocks import Picture
from accel.report.pictures import Tick, tick
from accel.report.words import ms_text

HEIGHT = 280
"""Pixels."""
_SHADES = {"matmul": "s0", "elementwise": "s1", "other": "s7"}


@dataclass(frozen=True, kw_only=True)
class LogAxis:
    """A logarithmic scale from `low` at 0 % to `high` at 100 %."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Return where `value` lies, in percent, clipped to the axis."""
        span = math.log10(self.high) - math.log10(self.low)
        return round(min(max((math.log10(value) - math.log10(self.low)) / span, 0.0), 1.0) * 100, 3)

    def down(self, value: float) -> float:
        """Return where `value` lies below the top, in percent."""
        return round(100 - self.place(value), 3)

    def ticks(self) -> list[Tick]:
        """Return at most seven powers of ten, or round numbers between two of them."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        values = [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first + 1) / 7)))]
        if len(values) < 2:
            around = (factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5))
            values = [value for value in around if self.low <= value <= self.high]
        return [tick(self.place(value), _tick_text(value), margin=4.0) for value in values]


def _tick_text(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e7 else f"{value:.0e}" if value >= 1e7 or value < 1e-3 else f"{value:g}"


def picture(ops: Sequence[OpTime], roofline: Roofline) -> Picture | None:
    """Draw the operators under the roofs, or return None when no operator or no roof can be placed."""
    drawable = [
        (number, op, op.intensity, op.gflops)
        for number, op in enumerate(ops, start=1)
        if op.intensity is not None and op.gflops is not None and _usable(op.intensity) and _usable(op.gflops)
    ]
    peaks = [peak for peak in roofline.gflops.values() if _usable(peak)]
    copy = roofline.gb_per_s
    if not drawable or not peaks or not _usable(copy):
        return None
    intensities = [intensity for _, _, intensity, _ in drawable]
    x = _axis([*intensities, *(peak / copy for peak in peaks)], 2.0)
    y = _axis([*(gflops for *_, gflops in drawable), *peaks], 2.5)
    dots = [
        {
            "number": number,
            "text": f"{op.name}: {ms_text(gflops)} GFLOP/s at {ms_text(intensity)} FLOP per byte",
            "shade": _SHADES.get(op.kind, _SHADES["other"]),
            "x": x.place(intensity),
            "y": y.down(gflops),
        }
        for number, op, intensity, gflops in drawable
    ]
    span = f"{ms_text(min(intensities))} to {ms_text(max(intensities))} FLOP per byte"
    return Picture(
        name="roofline",
        macro="roofline",
        title="Roofline: GFLOP/s reached over FLOP per byte, both logarithmic",
        text=f"{len(dots)} operators from {span}; the table below has the numbers",
        height=HEIGHT,
        framed=True,
        drawn={
            "x_ticks": x.ticks(),
            "y_ticks": y.ticks(),
            "roofs": _roofs(peaks, copy, x, y),
            "dots": dots,
        },
        legend=[(shade, kind) for kind, shade in _SHADES.items()],
    )


def _usable(value: float) -> bool:
    """Say whether a number can be drawn; what no device reaches would only squeeze the others together."""
    return 1e-9 < value < 1e15


def _axis(values: Sequence[float], margin: float) -> LogAxis:
    return LogAxis(low=min(values) / margin, high=max(values) * margin)


def _roofs(peaks: Sequence[float], copy: float, x: LogAxis, y: LogAxis) -> list[tuple[float, float, float, float]]:
    """Return the roof that copied bytes set and those of the matrix products, each as x1, y1, x2, y2."""
    left, right = max(x.low, y.low / copy), min(x.high, max(peaks) / copy)
    slope = (x.place(left), y.down(left * copy), x.place(right), y.down(right * copy))
    return [slope, *((x.place(max(peak / copy, x.low)), y.down(peak), 100.0, y.down(peak)) for peak in sorted(peaks))]

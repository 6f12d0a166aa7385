"""The roofline as a picture: operators by what they do for each byte, under the limits of the device, log by log.

Each operator is a dot with the number of its row in the table, which has the names; the roofs are named below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from accel.profiler.evidence import OpTime, Roofline
from accel.report.blocks import Picture
from accel.report.pictures import Axis, Tick, tick
from accel.report.words import ms_text

HEIGHT = 280
"""Pixels."""
_MARGIN = 0.2
"""Decades between an end of a scale and what lies nearest to it, at the least."""
_SHADES = {"matmul": "s0", "elementwise": "s1", "other": "s7"}


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
    x = _decades([*intensities, *(peak / copy for peak in peaks)])
    y = _decades([*(gflops for *_, gflops in drawable), *peaks])
    dots = [
        {
            "number": number,
            "text": f"{op.name}: {ms_text(gflops)} GFLOP/s at {ms_text(intensity)} FLOP per byte",
            "shade": _SHADES.get(op.kind, _SHADES["other"]),
            "x": x.place(math.log10(intensity)),
            "y": _down(y, gflops),
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
        drawn={"x_ticks": _ticks(x), "y_ticks": _ticks(y), "roofs": _roofs(peaks, copy, x, y), "dots": dots},
        legend=[(shade, kind) for kind, shade in _SHADES.items()],
    )


def _usable(value: float) -> bool:
    """Return whether a number can be drawn; values beyond any device would squeeze the others together."""
    return 1e-9 < value < 1e15


def _decades(values: Sequence[float]) -> Axis:
    """Return a scale of decimal logarithms in whole decades, with a margin at both ends."""
    low, high = math.log10(min(values)), math.log10(max(values))
    return Axis(low=math.floor(low - _MARGIN), high=math.ceil(high + _MARGIN))


def _down(y: Axis, gflops: float) -> float:
    return round(100 - y.place(math.log10(gflops)), 3)


def _ticks(axis: Axis) -> list[Tick]:
    """Return at most seven powers of ten."""
    powers = range(int(axis.low), int(axis.high) + 1, math.ceil((axis.high - axis.low + 1) / 7))
    return [tick(axis.place(power), f"{10**power:,}" if 0 <= power < 7 else f"{10.0**power:g}") for power in powers]


def _roofs(peaks: Sequence[float], copy: float, x: Axis, y: Axis) -> list[tuple[float, float, float, float]]:
    """Return the roof that copied bytes set and those of the matrix products, each as x1, y1, x2, y2."""
    ridges = [(x.place(math.log10(peak / copy)), _down(y, peak)) for peak in sorted(peaks)]
    left = max(10.0**x.low, 10.0**y.low / copy)
    slope = (x.place(math.log10(left)), _down(y, left * copy), *ridges[-1])
    return [slope, *((at, down, 100.0, down) for at, down in ridges)]

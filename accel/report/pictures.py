"""Scales and bars of the pictures on a page.

Places along a picture are in percent of its width, so that it stretches while its text keeps its size; heights are in
pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from accel.report.words import clean, finite, ms_text

SHADES = 10
"""Number of fill classes in the style sheet; phases beyond it share them, and are distinguished by their numbers."""
LABEL_CHARS = 26
"""Longest text drawn inside a picture; the whole text is in its tooltip and in the tables."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled position on an axis."""

    at: float
    text: str
    anchor: str


@dataclass(frozen=True, kw_only=True)
class BarSegment:
    """One phase in a stacked bar."""

    number: int
    name: str
    text: str
    at: float
    width: float


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear scale from `low` at 0 % to `high` at 100 %."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Return where `value` lies, in percent, clipped to the axis."""
        span = self.high - self.low
        if not (math.isfinite(span) and span > 0):
            return 0.0
        return round(min(max((value - self.low) / span, 0.0), 1.0) * 100, 3)

    def ticks(self, unit: str = "") -> tuple[Tick, ...]:
        """Return about four round places on the axis."""
        span = self.high - self.low
        # A span of almost nothing has no logarithm once divided.
        if not (math.isfinite(span) and span > 1e-300):
            return ()
        power: float = 10.0 ** math.floor(math.log10(span / 4))
        step = next((power * factor for factor in (1, 2, 5) if span / (power * factor) <= 4), power * 10)
        first = math.ceil(self.low / step)
        values = [number * step for number in range(first, first + 6) if number * step <= self.high * (1 + 1e-9)]
        return tuple(tick(self.place(value), f"{value:.6g}{unit}") for value in values)


def tick(at: float, text: str, margin: float = 8.0) -> Tick:
    """Return a label at a place; within `margin` of an end it stays inside the picture."""
    return Tick(at=at, text=text, anchor="start" if at < margin else "end" if at > 100 - margin else "middle")


def shade(number: int) -> str:
    """Return the fill class of a phase by its number; 0 is no phase, and grey."""
    return f"s{(number - 1) % SHADES}" if number else "plain"


def label(text: str) -> str:
    """Return `text` short enough to be drawn inside a picture."""
    text = clean(text)
    return text if len(text) <= LABEL_CHARS else text[: LABEL_CHARS - 1] + "…"


def length(value: float | None) -> float:
    """Return a number that can be drawn: 0 for what is missing, negative or infinite."""
    return max(finite(value) or 0.0, 0.0)


def segments(parts: Iterable[tuple[str, float]], names: Sequence[str], axis: Axis) -> list[BarSegment]:
    """Lay phases end to end, from the left.

    Args:
        parts: each phase with its ms.
        names: all phases in the order of their numbers.
        axis: the scale, ms.
    """
    laid, end = [], 0.0
    for name, ms in parts:
        start, end = end, end + length(ms)
        at = axis.place(start)
        width = round(axis.place(end) - at, 3)
        text = f"{ms_text(ms)} ms"
        laid.append(BarSegment(number=names.index(name) + 1, name=name, text=text, at=at, width=width))
    return laid

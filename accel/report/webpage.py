"""The report as one self-contained web page: no network, no scripts, light and dark.

This module computes what is drawn, as percentages of the drawing's width, so that the drawings stretch while their text
keeps its size; `webpage.html.j2` lays it out.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from accel.report import terminal
from accel.report.model import Report, StrategyRow

SHADES = 10
"""Number of fill classes in the style sheet; phases beyond it share them, told apart by their number."""
LABEL_CHARS = 26
"""Longest text drawn inside a picture; the whole text is in its tooltip and in the tables."""

# Status → style class and sign: the sign and the word say it without the colour.
_BADGES = {"kept": ("good", "✓"), "undone": ("bad", "✗"), "refused": ("warn", "?")}


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled place on an axis."""

    at: float
    text: str
    anchor: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar from zero."""

    label: str
    text: str
    width: float
    shade: str


@dataclass(frozen=True, kw_only=True)
class BarSegment:
    """One phase in a stacked bar."""

    number: int
    name: str
    text: str
    at: float
    width: float


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One step as a stacked bar."""

    label: str
    text: str
    segments: tuple[BarSegment, ...]


@dataclass(frozen=True, kw_only=True)
class Whisker:
    """One strategy's gain with its interval."""

    label: str
    name: str
    text: str
    badge: str
    at: float
    low: float | None
    high: float | None


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
        return tuple(self._tick(value, f"{value:.6g}{unit}") for value in values)

    def _tick(self, value: float, text: str) -> Tick:
        at = self.place(value)
        return Tick(at=at, text=text, anchor="start" if at < 8 else "end" if at > 92 else "middle")


def render(report: Report) -> str:
    """Render the report as one HTML page.

    Args:
        report: what to show; any text in it is shown literally, and missing numbers as `-`.

    Returns:
        The page, which loads nothing: it can be mailed, or opened from a folder.
    """
    words = {name: getattr(terminal, f"{name}_text") for name in ("search", "limit", "machine", "model", "interval")}
    return environment().get_template("webpage.html.j2").render(
        report=report,
        shades=SHADES,
        words={name: say(report) for name, say in words.items()},
        strategies=[(row, _badge(row), _texts(row)) for row in report.rows],
        speed=_speed(report),
        step=_step(report),
        legend=_legend(report),
        gains=_gains(report),
        # ASCII keeps the copied text whole: nothing in it can be stripped as a control character.
        plan=json.dumps(report.plan, indent=2, default=str) if report.plan else "",
    )  # fmt: skip


@cache
def environment() -> Environment:
    """Return the templates, which show any text literally and `-` for a missing value."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )


def _shown(value: Any) -> Any:
    """Make a value fit to be escaped and shown; what macros have made is already so."""
    if value is None:
        return "-"
    if isinstance(value, str) and not isinstance(value, Markup):
        return terminal.clean(value, keep="\n")
    return value


def _badge(row: StrategyRow) -> tuple[str, str]:
    return _BADGES.get(row.status, ("idle", "○"))


def _texts(row: StrategyRow) -> dict[str, str]:
    return {
        "gain": terminal.gain_text(row.gain, row.gain_low, row.gain_high),
        "step": terminal.step_text(row),
        "numerics": terminal.numerics_text(row),
        "tolerance": "" if row.tolerance is None else f"{row.tolerance:.1g}",
        "cost": terminal.seconds_text(row.cost_s) if row.cost_s else "-",
    }


def label(text: str) -> str:
    """Return `text` short enough to be drawn inside a picture."""
    text = terminal.clean(text)
    return text if len(text) <= LABEL_CHARS else text[: LABEL_CHARS - 1] + "…"


def _speed(report: Report) -> dict[str, Any] | None:
    """Compute the before/after bars, or None before both are measured."""
    plain, accelerated = terminal.finite(report.plain_ms), terminal.finite(report.accel_ms)
    if plain is None or accelerated is None:
        return None
    axis = Axis(low=0.0, high=max(plain, accelerated))
    rows = (("before", plain, "plain"), ("after", accelerated, "good"))
    bars = [
        Bar(label=label, text=f"{terminal.ms_text(ms)} ms", width=axis.place(ms), shade=shade)
        for label, ms, shade in rows
    ]
    return {"bars": bars, "ticks": axis.ticks(" ms")}


def _step(report: Report) -> dict[str, Any] | None:
    """Compute the anatomy of the step as stacked bars on one scale, or None when it is not known."""
    parts = {label: _measured(part) for label, part in _parts(report) if _measured(part)}
    if not parts:
        return None
    axis = Axis(low=0.0, high=max(sum(part.values()) for part in parts.values()))
    stacks = [_stack(label, part, terminal.phases(report), axis) for label, part in parts.items()]
    return {"stacks": stacks, "ticks": axis.ticks(" ms")}


def _parts(report: Report) -> tuple[tuple[str, dict[str, float]], ...]:
    return ("before", report.anatomy_before), ("after", report.anatomy_after)


def _measured(part: dict[str, float]) -> dict[str, float]:
    return {name: max(ms, 0.0) for name, ms in part.items() if terminal.finite(ms) is not None}


def _stack(label: str, part: dict[str, float], names: list[str], axis: Axis) -> Stack:
    segments, end = [], 0.0
    for name, ms in part.items():
        start, end = end, end + ms
        at, width = axis.place(start), axis.place(end) - axis.place(start)
        number = names.index(name) + 1
        text = f"{terminal.ms_text(ms)} ms"
        segments.append(BarSegment(number=number, name=name, text=text, at=at, width=round(width, 3)))
    return Stack(label=label, text=f"{terminal.ms_text(end)} ms", segments=tuple(segments))


def _legend(report: Report) -> list[tuple[str, list[str]]]:
    """List each phase with its ms and share, before and after."""
    rows = []
    for name in terminal.phases(report):
        cells = []
        for _, part in _parts(report):
            total, ms = sum(_measured(part).values()), terminal.finite(part.get(name))
            share = f" ({100 * ms / total:.0f} %)" if ms is not None and total > 0 else ""
            cells.append(terminal.ms_text(ms) + share)
        rows.append((name, cells))
    return rows


def _gains(report: Report) -> dict[str, Any] | None:
    """Compute the gains with their intervals, or None when nothing was tried."""
    rows = [row for row in report.rows if terminal.finite(row.gain) is not None]
    if not rows:
        return None
    ends = [terminal.finite(value) for row in rows for value in (row.gain, row.gain_low, row.gain_high)]
    known = [1.0, *(value for value in ends if value is not None)]
    margin = max(0.05, 0.08 * (max(known) - min(known)))
    axis = Axis(low=min(known) - margin, high=max(known) + margin)
    whiskers = [_whisker(row, axis) for row in rows]
    return {"whiskers": whiskers, "one": axis.place(1.0), "ticks": axis.ticks("x")}


def _whisker(row: StrategyRow, axis: Axis) -> Whisker:
    low, high = terminal.finite(row.gain_low), terminal.finite(row.gain_high)
    known = low is not None and high is not None
    name = f"{row.name} {row.setting}".strip()
    return Whisker(
        label=label(name),
        name=name,
        text=f"{terminal.gain_text(row.gain, low, high)} {label(row.status)}",
        badge=_badge(row)[0],
        at=axis.place(row.gain or 0.0),
        low=axis.place(low) if known and low is not None else None,
        high=axis.place(high) if known and high is not None else None,
    )

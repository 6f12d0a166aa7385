"""A profile report as one self-contained web page: no network, no scripts, light and dark.

This module computes what is drawn: places along a picture in percent of its width, so that it stretches while its text
keeps its size, heights in pixels. `profile_page.html.j2` lays it out.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from accel.profiler.evidence import OpTime, Roofline
from accel.profiler.phases import MEANING
from accel.profiler.report import Finding, ProfileReport, RankRow, Saving, StepRow
from accel.report import profile_words as words
from accel.report.roofline_picture import picture as roofline_picture
from accel.report.terminal import finite, ms_text
from accel.report.webpage import SHADES, Axis, BarSegment, Tick, environment

TIMELINE_HEIGHT = 180
"""Pixels."""
TALL = 4.0
"""A step longer than this many medians is cut off, so that the others can be told apart."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One phase in a column of the timeline, in pixels from the top."""

    number: int
    y: float
    height: float


@dataclass(frozen=True, kw_only=True)
class Column:
    """One step of the timeline."""

    at: float
    width: float
    text: str
    cut: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """A saving on a scale from 0 to the whole step."""

    at: float
    low: float
    high: float
    badge: str
    text: str


def render(report: ProfileReport) -> str:
    """Render the report as one HTML page.

    Args:
        report: what to show; any text in it is shown literally, and missing numbers as `-`.

    Returns:
        The page, which loads nothing: it can be mailed, or opened from a folder.
    """
    tree = words.tree(report.evidence)
    parts = dict.fromkeys([row.name for row in tree if row.depth == 1])
    names = [*parts, *(name for name in _phases(report) if name not in parts)]
    return environment().get_template("profile_page.html.j2").render(
        report=report,
        words=words,
        ms=ms_text,
        shades=SHADES,
        meaning=MEANING,
        number={name: place for place, name in enumerate(names, start=1)},
        findings=[(finding, _badge(finding), _gauge(finding)) for finding in report.findings],
        tree=tree,
        anatomy=_anatomy(report, names),
        timeline=_timeline(report.timeline, names),
        ranks=_ranks(report.ranks, names),
        stragglers=[row.rank for row in report.ranks if row.straggler],
        rank_phases=words.phase_names(row.phases_ms for row in report.ranks),
        roofline=_roofline(report.ops, report.roofline),
    )  # fmt: skip


def _phases(report: ProfileReport) -> list[str]:
    return words.phase_names([*(row.phases_ms for row in report.timeline), *(row.phases_ms for row in report.ranks)])


def _length(value: float | None) -> float:
    return max(finite(value) or 0.0, 0.0)


# --- findings --------------------------------------------------------------------------------------------------------


def _badge(finding: Finding) -> tuple[str, str]:
    if finding.measured is None:
        return "idle", "○"
    return ("good", "✓") if finding.confirmed else ("warn", "?")


def _gauge(finding: Finding) -> Gauge | None:
    """Draw what was measured, or what is predicted; None when neither is known."""
    saving: Saving | None = finding.measured or finding.predicted
    if saving is None or finite(saving.value) is None:
        return None
    axis = Axis(low=0.0, high=1.0)
    low, high = (finite(end) for end in (saving.low, saving.high))
    return Gauge(
        at=axis.place(saving.value),
        low=axis.place(saving.value if low is None else low),
        high=axis.place(saving.value if high is None else high),
        badge="measured" if finding.measured else "predicted",
        text=words.effect_text(finding),
    )


# --- the step --------------------------------------------------------------------------------------------------------


def _anatomy(report: ProfileReport, names: list[str]) -> dict[str, Any] | None:
    """Compute the stacked bar of the step, or None when nothing is known of it."""
    root = report.evidence
    if root is None or not root.children:
        return None
    total = sum(_length(child.ms) for child in root.children)
    axis = Axis(low=0.0, high=max(total, _length(root.ms)))
    percents = [row.percent for row in words.tree(root) if row.depth == 1]
    segments, end = [], 0.0
    for child, percent in zip(root.children, percents, strict=True):
        start, end = end, end + _length(child.ms)
        at = axis.place(start)
        width = round(axis.place(end) - at, 3)
        text = f"{ms_text(child.ms)} ms, {percent}"
        segments.append(BarSegment(number=names.index(child.name) + 1, name=child.name, text=text, at=at, width=width))
    return {"segments": segments, "ticks": axis.ticks(" ms"), "total": f"{ms_text(root.ms)} ms"}


def _timeline(rows: list[StepRow], names: list[str]) -> dict[str, Any] | None:
    """Compute the columns of the timeline, or None without one."""
    if not rows:
        return None
    tops = [_length(row.ms) for row in rows]
    median = statistics.median(tops)
    seen = [top for top in tops if top <= TALL * median] or tops
    axis = Axis(low=0.0, high=max(seen) * 1.04)
    columns = [_column(row, place, len(rows), names, axis) for place, row in enumerate(rows)]
    cut = [row for row, column in zip(rows, columns, strict=True) if column.cut]
    shown = words.phase_names(row.phases_ms for row in rows)
    return {
        "columns": columns,
        "height": TIMELINE_HEIGHT,
        "levels": [(_y(tick.at), tick.text) for tick in axis.ticks(" ms")],
        "median": _y(axis.place(median)),
        "steps": _step_ticks(rows),
        "legend": [(names.index(name) + 1, name) for name in shown],
        "cut": ", ".join(f"step {row.step} ({ms_text(row.ms)} ms)" for row in cut[:3]),
        "more": max(len(cut) - 3, 0),
        "words": _timeline_text(rows, tops, median),
    }


def _timeline_text(rows: list[StepRow], tops: list[float], median: float) -> str:
    if len(rows) == 1:
        return f"step {rows[0].step}, {ms_text(tops[0])} ms"
    spread = f"{ms_text(min(tops))} to {ms_text(max(tops))} ms, median {ms_text(median)} ms"
    return f"{len(rows)} steps from {rows[0].step} to {rows[-1].step}, {spread}"


def _y(percent: float) -> float:
    return round(TIMELINE_HEIGHT * (1 - percent / 100), 2)


def _column(row: StepRow, place: int, count: int, names: list[str], axis: Axis) -> Column:
    blocks, end = [], 0.0
    said = []
    for name in words.phase_names([row.phases_ms]):
        start, end = end, end + _length(row.phases_ms[name])
        top, bottom = _y(axis.place(end)), _y(axis.place(start))
        if bottom - top >= 0.05:
            blocks.append(Block(number=names.index(name) + 1, y=top, height=round(bottom - top, 2)))
        said.append(f"{name} {ms_text(row.phases_ms[name])}")
    gap = 0.15 if count <= 60 else 0.0
    return Column(
        at=round((place + gap / 2) * 100 / count, 3),
        width=round((1 - gap) * 100 / count, 3),
        text=f"step {row.step}: {ms_text(row.ms)} ms" + (f"; {', '.join(said)}" if said else ""),
        cut=max(end, _length(row.ms)) > axis.high,
        blocks=tuple(blocks),
    )


def _step_ticks(rows: list[StepRow]) -> list[Tick]:
    """Label the first step, the last and up to three between them."""
    count = min(len(rows), 5)
    places = sorted({round(n * (len(rows) - 1) / max(count - 1, 1)) for n in range(count)})
    ticks = []
    for place in places:
        at = round((place + 0.5) * 100 / len(rows), 3)
        anchor = "start" if at < 8 else "end" if at > 92 else "middle"
        ticks.append(Tick(at=at, text=f"{rows[place].step:.7g}", anchor=anchor))
    return ticks


def _ranks(rows: list[RankRow], names: list[str]) -> list[tuple[RankRow, list[BarSegment]]]:
    """Pair each rank with its step as a stacked bar, all on one scale."""
    axis = Axis(low=0.0, high=max((sum(map(_length, row.phases_ms.values())) for row in rows), default=0.0))
    return [(row, _bar(row, names, axis)) for row in rows]


def _bar(row: RankRow, names: list[str], axis: Axis) -> list[BarSegment]:
    segments, end = [], 0.0
    for name in words.phase_names([row.phases_ms]):
        start, end = end, end + _length(row.phases_ms[name])
        at = axis.place(start)
        text = f"{ms_text(row.phases_ms[name])} ms"
        width = round(axis.place(end) - at, 3)
        segments.append(BarSegment(number=names.index(name) + 1, name=name, text=text, at=at, width=width))
    return segments


def _roofline(ops: list[OpTime], roofline: Roofline | None) -> Any:
    return None if roofline is None else roofline_picture(ops, roofline)

"""Pictures of a profiled run: what a remedy saves, the phases of the step, and the steps one after another."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from accel.profiler.report import Finding, ProfileReport, StepRow
from accel.report import profile_words as words
from accel.report.blocks import Paragraph, Picture, Section
from accel.report.pictures import Axis, Tick, label, length, segments, shade, tick
from accel.report.words import finite, ms_text

TIMELINE_HEIGHT = 180
"""Pixels."""
TALL = 4.0
"""A step longer than this many medians is cut off, so that the others can be distinguished."""


def gauge(number: int, finding: Finding) -> Picture | None:
    """Draw what was measured, or what is predicted; None when neither is known."""
    saving = finding.measured or finding.predicted
    if saving is None or finite(saving.value) is None:
        return None
    axis = Axis(low=0.0, high=1.0)
    low, high = (axis.place(saving.value if finite(end) is None else end) for end in (saving.low, saving.high))
    return Picture(
        name=f"gauge-{number}",
        macro="gauge",
        title="Saving as a part of the step, 0 to 100 %",
        text=words.effect_text(finding),
        height=31,
        drawn={
            "at": axis.place(saving.value),
            "span": (low, high),
            "kind": "measured" if finding.measured else "predicted",
        },
    )


def anatomy(report: ProfileReport, names: Sequence[str]) -> Iterator[Picture]:
    """Draw the phases of the mean step as one stacked bar."""
    root = report.evidence
    if root is None or not root.children:
        return
    parts = [(child.name, child.ms) for child in root.children]
    axis = Axis(low=0.0, high=max(sum(length(ms) for _, ms in parts), length(root.ms)))
    total = f"{label(root.name)}: {ms_text(root.ms)} ms"
    yield Picture(
        name="phases",
        macro="stacks",
        title="Phases of a mean step",
        text=f"{total}; the table below has the numbers",
        height=72,
        drawn={"stacks": [(total, segments(parts, names, axis))], "ticks": axis.ticks(" ms")},
    )


# --- timeline --------------------------------------------------------------------------------------------------------


def timeline(rows: Sequence[StepRow], names: Sequence[str]) -> Iterator[Section]:
    """Draw each step as a column of its phases."""
    if not rows:
        return
    times = [length(row.ms) for row in rows]
    median = statistics.median(times)
    axis = Axis(low=0.0, high=max([ms for ms in times if ms <= TALL * median] or times) * 1.04)
    columns = [_column(row, place, len(rows), names, axis) for place, row in enumerate(rows)]
    text = _timeline_text(rows, times, median)
    drawing = Picture(
        name="timeline",
        macro="timeline",
        title="Time of each step by phase, in ms",
        text=text,
        height=TIMELINE_HEIGHT,
        framed=True,
        drawn={
            "columns": columns,
            "levels": [(_y(level.at), level.text) for level in axis.ticks(" ms")],
            "median": _y(axis.place(median)),
            "steps": _step_ticks(rows),
        },
        legend=[
            (shade(names.index(name) + 1), f"{names.index(name) + 1} {name}")
            for name in words.phase_names(row.phases_ms for row in rows)
        ],
    )
    cut = [
        f"step {row.step} ({ms_text(row.ms)} ms)" for row, column in zip(rows, columns, strict=True) if column["cut"]
    ]
    more = f" and {len(cut) - 3} more" if len(cut) > 3 else ""
    taller = f"; taller than the picture (▲): {', '.join(cut[:3])}{more}" if cut else ""
    note = Paragraph(text=f"{text}; dashed: the median{taller}", tone="idle", only="page")
    yield Section(name="steps", title="step by step", blocks=[drawing, note])


def _timeline_text(rows: Sequence[StepRow], times: Sequence[float], median: float) -> str:
    if len(rows) == 1:
        return f"step {rows[0].step}, {ms_text(times[0])} ms"
    spread = f"{ms_text(min(times))} to {ms_text(max(times))} ms, median {ms_text(median)} ms"
    return f"{len(rows)} steps from {rows[0].step} to {rows[-1].step}, {spread}"


def _y(percent: float) -> float:
    return round(TIMELINE_HEIGHT * (1 - percent / 100), 2)


def _column(row: StepRow, place: int, count: int, names: Sequence[str], axis: Axis) -> dict[str, Any]:
    parts = [(name, row.phases_ms[name]) for name in words.phase_names([row.phases_ms])]
    blocks = [
        (shade(part.number), _y(part.at + part.width), round(TIMELINE_HEIGHT * part.width / 100, 2))
        for part in segments(parts, names, axis)
        if part.width >= 0.03
    ]
    parts_text = "; " + ", ".join(f"{name} {ms_text(ms)}" for name, ms in parts) if parts else ""
    gap = 0.15 if count <= 60 else 0.0
    return {
        "at": round((place + gap / 2) * 100 / count, 3),
        "width": round((1 - gap) * 100 / count, 3),
        "text": f"step {row.step}: {ms_text(row.ms)} ms{parts_text}",
        "cut": max(sum(length(ms) for _, ms in parts), length(row.ms)) > axis.high,
        "blocks": blocks,
    }


def _step_ticks(rows: Sequence[StepRow]) -> list[Tick]:
    """Label the first step, the last and up to three between them."""
    count = min(len(rows), 5)
    places = sorted({round(n * (len(rows) - 1) / max(count - 1, 1)) for n in range(count)})
    return [tick(round((place + 0.5) * 100 / len(rows), 3), f"{rows[place].step:.7g}") for place in places]

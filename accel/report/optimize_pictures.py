"""Pictures of the report of `accel.optimize`: the step before and after, its phases, and the gains."""

from __future__ import annotations

from collections.abc import Iterator

from accel.report.blocks import Block, Paragraph, Picture
from accel.report.model import Report
from accel.report.pictures import Axis, label, segments
from accel.report.words import finite, gain_text, ms_text

TONE_OF = {"kept": "good", "undone": "bad", "refused": "warn"}
"""Status of a strategy → tone; `idle` for any other."""


def phases(report: Report) -> list[str]:
    """List the phases of the step in the order they were first measured, before and after together."""
    return list(dict.fromkeys([*report.anatomy_before, *report.anatomy_after]))


def speed(report: Report) -> Iterator[Block]:
    """Draw the step before and after as bars from zero."""
    plain, accelerated = finite(report.plain_ms), finite(report.accel_ms)
    if plain is None or accelerated is None:
        yield Paragraph(text="not measured yet", only="page")
        return
    axis = Axis(low=0.0, high=max(plain, accelerated))
    texts = [f"before: {ms_text(plain)} ms", f"after: {ms_text(accelerated)} ms"]
    bars = zip(texts, (axis.place(plain), axis.place(accelerated)), ("plain", "good"), strict=True)
    yield Picture(
        name="bars",
        macro="bars",
        title="Step time before and after",
        text=", ".join(texts),
        height=122,
        drawn={"bars": list(bars), "ticks": axis.ticks(" ms")},
    )
    note = "median step, measured interleaved in the closing trial; shorter is better"
    yield Paragraph(text=note, tone="idle", only="page")


def anatomy(report: Report) -> Iterator[Picture]:
    """Draw the phases of the step before and after as stacked bars on one scale."""
    parts = {"before": report.anatomy_before, "after": report.anatomy_after}
    drawable = {
        name: {phase: max(ms, 0.0) for phase, ms in part.items() if finite(ms) is not None}
        for name, part in parts.items()
    }
    sums = {name: sum(part.values()) for name, part in drawable.items() if part}
    if not sums:
        return
    axis = Axis(low=0.0, high=max(sums.values()))
    texts = {name: f"{name}: {ms_text(total)} ms" for name, total in sums.items()}
    stacks = [(texts[name], segments(drawable[name].items(), phases(report), axis)) for name in sums]
    yield Picture(
        name="phases",
        macro="stacks",
        title="Phases of the step before and after",
        text=f"{', '.join(texts.values())}; the table below has the numbers",
        height=50 * len(stacks) + 22,
        drawn={"stacks": stacks, "ticks": axis.ticks(" ms")},
    )


def gains(report: Report) -> Iterator[Block]:
    """Draw the gain of each strategy that was tried, with its interval."""
    rows = [row for row in report.rows if finite(row.gain) is not None]
    if not rows:
        return
    ends = [finite(value) for row in rows for value in (row.gain, row.gain_low, row.gain_high)]
    values = [1.0, *(value for value in ends if value is not None)]
    margin = max(0.05, 0.08 * (max(values) - min(values)))
    axis = Axis(low=min(values) - margin, high=max(values) + margin)
    whiskers = []
    for row in rows:
        name = f"{row.name} {row.setting}".strip()
        low, high = finite(row.gain_low), finite(row.gain_high)
        whiskers.append(
            {
                "label": label(name),
                "name": name,
                "text": f"{gain_text(row.gain, low, high)} {label(row.status)}",
                "tone": TONE_OF.get(row.status, "idle"),
                "at": axis.place(row.gain or 0.0),
                "span": None if low is None or high is None else (axis.place(low), axis.place(high)),
            }
        )
    yield Picture(
        name="gains",
        macro="gains",
        title="Gain of each strategy with its confidence interval; the dashed line is no change",
        text="The table below has the numbers",
        height=40 * len(rows) + 22,
        drawn={"whiskers": whiskers, "one": axis.place(1.0), "ticks": axis.ticks("x")},
    )
    note = "each strategy against the run without it; right of the dashed line (1.0x) is faster"
    yield Paragraph(text=note, tone="idle", only="page")

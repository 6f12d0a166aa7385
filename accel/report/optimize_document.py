"""What the report of `accel.optimize` shows: its words, and its sections as data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from accel.report import blocks, head
from accel.report import optimize_pictures as pictures
from accel.report.batch_section import batch_section
from accel.report.blocks import Block, Document, Facts, Listing, Paragraph, Section, Table, TableCell, TableRow
from accel.report.model import Report, StrategyRow
from accel.report.quiet_rich import cell_len
from accel.report.terminal import MAX_WIDTH, clip
from accel.report.words import (
    clean,
    finite,
    gain_text,
    machine_text,
    ms_text,
    percent_text,
    ratio_text,
    seconds_text,
)

EVENT_LIMIT = 20
_NOT_APPLICABLE = "not applicable"


# --- words -----------------------------------------------------------------------------------------------------------


def step_text(row: StrategyRow) -> str:
    """Format the step before and after a strategy in ms, e.g. `26.6 → 18.4 ± 0.3`; `-` when it was not measured."""
    if finite(row.before_ms) is None and finite(row.after_ms) is None:
        return "-"
    spread = finite(row.spread_ms)
    tail = "" if spread is None else f" ± {spread:.2g}" if abs(spread) < 100 else f" ± {ms_text(spread)}"
    return f"{ms_text(row.before_ms)} → {ms_text(row.after_ms)}{tail}"


def numerics_text(row: StrategyRow) -> str:
    """Return how far outputs and gradients are from plain, e.g. `3e-07/2e-06`; `same bits` for no difference."""
    output, gradient = _error_text(row.output_error), _error_text(row.gradient_error)
    return output if output == gradient else f"{output}/{gradient}"


def _error_text(value: float | None) -> str:
    value = finite(value)
    return "-" if value is None else "same bits" if value == 0 else f"{value:.1g}"


def interval_text(report: Report) -> str:
    """Format the confidence interval of the speed-up as ratios and as percentages of more steps a second."""
    low, high = finite(report.speedup_low), finite(report.speedup_high)
    if low is None or high is None:
        return "confidence interval not known"
    more = " to ".join(f"{100 * (end - 1):+.3g} %" for end in (low, high))
    return f"confidence interval [{ratio_text(low)}x, {ratio_text(high)}x], that is {more} steps a second"


def pay_back_text(report: Report) -> str:
    """Return when the search has paid, or will have paid, for itself."""
    if report.break_even_step is not None:
        return f"{'paid' if report.steps >= report.break_even_step else 'pays'} back at step {report.break_even_step}"
    if report.search_s <= 0:
        return "nothing to pay back"
    if report.state == "searching":
        return "not known yet when it pays back"
    if report.speedup is None:
        return "not known when it pays back"
    return "does not pay back"


def search_text(report: Report) -> str:
    """Return what the search took and when it pays back, in one sentence."""
    trials = f"{report.search_steps} of {report.steps} steps were trial steps"
    return f"{trials}, cost {seconds_text(report.search_s)}; {pay_back_text(report)}"


def limit_text(report: Report, *, remedy: bool = True) -> str:
    """Return what limits the run now, its share of the step and, with `remedy`, what would treat it."""
    if not report.bottleneck:
        return "not known"
    share = finite(report.bottleneck_share)
    part = "" if share is None else f", {100 * share:.0f} % of the step"
    advice = report.bottleneck_advice if remedy else report.bottleneck_advice.partition(": ")[0]
    return f"{report.bottleneck}{part}" + (f"; {advice}" if advice else "")


def model_text(report: Report) -> str:
    """Return which model ran and what accel was allowed to do."""
    words = [report.model or "model not known", f"{report.parameters:,} parameters" if report.parameters else ""]
    words += [f"{name} {value}" for name, value in (("allow", report.allow), ("budget", report.budget)) if value]
    return ", ".join(word for word in words if word)


def decision_line(row: StrategyRow) -> str:
    """Render one decision as one log line, e.g. `accel: channels_last kept: 1.45x [1.38, 1.52], 26.6 → 18.4 ms`.

    Args:
        row: the strategy that was decided.

    Returns:
        One line of at most 100 columns, unless the name alone is longer; a long reason is cut there.
    """
    start = f"accel: {clean(name_text(row))} {clean(row.status)}"
    if finite(row.gain) is not None:
        start += f": {gain_text(row.gain, row.gain_low, row.gain_high)}"
    if finite(row.before_ms) is not None and finite(row.after_ms) is not None:
        start += f"{',' if finite(row.gain) is not None else ':'} {ms_text(row.before_ms)} → {ms_text(row.after_ms)} ms"
    room = MAX_WIDTH - cell_len(start) - 2
    why = clip(clean(row.why), room) if room > 10 else ""
    return f"{start}; {why}" if why else start


def name_text(row: StrategyRow) -> str:
    """Return a strategy's name and its setting."""
    return f"{row.name} {row.setting}".strip()


# --- sections --------------------------------------------------------------------------------------------------------


def document(report: Report) -> Document:
    """Lay out what the report of a run under `accel.optimize` shows."""
    lead = [Paragraph(text=f"training the same: {report.training_same or 'not known'}")]
    if report.speedup is not None:
        lead.insert(0, Paragraph(text=f"speed-up: {ratio_text(report.speedup)}x, {interval_text(report)}"))
    remembered = ("remembered", report.remembered)
    cost = Facts(pairs=[("search", search_text(report)), remembered, ("limits the run now", limit_text(report))])
    machine = machine_text(report.machine, report.machine.world_size)
    fingerprint = Facts(pairs=[("fingerprint", report.fingerprint)], only="page")
    plan_text = json.dumps(report.plan, default=str) if report.plan else ""
    plan = Facts(pairs=[("plan", plan_text), ("cache", report.cache)], verbatim=True)
    events = [f"step {event.step}: {event.text}" for event in report.events]
    return Document(
        kind="accel",
        model=report.model,
        started=report.started,
        verdict=report.verdict(),
        tone="good" if report.plan else "strong",
        mark="" if report.state == "done" else report.state,
        lead=lead,
        sections=[
            Section(name="speed", title="before and after", blocks=list(pictures.speed(report))),
            Section(name="strategies", title="strategies", blocks=list(_strategies(report))),
            *batch_section(report),
            Section(name="cost", title="cost and what is left", blocks=[cost]),
            *_anatomy(report),
            *head.listed("events", "events", Listing(items=events, mark="", latest=EVENT_LIMIT)),
            *head.ending(report, machine, model_text(report), fingerprint, plan),
        ],
    )


def _strategies(report: Report) -> Iterator[Block]:
    if not report.rows:
        yield Paragraph(text="none was considered yet", tone="idle")
        return
    yield from pictures.gains(report)
    numbers = ("status<14", "gain<18", "ms per step<18", "numerics<15", "cost<6")
    columns = [
        *blocks.columns("strategy<19"),
        *blocks.columns(*numbers, whole=True),
        *blocks.columns("why<0", only="page"),
    ]
    yield Table(columns=columns, rows=[_strategy(row) for row in report.rows])
    if not_applicable := _not_applicable_text(report.rows):
        yield Paragraph(text=not_applicable, tone="idle", only="terminal")
    note = "numerics: relative difference of the outputs / of the worst gradient from the plain path"
    yield Paragraph(text=note, tone="idle", only="page")


def _strategy(row: StrategyRow) -> TableRow:
    tone = pictures.TONE_OF.get(row.status, "idle")
    treats = f"treats {', '.join(row.treats)}" if row.treats else ""
    allowed = "" if row.tolerance is None else f"allowed {row.tolerance:.1g}"
    cost = seconds_text(row.cost_s) if row.cost_s else "-"
    cells = blocks.cells(
        TableCell(text=name_text(row), tone="strong", small=_nonempty(row.summary, treats)),
        TableCell(text=row.status, tone=tone, sign=blocks.SIGNS[tone]),
        gain_text(row.gain, row.gain_low, row.gain_high),
        step_text(row),
        TableCell(text=numerics_text(row), small=_nonempty(", ".join(_nonempty(row.exactness, allowed)))),
        TableCell(text=cost, small=_nonempty(row.steps and f"{row.steps} steps")),
        row.why or "-",
    )
    return TableRow(cells=cells, below=row.why, only="page" if row.status == _NOT_APPLICABLE else "")


def _not_applicable_text(rows: Iterable[StrategyRow]) -> str:
    """Return which strategies don't apply, those with one reason together; '' if all do."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.status == _NOT_APPLICABLE:
            names.setdefault(row.why, []).append(row.name)
    reasons = (f"{', '.join(group)}{f' ({why})' if why else ''}" for why, group in names.items())
    return f"{_NOT_APPLICABLE}: {'; '.join(reasons)}" if names else ""


def _nonempty(*texts: object) -> list[str]:
    return [str(text) for text in texts if text]


def _anatomy(report: Report) -> Iterator[Section]:
    names = pictures.phases(report)
    if not names:
        return
    parts = (report.anatomy_before, report.anatomy_after)
    now = report.anatomy_after or report.anatomy_before
    longest = max(now, key=lambda name: now[name])
    rows = []
    for key, name in enumerate(names, start=1):
        mark, tone = (">", "strong") if name == longest else (" ", "")
        first = TableCell(text=name, short=f"{mark} {name}", tone=tone, key=key)
        numbers = [text for part in parts for text in _share_texts(part, name)]
        rows.append(TableRow(cells=blocks.cells(first, *numbers, tone=tone)))
    before, after = (ms_text(sum(part.values()) if part else None) for part in parts)
    rows.append(TableRow(cells=blocks.cells("  sum of phases", before, "", after, "", tone="idle")))
    numbers = ["before>9", "share>6", "after>9", "share>6"]
    columns = [*blocks.columns("phase<20", whole=True), *blocks.columns(*numbers)]
    table = Table(columns=columns, rows=rows, caption="Median ms per phase, and its share of the step")
    yield Section(
        name="anatomy",
        title="step anatomy",
        scope=" in ms (> marks the longest phase now)",
        blocks=[*pictures.anatomy(report), table],
    )


def _share_texts(part: dict[str, float], name: str) -> tuple[str, str]:
    value, total = finite(part.get(name)), finite(sum(part.values()))
    return ms_text(value), percent_text(value / total) if value is not None and total else "-"

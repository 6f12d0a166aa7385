"""What the report of `accel.optimize` shows, as data: its sections and their pictures; and what a run prints of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator

from accel.report import blocks, pictures
from accel.report.blocks import (
    Block,
    Document,
    Facts,
    Listing,
    Paragraph,
    Section,
    Table,
    TableCell,
    TableRow,
)
from accel.report.pictures import Axis, Bar, Part
from accel.report.quiet_rich import cell_len
from accel.report.report import NOTHING_REMEMBERED, Report, StrategyRow
from accel.report.terminal import MAX_WIDTH, Page, clip
from accel.report.words import (
    batch_text,
    clean,
    finite,
    gain_text,
    interval_text,
    limit_text,
    machine_text,
    model_text,
    ms_text,
    name_text,
    numerics_text,
    offers_text,
    percent_text,
    ratio_text,
    run_verdict_text,
    search_text,
    seconds_text,
    step_text,
    throughput_text,
)

EVENT_LIMIT = 20
TONE_OF = {"kept": "good", "undone": "bad", "inconclusive": "warn"}
"""Status of a strategy → tone; `idle` for any other."""
_NOT_APPLICABLE = "not applicable"


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


def summary(report: Report, whole: str) -> str:
    """Return the outcome of a search in at most six sentences, the speed-up first, for stderr.

    Args:
        report: of a search that has ended.
        whole: how to see the whole report.
    """
    page = Page(stream=sys.stderr)
    page.paragraph(f"accel: {report.model} {_headline(report)}", "bold green" if report.plan else "bold")
    for sentence in _sentences(report):
        page.paragraph(sentence, indent=2)
    page.paragraph(f"all strategies: {whole}", indent=2)
    return page.text()


def _headline(report: Report) -> str:
    if not report.plan or report.speedup is None or not report.is_settled:
        return run_verdict_text(report)
    return f"{gain_text(report.speedup, report.speedup_low, report.speedup_high)}: {throughput_text(report)}"


def _sentences(report: Report) -> Iterator[str]:
    if report.plan:
        yield f"training the same: {report.training_same or 'not known'}"
        if report.state != "replayed":  # its verdict names them
            yield f"kept: {', '.join(name_text(row) for row in report.rows if row.status == 'kept')}"
    else:
        yield _tried_text(report)
    if text := batch_text(report):
        yield f"batch size: {text}"
    yield f"limits the run now: {limit_text(report, remedy=False)}"
    yield f"search: {search_text(report)}"
    if text := offers_text(report):
        yield text
    if report.cache.startswith(NOTHING_REMEMBERED):
        yield report.cache


def told_late(report: Report, earlier: Report) -> str:
    """Return what has come to be known since a summary, in one sentence; '' if nothing has."""
    return "" if earlier.offers else offers_text(report)


def _tried_text(report: Report) -> str:
    off = [row for row in report.rows if row.status in ("undone", "inconclusive")]
    tried = ", ".join(f"{name_text(row)} ({row.why})" for row in off)
    untried = ", ".join(row.name for row in report.rows if row.status == "not tried")
    if not untried:
        return f"tried: {tried or 'nothing, no strategy fits this run'}"
    return f"tried: {tried or 'nothing'}; not tried: {untried}"


# --- the document ----------------------------------------------------------------------------------------------------


def document(report: Report) -> Document:
    """Lay out what the report of a run under `accel.optimize` shows."""
    lead = [Paragraph(text=f"training the same: {report.training_same or 'not known'}")]
    if text := offers_text(report):
        lead.append(Paragraph(text=text))
    if report.speedup is not None:
        lead.insert(0, Paragraph(text=f"speed-up: {ratio_text(report.speedup)}x, {interval_text(report)}"))
    remembered = ("remembered", report.remembered)
    cost = Facts(pairs=[("search", search_text(report)), remembered, ("limits the run now", limit_text(report))])
    machine = machine_text(report.machine, report.machine.world_size)
    fingerprint = Facts(pairs=[("fingerprint", report.fingerprint)])
    plan_text = json.dumps(report.plan, default=str) if report.plan else ""
    plan = Facts(pairs=[("plan", plan_text), ("cache", report.cache)], verbatim=True)
    events = [f"step {event.step}: {event.text}" for event in report.events]
    return Document(
        kind="accel",
        model=report.model,
        started=report.started,
        verdict=run_verdict_text(report),
        tone="good" if report.plan else "strong",
        mark="" if report.state == "done" else report.state,
        lead=lead,
        sections=[
            *_speed(report),
            Section(name="strategies", title="strategies", blocks=list(_strategies(report))),
            *_batch_sizes(report),
            Section(name="cost", title="cost and what is left", blocks=[cost]),
            *_anatomy(report),
            *blocks.listed("events", "events", Listing(items=events, mark="", latest=EVENT_LIMIT)),
            *blocks.ending(report, machine, model_text(report), fingerprint, plan),
        ],
    )


def _strategies(report: Report) -> Iterator[Block]:
    if not report.rows:
        yield Paragraph(text="none was considered yet", tone="idle")
        return
    yield from _gains_picture(report)
    columns = blocks.columns("strategy<", "status<", "gain<", "ms per step<", "numerics<", "cost<")
    yield Table(columns=columns, rows=[_strategy(row) for row in report.rows])
    for row in report.rows:
        if row.why and row.status != _NOT_APPLICABLE:
            yield Paragraph(text=f"{row.name}: {row.why}", tone="idle")
    if not_applicable := _not_applicable_text(report.rows):
        yield Paragraph(text=not_applicable, tone="idle")
    note = "numerics: relative difference of the outputs / of the worst gradient from the plain path"
    yield Paragraph(text=note, tone="idle")


def _strategy(row: StrategyRow) -> TableRow:
    tone = TONE_OF.get(row.status, "idle")
    treats = f"treats {', '.join(row.treats)}" if row.treats else ""
    allowed = "" if row.tolerance is None else f"allowed {row.tolerance:.1g}"
    cost = seconds_text(row.cost_s) if row.cost_s else "-"
    cells = [
        TableCell(text=name_text(row), tone="strong", small=_nonempty(row.summary, treats)),
        TableCell(text=row.status, tone=tone, sign=blocks.SIGNS[tone]),
        TableCell(text=gain_text(row.gain, row.gain_low, row.gain_high)),
        TableCell(text=step_text(row)),
        TableCell(text=numerics_text(row), small=_nonempty(", ".join(_nonempty(row.exactness, allowed)))),
        TableCell(text=cost, small=_nonempty(row.steps and f"{row.steps} steps")),
    ]
    return TableRow(cells=cells, page_only=row.status == _NOT_APPLICABLE)


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
    parts = {"before": report.anatomy_before, "after": report.anatomy_after}
    names = list(dict.fromkeys(name for part in parts.values() for name in part))
    if not names:
        return
    now = report.anatomy_after or report.anatomy_before
    longest = max(now, key=lambda name: now[name])
    rows = []
    for key, name in enumerate(names, start=1):
        mark, tone = (">", "strong") if name == longest else (" ", "")
        first = TableCell(text=name, short=f"{mark} {name}", tone=tone, key=key)
        numbers = [text for part in parts.values() for text in _share_texts(part, name)]
        rows.append(blocks.row(first, *numbers, tone=tone))
    before, after = (ms_text(sum(part.values()) if part else None) for part in parts.values())
    rows.append(blocks.row("  sum of phases", before, "", after, "", tone="idle"))
    columns = blocks.columns("phase<", "before>", "share>", "after>", "share>")
    table = Table(columns=columns, rows=rows)
    drawn = pictures.phase_bars("Phases of the step before and after", parts, names)
    title = "step anatomy: median ms (> marks the longest phase now)"
    yield Section(name="anatomy", title=title, blocks=[*drawn, table])


def _share_texts(part: dict[str, float], name: str) -> tuple[str, str]:
    value, total = finite(part.get(name)), finite(sum(part.values()))
    return ms_text(value), percent_text(value / total) if value is not None and total else "-"


def _batch_sizes(report: Report) -> Iterator[Section]:
    """Show the changes of the batch size, if it may change."""
    if report.max_batch_size is None:
        return
    columns = blocks.columns("step<", "samples<", "predicted<", "measured<", "noise<")
    rows = [
        blocks.row(
            str(row.step),
            TableCell(text=f"{row.batch}{'?' if row.tried else ''}", tone="strong"),
            *(_figure(value) for value in (row.goodput, row.measured, row.noise)),
        )
        for row in report.batch_rows
    ]
    facts = [("batch size", batch_text(report)), ("at most", f"{report.max_batch_size} samples")]
    if report.progress is not None:
        facts.append(("progress", f"{report.progress:.0f} steps of the loop's own batch"))
    table = [Table(columns=columns, rows=rows)] if rows else []
    reasons = [Paragraph(text=f"step {row.step}: {row.why}", tone="idle") for row in report.batch_rows if row.why]
    yield Section(name="batches", title="batch size", blocks=[Facts(pairs=facts), *table, *reasons])


def _figure(value: float | None) -> str:
    value = finite(value)
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- pictures --------------------------------------------------------------------------------------------------------


def _speed(report: Report) -> Iterator[Section]:
    """Draw the step before and after as bars from zero."""
    plain, accelerated = finite(report.plain_ms), finite(report.accel_ms)
    if plain is None or accelerated is None:
        return
    bars = []
    for name, ms, tone in (("before", plain, "idle"), ("after", accelerated, "good")):
        text = f"{ms_text(ms)} ms"
        bars.append(Bar(name, text, [Part(tone, "", f"{name}: {text}", 0.0, ms)]))
    title = "Median step before and after, interleaved in the closing trial"
    drawn = pictures.bars("steps", title, bars, Axis(high=max(plain, accelerated)), " ms")
    yield Section(name="speed", title="before and after", blocks=[drawn])


def _gains_picture(report: Report) -> Iterator[Block]:
    """Draw the interval of the gain of each strategy that was tried; a line marks no change."""
    rows = [row for row in report.rows if finite(row.gain) is not None]
    ends = [finite(end) for row in rows for end in (row.gain, row.gain_low, row.gain_high)]
    highest = max((end for end in ends if end is not None), default=1.0)
    axis = Axis(high=1.05 * max(highest, 1.0))
    bars = []
    for row in rows:
        low, high = (finite(row.gain if finite(end) is None else end) or 0.0 for end in (row.gain_low, row.gain_high))
        text = f"{gain_text(row.gain, row.gain_low, row.gain_high)} {row.status}"
        name, tone = name_text(row), TONE_OF.get(row.status, "idle")
        # A gain without an interval is a line.
        bars.append(Bar(name, text, [Part(tone, "", f"{name}: {text}", low, max(high, low + axis.high / 200))]))
    if bars:
        title = "Gain of each strategy against the run without it; right of the line (1.0x) is faster"
        yield pictures.bars("gains", title, bars, axis, "x", mark=1.0)

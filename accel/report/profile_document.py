"""What the report of `accel profile` shows, as data: its sections and their pictures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from accel.profiler.evidence import OpTime
from accel.profiler.phases import MEANING
from accel.profiler.report import Experiment, Finding, ProfileReport, RankRow, StepRow
from accel.report import blocks, words
from accel.report.blocks import (
    Block,
    Card,
    Document,
    Facts,
    Listing,
    Only,
    Paragraph,
    Picture,
    Section,
    Table,
    TableCell,
    TableColumn,
    TableRow,
)
from accel.report.pictures import Axis, BarSegment, Tick, label, length, segments, shade, tick
from accel.report.roofline import picture as roofline_picture
from accel.report.terminal import MAX_DEPTH, clip
from accel.report.words import clean, finite, machine_text, ms_text, percent_text

ROW_LIMIT = 12
"""Rows of a table on a terminal; a page has all."""
RANK_LIMIT = 16

_BAR = 12
"""Columns of the bar of a whole step on a terminal."""

TIMELINE_HEIGHT = 180
"""Pixels."""
TALL = 4.0
"""A step longer than this many medians is cut off, so that the others can be distinguished."""

_OUTCOMES = {
    "keep": ("helps", "good"),
    "drop": ("does not help", "bad"),
    "inconclusive": ("inconclusive", "warn"),
    "void": ("could not be tried", "idle"),
}
"""Verdict of an experiment → its text and tone."""


def document(report: ProfileReport) -> Document:
    """Lay out what the report of a profiled run shows."""
    names = _phases(report)
    script = Facts(pairs=[("script", report.ended), ("trace", report.trace_file)])
    return Document(
        kind="accel profile",
        model=report.host.model,
        started=report.started,
        verdict=words.verdict_text(report),
        tone="warn" if report.refused else "good",
        lead=list(_lead(report)),
        sections=[
            *_why(report),
            *blocks.listed("next", "next", Listing(items=report.next, mark="1. ")),
            *_evidence(report, names),
            *_timeline(report.timeline, names),
            *_experiments(report.experiments),
            *_ranks(report.ranks, names),
            *_lines(report),
            *_operators(report),
            *_syncs(report),
            *_gpus(report),
            *_host(report),
            *blocks.ending(report, machine_text(report.host), report.host.model, script),
        ],
    )


def _phases(report: ProfileReport) -> list[str]:
    """List every phase once, in the order of the numbers that identify them on the page."""
    parts = [node.name for node in report.evidence.children] if report.evidence else []
    measured = [*(row.phases_ms for row in report.timeline), *(row.phases_ms for row in report.ranks)]
    return list(dict.fromkeys([*parts, *words.phase_names(measured)]))


def _lead(report: ProfileReport) -> Iterator[Paragraph]:
    if ended := words.ended_text(report):
        yield Paragraph(text=ended, tone="warn")
    if report.beside:
        yield Paragraph(text=report.beside, tone="warn")
    yield Paragraph(text=words.run_text(report))


def _limited(rows: Sequence[TableRow], noun: str) -> tuple[list[TableRow], str]:
    """Limit the rows on a terminal, with a note there; a page has all."""
    limited = [*rows[:ROW_LIMIT], *(replace(row, only="page") for row in rows[ROW_LIMIT:])]
    return limited, blocks.hidden_text(len(rows) - ROW_LIMIT, "more", noun)


# --- findings --------------------------------------------------------------------------------------------------------


def _why(report: ProfileReport) -> Iterator[Section]:
    cards: list[Block] = [_card(number, finding) for number, finding in enumerate(report.findings, start=1)]
    if not cards:
        text = "no cause was named" if report.refused else "nothing was found that holds the run back"
        cards = [Paragraph(text=text, only="page")]
    cards += [Paragraph(text=words.borderline_text(finding), tone="idle") for finding in report.borderline]
    yield Section(name="why", title="why", blocks=cards)


def _card(number: int, finding: Finding) -> Card:
    strategy = f"strategy {finding.strategy}" if finding.strategy else ""
    remedies = [("do", finding.remedy), ("accel.optimize does it", strategy)]
    return Card(
        number=number,
        title=finding.title,
        cause=words.cause_text(finding),
        effect=words.effect_text(finding),
        tone="idle" if finding.measured is None else "good" if finding.confirmed else "warn",
        evidence=[sentence for sentence in (*finding.why, words.experiment_text(finding)) if sentence],
        remedies=[(who, remedy) for who, remedy in remedies if remedy],
        gauge=_gauge(number, finding),
    )


# --- the step --------------------------------------------------------------------------------------------------------


def _evidence(report: ProfileReport, names: list[str]) -> Iterator[Section]:
    title = "where a step's time goes"
    tree = words.tree(report.evidence)
    if not tree:
        yield Section(name="anatomy", title=title, blocks=[Paragraph(text="not measured", only="page")])
        return
    columns = [
        *blocks.columns("part<36", "ms>6", "share>7", f"of the step<{_BAR}"),
        TableColumn(title="", width=24, left=True, prose=True),
    ]
    caption = f"Mean of {report.steps} steps; parts add up to what they are part of, all of them to the step"
    yield Section(
        name="anatomy",
        title=title,
        scope=" (parts add up to what they are part of)",
        blocks=[
            *_anatomy(report, names),
            Table(columns=columns, rows=[_part(row, names) for row in tree], caption=caption),
            Paragraph(text=words.unattributed_text(report), tone="idle"),
        ],
    )


def _part(row: words.TreeRow, names: list[str]) -> TableRow:
    indent, tone = "  " * min(row.depth, MAX_DEPTH), "strong" if row.depth < 2 else ""
    length = round(row.share * _BAR)
    key, meaning = (names.index(row.name) + 1, MEANING.get(row.name, "")) if row.depth == 1 else (0, "")
    bar = [BarSegment(number=0, name=row.name, text=row.percent, at=0.0, width=round(100 * row.share, 2))]
    cells = blocks.cells(
        TableCell(text=row.name, short=indent + row.name, tone=tone, key=key),
        TableCell(text=row.ms, tone=tone),
        TableCell(text=row.percent, tone=tone),
        TableCell(text="", short="█" * length if length else "▏" if row.share else "", bar=bar),
        TableCell(text=row.note or meaning, short=row.note, tone="idle"),
    )
    return TableRow(cells=cells, depth=row.depth)


_RESTORED = "these steps did not train as usual; the state from before them was restored"


def _experiments(experiments: Sequence[Experiment]) -> Iterator[Section]:
    columns = blocks.columns("experiment<26", "ms per step, A → B>20", "saves>18", "pairs>5", "outcome<19")
    rows = []
    for row in experiments:
        restored = [_RESTORED] if row.changes_learning else []
        what = "; ".join(filter(None, [row.what, *restored]))
        outcome, tone = _OUTCOMES.get(row.verdict, (row.verdict, "warn"))
        cells = blocks.cells(
            TableCell(text=row.name, tone="strong", small=[what] if what else []),
            f"{ms_text(row.before_ms)} → {ms_text(row.after_ms)}",
            words.saving_text(None if row.verdict == "void" else row.saving),
            str(row.pairs),
            TableCell(text=outcome, tone=tone, sign=blocks.SIGNS[tone]),
        )
        rows.append(TableRow(cells=cells, below=what))
    table = Table(columns=columns, rows=rows, caption="Real steps with (B) and without (A) something, interleaved")
    scope = ": real steps with (B) and without (A), interleaved"
    yield from blocks.tabled("experiments", "experiments", scope, table)


# --- ranks -----------------------------------------------------------------------------------------------------------


def _ranks(ranks: Sequence[RankRow], names: list[str]) -> Iterator[Section]:
    if len(ranks) < 2:
        return
    phases = words.phase_names(row.phases_ms for row in ranks)
    longest = _longest(ranks, phases)
    columns = [
        *blocks.columns("rank<12", "host<12", "step>7"),
        *blocks.columns("phases<0", only="page"),
        *(
            TableColumn(title=name, width=max(8, min(len(name), 13)), only="" if name in longest else "page")
            for name in phases
        ),
        *blocks.columns("rest>7", only="terminal"),
        *blocks.columns("run/wait/asleep %>17"),
        *blocks.columns("steps>0", only="page"),
    ]
    slowest = sorted(ranks, key=lambda row: (not row.straggler, -(finite(row.step_ms) or 0.0)))[:RANK_LIMIT]
    axis = Axis(low=0.0, high=max(sum(map(length, row.phases_ms.values())) for row in ranks))
    rows = []
    for row in ranks:
        rest = sum(finite(ms) or 0.0 for name, ms in row.phases_ms.items() if name not in longest)
        parts = [(name, row.phases_ms[name]) for name in words.phase_names([row.phases_ms])]
        tone, sign, straggler = ("warn", "▲", " straggler") if row.straggler else ("", "", "")
        cells = blocks.cells(
            TableCell(text=f"{row.rank}{straggler}", tone=tone, sign=sign),
            row.host,
            ms_text(row.step_ms),
            TableCell(text="", bar=segments(parts, names, axis)),
            *(ms_text(row.phases_ms.get(name)) for name in phases),
            ms_text(rest),
            "-" if row.thread is None else "/".join(map(words.number_text, vars(row.thread).values())),
            str(row.steps),
            tone=tone,
        )
        only: Only = "" if row in slowest else "page"
        rows.append(TableRow(cells=cells, only=only))
    more = blocks.hidden_text(len(ranks) - len(slowest), "faster", "rank")
    caption = "Mean ms per step of each rank; its thread: on a core, waiting for a core, asleep"
    table = Table(columns=columns, rows=rows, more=more, caption=caption)
    yield from blocks.tabled("ranks", "ranks", ": ms per step", table)


def _longest(ranks: Sequence[RankRow], names: list[str]) -> list[str]:
    """List the three phases that take longest over all ranks, in the order of a step."""
    total = {name: sum(finite(row.phases_ms.get(name)) or 0.0 for row in ranks) for name in names}
    return [name for name in names if name in sorted(names, key=lambda name: -total[name])[:3]]


# --- lines, operators, synchronising calls ---------------------------------------------------------------------------


def _lines(report: ProfileReport) -> Iterator[Section]:
    rows = []
    for line in report.lines:
        tags = f" ({', '.join(line.tags)})" if line.tags else ""
        source = line.source.strip()
        cells = blocks.cells(
            line.phase,
            percent_text(line.share),
            ms_text(line.seconds),
            percent_text(line.blocked),
            TableCell(text=f"{line.file}:{line.line}{tags}", code=source),
        )
        rows.append(TableRow(cells=cells, below=source, below_tone="strong", indent=4))
    columns = blocks.columns("phase<13", "of phase>8", "seconds>7", "asleep>6", "line<58")
    limited, more = _limited(rows, "line")
    table = Table(columns=columns, rows=limited, more=more, caption="Where the loop's own source was, by sampling")
    yield from blocks.tabled("lines", "source lines", ", by sampling", table)


def _operators(report: ProfileReport) -> Iterator[Section]:
    roofs = words.roof_text(report.roofline)
    if not report.ops:
        if roofs:
            yield Section(name="operators", title="roofline", blocks=[Paragraph(text=roofs)])
        return
    columns = [
        *blocks.columns("operator<31", "kind<11", "calls>7", "ms>7", "share>6", "GFLOP/s>8", "GB/s>7"),
        *blocks.columns("FLOP/byte>0", only="page"),
        *blocks.columns("of roof>7"),
    ]
    rows, more = _limited([_operator(number, op, report) for number, op in enumerate(report.ops, start=1)], "operator")
    caption = "Per step; of roof: the rate reached against the highest that its bytes and the device allow"
    drawn = roofline_picture(report.ops, report.roofline) if report.roofline else None
    short = "* a call is so short that launching it costs more than doing it"
    notes = [short] if any(op.small for op in report.ops) else []
    notes += words.roof_notes(report.ops, report.roofline)
    notes += [f"roof, {roofs}"] if roofs else []
    yield Section(
        name="operators",
        title="operators",
        scope=", per step",
        blocks=[
            *([drawn] if drawn else []),
            Table(columns=columns, rows=rows, more=more, caption=caption),
            *(Paragraph(text=note, tone="idle") for note in notes),
        ],
    )


def _operator(number: int, op: OpTime, report: ProfileReport) -> TableRow:
    mark = " *" if op.small else ""
    # A GPU kernel's name is a whole C++ template.
    short = clip(clean(op.name[:200]), 29) + mark
    cells = blocks.cells(
        TableCell(text=f"{number} {op.name}{mark}", short=short),
        op.kind,
        *(ms_text(op.calls), ms_text(op.ms), percent_text(op.share)),
        *(ms_text(op.gflops), ms_text(op.gb_per_s), ms_text(op.intensity)),
        words.roof_share_text(op, report.roofline),
    )
    return TableRow(cells=cells)


def _syncs(report: ProfileReport) -> Iterator[Section]:
    rows = []
    for sync in report.syncs:
        place = f"{sync.file}:{sync.line}" if sync.file else "-"
        rows.append(TableRow(cells=blocks.cells(sync.name, ms_text(sync.calls), ms_text(sync.ms), place)))
    columns = blocks.columns("call<26", "calls>7", "ms>7", "line<54")
    limited, more = _limited(rows, "call")
    table = Table(columns=columns, rows=limited, more=more, caption="Per step, in the traced window")
    yield from blocks.tabled("syncs", "where the host waits for the device", ", per step", table)


# --- machine ---------------------------------------------------------------------------------------------------------


def _gpus(report: ProfileReport) -> Iterator[Section]:
    if not report.gpus:
        return
    gpus = []
    for gpu in report.gpus:
        facts = ", ".join(f"{name} {value}" for name, value in words.gpu_text(gpu) if value != "-")
        gpus.append(Paragraph(text=f"{gpu.index} {gpu.name}: {facts}", tone="warn" if gpu.throttled else ""))
    note = Paragraph(text="busy says that some kernel ran, not how full the GPU was", tone="idle", only="page")
    yield Section(name="gpus", title="GPUs", scope=", median over the run", blocks=[*gpus, note])


def _host(report: ProfileReport) -> Iterator[Section]:
    if facts := words.host_texts(report.host):
        yield Section(name="host", title="host", blocks=[Facts(pairs=facts)])


# --- pictures --------------------------------------------------------------------------------------------------------


def _gauge(number: int, finding: Finding) -> Picture | None:
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


def _anatomy(report: ProfileReport, names: Sequence[str]) -> Iterator[Picture]:
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


def _timeline(rows: Sequence[StepRow], names: Sequence[str]) -> Iterator[Section]:
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
    parts_drawn = [
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
        "blocks": parts_drawn,
    }


def _step_ticks(rows: Sequence[StepRow]) -> list[Tick]:
    """Label the first step, the last and up to three between them."""
    count = min(len(rows), 5)
    places = sorted({round(n * (len(rows) - 1) / max(count - 1, 1)) for n in range(count)})
    return [tick(round((place + 0.5) * 100 / len(rows), 3), f"{rows[place].step:.7g}") for place in places]

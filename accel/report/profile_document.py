"""What the report of `accel profile` shows, as data: its sections and their pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from accel.profiler.evidence import OpTime
from accel.profiler.phases import MEANING
from accel.profiler.report import Experiment, Finding, Node, ProfileReport, RankRow
from accel.report import blocks, pictures, words
from accel.report.blocks import (
    Block,
    Card,
    Document,
    Facts,
    Listing,
    Paragraph,
    Section,
    Table,
    TableCell,
    TableColumn,
    TableRow,
)
from accel.report.terminal import clip
from accel.report.words import clean, finite, machine_text, ms_text, percent_text

ROW_LIMIT = 12
"""Rows of a table on a terminal; a page has all."""
RANK_LIMIT = 16

_BAR = 12
"""Columns of the bar of a whole step on a terminal."""

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
            *_timeline(report, names),
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
    limited = [*rows[:ROW_LIMIT], *(replace(row, page_only=True) for row in rows[ROW_LIMIT:])]
    return limited, blocks.hidden_text(len(rows) - ROW_LIMIT, "more", noun)


# --- findings --------------------------------------------------------------------------------------------------------


def _why(report: ProfileReport) -> Iterator[Section]:
    cards: list[Block] = [_card(number, finding) for number, finding in enumerate(report.findings, start=1)]
    if not cards:
        text = "no cause was named" if report.refused else "nothing was found that holds the run back"
        cards = [Paragraph(text=text)]
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
    )


# --- the step --------------------------------------------------------------------------------------------------------


def _evidence(report: ProfileReport, names: list[str]) -> Iterator[Section]:
    if report.evidence is None:
        return
    phases: dict[str, float] = {}
    for child in report.evidence.children:
        phases[child.name] = phases.get(child.name, 0.0) + child.ms
    rows = [_part(depth, node, names) for depth, node in words.tree(report.evidence)]
    yield Section(
        name="anatomy",
        title=f"where a step's time goes: mean of {words.count_text(report.steps, 'step')}, parts add up",
        blocks=[
            *pictures.phase_bars("Phases of a mean step", {report.evidence.name: phases}, names),
            Table(columns=blocks.columns("part<", "ms>", "share>", "of the step<", "<"), rows=rows),
            Paragraph(text=words.unattributed_text(report), tone="idle"),
        ],
    )


def _part(depth: int, node: Node, names: list[str]) -> TableRow:
    tone = "strong" if depth < 2 else ""
    share = min(max(finite(node.share) or 0.0, 0.0), 1.0)
    length = round(share * _BAR)
    key, meaning = (names.index(node.name) + 1, MEANING.get(node.name, "")) if depth == 1 else (0, "")
    percent = finite(100 * node.share)
    return blocks.row(
        TableCell(text=node.name, tone=tone, key=key),
        TableCell(text=ms_text(node.ms), tone=tone),
        TableCell(text="-" if percent is None else f"{percent:.1f} %", tone=tone),
        "█" * length if length else "▏" if share else "",
        TableCell(text=node.note or meaning, short=node.note, tone="idle"),
        depth=depth,
    )


def _timeline(report: ProfileReport, names: list[str]) -> Iterator[Section]:
    if report.timeline:
        yield Section(name="steps", title="step by step", blocks=[pictures.timeline(report.timeline, names)])


_RESTORED = "these steps did not train as usual; the state from before them was restored"


def _experiments(experiments: Sequence[Experiment]) -> Iterator[Section]:
    rows, notes = [], []
    for each in experiments:
        what = "; ".join(filter(None, [each.what, _RESTORED if each.changes_learning else ""]))
        outcome, tone = _OUTCOMES.get(each.verdict, (each.verdict, "warn"))
        rows.append(
            blocks.row(
                TableCell(text=each.name, tone="strong"),
                f"{ms_text(each.before_ms)} → {ms_text(each.after_ms)}",
                words.saving_text(None if each.verdict == "void" else each.saving),
                str(each.pairs),
                TableCell(text=outcome, tone=tone, sign=blocks.SIGNS[tone]),
            )
        )
        if what:
            notes.append(Paragraph(text=f"{each.name}: {what}", tone="idle"))
    columns = blocks.columns("experiment<", "ms per step, A → B>", "saves>", "pairs>", "outcome<")
    table = Table(columns=columns, rows=rows)
    title = "experiments: real steps with (B) and without (A), interleaved"
    yield from blocks.tabled("experiments", title, table, *notes)


# --- ranks -----------------------------------------------------------------------------------------------------------


def _ranks(ranks: Sequence[RankRow], names: list[str]) -> Iterator[Section]:
    if len(ranks) < 2:
        return
    phases = words.phase_names(row.phases_ms for row in ranks)
    longest = _longest(ranks, phases)
    columns = [
        *blocks.columns("rank<", "host<", "step>"),
        *blocks.columns("phases<", only="page"),
        *(TableColumn(name, left=False, only="" if name in longest else "page") for name in phases),
        *blocks.columns("rest>", only="terminal"),
        *blocks.columns("run/wait/asleep %>"),
        *blocks.columns("steps>", only="page"),
    ]
    slowest = sorted(ranks, key=lambda row: (not row.straggler, -(finite(row.step_ms) or 0.0)))[:RANK_LIMIT]
    stacks = [pictures.stacked({name: row.phases_ms.get(name, 0.0) for name in phases}, names) for row in ranks]
    axis = pictures.Axis(high=max((parts[-1].end for parts in stacks if parts), default=0.0))
    rows = []
    for each, parts in zip(ranks, stacks, strict=True):
        rest = sum(finite(ms) or 0.0 for name, ms in each.phases_ms.items() if name not in longest)
        tone, sign, straggler = ("warn", "▲", " straggler") if each.straggler else ("", "", "")
        line = blocks.row(
            TableCell(text=f"{each.rank}{straggler}", tone=tone, sign=sign),
            each.host,
            ms_text(each.step_ms),
            TableCell(text="", bar=pictures.strip(parts, axis)),
            *(ms_text(each.phases_ms.get(name)) for name in phases),
            ms_text(rest),
            "-" if each.thread is None else "/".join(map(words.number_text, vars(each.thread).values())),
            str(each.steps),
            tone=tone,
        )
        rows.append(replace(line, page_only=each not in slowest))
    more = blocks.hidden_text(len(ranks) - len(slowest), "faster", "rank")
    table = Table(columns=columns, rows=rows, more=more)
    yield from blocks.tabled("ranks", "ranks: ms per step; thread on a core, waiting for one, asleep", table)


def _longest(ranks: Sequence[RankRow], names: list[str]) -> list[str]:
    """List the three phases that take longest over all ranks, in the order of a step."""
    total = {name: sum(finite(row.phases_ms.get(name)) or 0.0 for row in ranks) for name in names}
    return [name for name in names if name in sorted(names, key=lambda name: -total[name])[:3]]


# --- lines, operators, synchronising calls ---------------------------------------------------------------------------


def _lines(report: ProfileReport) -> Iterator[Section]:
    rows = []
    for line in report.lines:
        tags = f" ({', '.join(line.tags)})" if line.tags else ""
        place, source = f"{line.file}:{line.line}{tags}", line.source.strip()
        where = TableCell(text=place, short=f"{place}: {source}" if source else place, small=[source] if source else [])
        numbers = percent_text(line.share), ms_text(line.seconds), percent_text(line.blocked)
        rows.append(blocks.row(line.phase, *numbers, where))
    columns = blocks.columns("phase<", "of phase>", "seconds>", "asleep>", "line<")
    limited, more = _limited(rows, "line")
    table = Table(columns=columns, rows=limited, more=more)
    yield from blocks.tabled("lines", "source lines, by sampling", table)


def _operators(report: ProfileReport) -> Iterator[Section]:
    roofs = words.roof_text(report.roofline)
    if not report.ops:
        if roofs:
            yield Section(name="operators", title="roofline", blocks=[Paragraph(text=roofs)])
        return
    columns = [
        *blocks.columns("operator<", "kind<", "calls>", "ms>", "share>", "GFLOP/s>", "GB/s>"),
        *blocks.columns("FLOP/byte>", only="page"),
        *blocks.columns("of roof>"),
    ]
    rows, more = _limited([_operator(number, op, report) for number, op in enumerate(report.ops, start=1)], "operator")
    short = "* a call is so short that launching it costs more than doing it"
    notes = [short] if any(op.small for op in report.ops) else []
    notes += words.roof_notes(report.ops, report.roofline)
    notes += [f"roof, {roofs}"] if roofs else []
    table = Table(columns=columns, rows=rows, more=more)
    paragraphs = [Paragraph(text=note, tone="idle") for note in notes]
    drawn = pictures.roofline(report.ops, report.roofline)
    yield Section(name="operators", title="operators, per step", blocks=[*drawn, table, *paragraphs])


def _operator(number: int, op: OpTime, report: ProfileReport) -> TableRow:
    mark = " *" if op.small else ""
    # A GPU kernel's name is a whole C++ template.
    return blocks.row(
        TableCell(text=f"{number} {op.name}{mark}", short=clip(clean(op.name[:200]), 29) + mark),
        op.kind,
        *(ms_text(op.calls), ms_text(op.ms), percent_text(op.share)),
        *(ms_text(op.gflops), ms_text(op.gb_per_s), ms_text(op.intensity)),
        words.roof_share_text(op, report.roofline),
    )


def _syncs(report: ProfileReport) -> Iterator[Section]:
    rows = []
    for sync in report.syncs:
        place = f"{sync.file}:{sync.line}" if sync.file else "-"
        rows.append(blocks.row(sync.name, ms_text(sync.calls), ms_text(sync.ms), place))
    columns = blocks.columns("call<", "calls>", "ms>", "line<")
    limited, more = _limited(rows, "call")
    table = Table(columns=columns, rows=limited, more=more)
    yield from blocks.tabled("syncs", "where the host waits for the device, per step", table)


# --- machine ---------------------------------------------------------------------------------------------------------


def _gpus(report: ProfileReport) -> Iterator[Section]:
    if not report.gpus:
        return
    gpus = []
    for gpu in report.gpus:
        facts = ", ".join(f"{name} {value}" for name, value in words.gpu_text(gpu) if value != "-")
        gpus.append(Paragraph(text=f"{gpu.index} {gpu.name}: {facts}", tone="warn" if gpu.throttled else ""))
    note = Paragraph(text="busy says that some kernel ran, not how full the GPU was", tone="idle")
    yield Section(name="gpus", title="GPUs, median over the run", blocks=[*gpus, note])


def _host(report: ProfileReport) -> Iterator[Section]:
    if facts := words.host_texts(report.host):
        yield Section(name="host", title="host", blocks=[Facts(pairs=facts)])

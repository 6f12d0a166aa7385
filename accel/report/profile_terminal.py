"""A profile report as text for a terminal or a log: what holds the run back, why, and what to do come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel.profiler.report import Finding, ProfileReport, RankRow
from accel.report import profile_words as words
from accel.report.terminal import Cell, Page, clean, clip, count_text, finite, fitting, ms_text

LINES_SHOWN = 12
OPS_SHOWN = 12
RANKS_SHOWN = 16

_OUTCOME_STYLES = {"keep": "bold green", "drop": "red", "refused": "yellow"}
_BAR = 12


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of a table; on a narrow page it moves to a line below its row."""

    title: str
    width: int
    right: bool = True


def render(report: ProfileReport, width: int | None = None, color: bool | None = None) -> str:
    """Render the report as text, verdict first.

    Args:
        report: what to show.
        width: columns; None asks the terminal. The text is never wider than `min(width, 100)`, readable down to 60.
        color: whether to write ANSI codes; None writes them only to a terminal, and never when `NO_COLOR` is set.

    Returns:
        Lines without a final newline; plain ASCII if stdout can't take Unicode.
    """
    page = Page(width, color)
    for section in (
        *(_verdict, _findings, _next, _evidence, _experiments, _ranks, _lines),
        *(_ops, _syncs, _gpus, _host, _unseen, _origin),
    ):
        section(page, report)
    return page.text()


def _table(page: Page, columns: Sequence[_Column], texts: Sequence[str], styles: Sequence[str]) -> None:
    """Write one row; what does not fit goes to the line below with its title."""
    shown = len(fitting({column.title: column.width for column in columns}, page.width))
    cells = zip(columns, texts, styles, strict=True)
    page.row([Cell(text=text, width=c.width, style=style, right=c.right) for c, text, style in [*cells][:shown]])
    left = zip(columns[shown:], texts[shown:], strict=True)
    if below := ", ".join(f"{column.title} {text}" for column, text in left if text not in {"", "-"}):
        page.say(below, indent=2)


def _heads(page: Page, columns: Sequence[_Column]) -> None:
    shown = fitting({column.title: column.width for column in columns}, page.width)
    page.row([Cell(text=c.title, width=c.width, style="dim", right=c.right) for c in columns[: len(shown)]])


def _verdict(page: Page, report: ProfileReport) -> None:
    page.say(f"accel profile: {words.verdict_text(report)}", "bold yellow" if report.refused else "bold green")
    if ended := words.ended_text(report):
        page.say(ended, "yellow")
    page.say(words.run_text(report))


def _findings(page: Page, report: ProfileReport) -> None:
    if not report.findings:
        return
    page.heading("why")
    for number, finding in enumerate(report.findings, start=1):
        _finding(page, number, finding)


def _finding(page: Page, number: int, finding: Finding) -> None:
    page.say(f"{number}. {finding.title}", "bold")
    if cause := words.cause_text(finding):
        page.say(cause, "dim", indent=3)
    page.say(words.effect_text(finding), "green" if finding.confirmed else "", indent=3)
    for sentence in finding.why:
        page.say(f"- {sentence}", indent=3)
    if experiment := words.experiment_text(finding):
        page.say(f"- {experiment}", indent=3)
    if finding.remedy:
        page.say(f"do: {finding.remedy}", indent=3)
    if finding.strategy:
        page.say(f"accel.optimize does it: strategy {finding.strategy}", indent=3)


def _next(page: Page, report: ProfileReport) -> None:
    if not report.next:
        return
    page.heading("next")
    for number, step in enumerate(report.next, start=1):
        page.say(f"{number}. {step}")


def _evidence(page: Page, report: ProfileReport) -> None:
    rows = words.tree(report.evidence)
    if not rows:
        return
    page.heading("where a step's time goes (parts add up to what they are part of)")
    for row in rows:
        _part(page, row)
    page.say(words.unattributed_text(report), "dim")


def _part(page: Page, row: words.TreeRow) -> None:
    indent, style = 2 * min(row.depth, 8), "bold" if row.depth < 2 else ""
    blocks = round(row.share * _BAR)
    bar = "█" * blocks if blocks else "▏" if row.share else ""
    cells = [
        Cell(text=" " * indent + row.name, width=36, style=style),
        Cell(text=row.ms, width=6, style=style, right=True),
        Cell(text=row.percent, width=7, style=style, right=True),
        Cell(text=bar, width=_BAR),
    ]
    room = page.width - sum(cell.width + 2 for cell in cells)
    if room < 24:
        page.row(cells if room >= -2 else cells[:-1])
        if row.note:
            page.say(row.note, "dim", indent=indent + 2)
    else:
        page.row([*cells, Cell(text=row.note, width=room, style="dim", prose=True)])


def _experiments(page: Page, report: ProfileReport) -> None:
    if not report.experiments:
        return
    page.heading("experiments: real steps with (B) and without (A), interleaved")
    columns = (
        _Column(title="experiment", width=26, right=False),
        _Column(title="ms per step, A → B", width=20),
        _Column(title="saves", width=18),
        _Column(title="pairs", width=5),
        _Column(title="outcome", width=19, right=False),
    )
    _heads(page, columns)
    for row in report.experiments:
        step = f"{ms_text(row.before_ms)} → {ms_text(row.after_ms)}"
        texts = (row.name, step, words.gave_text(row), str(row.pairs), words.outcome_text(row))
        _table(page, columns, texts, ("bold", "", "", "", _OUTCOME_STYLES.get(row.verdict, "")))
        if what := words.what_text(row):
            page.say(what, "dim", indent=2)


def _ranks(page: Page, report: ProfileReport) -> None:
    if len(report.ranks) < 2:
        return
    page.heading("ranks: ms per step")
    names = _longest(report.ranks)
    columns = (
        _Column(title="rank", width=12, right=False),
        _Column(title="host", width=12, right=False),
        _Column(title="step", width=7),
        *(_Column(title=name, width=max(8, min(len(name), 13))) for name in names),
        _Column(title="rest", width=7),
        _Column(title="run/wait/asleep %", width=17),
    )
    _heads(page, columns)
    shown = _worst(report.ranks)
    for row in shown:
        style = "bold yellow" if row.straggler else ""
        rest = sum(finite(ms) or 0.0 for name, ms in row.phases_ms.items() if name not in names)
        label = f"{row.rank}{' straggler' if row.straggler else ''}"
        phases = [ms_text(row.phases_ms.get(name)) for name in names]
        texts = (label, row.host, ms_text(row.step_ms), *phases, ms_text(rest), words.short_thread_text(row.thread))
        _table(page, columns, texts, [style] * len(texts))
    if len(shown) < len(report.ranks):
        page.say(f"… {len(report.ranks) - len(shown)} faster ranks are in the JSON report", "dim")


def _longest(ranks: Sequence[RankRow]) -> list[str]:
    """List the three phases that take longest over all ranks, in the order of a step."""
    names = words.phase_names(row.phases_ms for row in ranks)
    total = {name: sum(finite(row.phases_ms.get(name)) or 0.0 for row in ranks) for name in names}
    return [name for name in names if name in sorted(names, key=lambda name: -total[name])[:3]]


def _worst(ranks: Sequence[RankRow]) -> list[RankRow]:
    """List stragglers and the slowest others, as many as are shown, in the order of ranks."""
    slow = sorted(ranks, key=lambda row: (not row.straggler, -(finite(row.step_ms) or 0.0)))[:RANKS_SHOWN]
    return sorted(slow, key=lambda row: row.rank)


def _lines(page: Page, report: ProfileReport) -> None:
    if not report.lines:
        return
    page.heading("source lines, by sampling")
    columns = (
        _Column(title="phase", width=13, right=False),
        _Column(title="of phase", width=8),
        _Column(title="seconds", width=7),
        _Column(title="asleep", width=6),
        _Column(title="line", width=58, right=False),
    )
    _heads(page, columns)
    for row in report.lines[:LINES_SHOWN]:
        where = f"{row.file}:{row.line}" + (f" ({', '.join(row.tags)})" if row.tags else "")
        shares = (words.percent_text(row.share), ms_text(row.seconds), words.percent_text(row.blocked))
        _table(page, columns, (row.phase, *shares, where), [""] * len(columns))
        if row.source:
            page.say(row.source.strip(), "bold", indent=4)
    _cut(page, len(report.lines) - LINES_SHOWN, "line")


def _ops(page: Page, report: ProfileReport) -> None:
    roofs = words.roof_text(report.roofline)
    if not report.ops:
        if roofs:
            page.heading("roofline")
            page.say(roofs)
        return
    page.heading("operators, per step")
    columns = (
        _Column(title="operator", width=31, right=False),
        _Column(title="kind", width=11, right=False),
        _Column(title="calls", width=7),
        _Column(title="ms", width=7),
        _Column(title="share", width=6),
        _Column(title="GFLOP/s", width=8),
        _Column(title="GB/s", width=7),
        _Column(title="of roof", width=7),
    )
    _heads(page, columns)
    for op in report.ops[:OPS_SHOWN]:
        rates = (ms_text(op.gflops), ms_text(op.gb_per_s), words.roof_share_text(op, report.roofline))
        # A GPU kernel's name is a whole C++ template; the page and the JSON have all of it.
        name = clip(clean(op.name[:200]), 29) + (" *" if op.small else "")
        texts = (name, op.kind, ms_text(op.calls), ms_text(op.ms), words.percent_text(op.share), *rates)
        _table(page, columns, texts, [""] * len(columns))
    _cut(page, len(report.ops) - OPS_SHOWN, "operator")
    if any(op.small for op in report.ops[:OPS_SHOWN]):
        page.say("* a call is so short that launching it costs more than doing it", "dim")
    for note in words.roof_notes(report.ops[:OPS_SHOWN], report.roofline):
        page.say(note, "dim")
    if roofs:
        page.say(f"roof, {roofs}", "dim")


def _syncs(page: Page, report: ProfileReport) -> None:
    if not report.syncs:
        return
    page.heading("where the host waits for the device, per step")
    columns = (
        _Column(title="call", width=26, right=False),
        _Column(title="calls", width=7),
        _Column(title="ms", width=7),
        _Column(title="line", width=54, right=False),
    )
    _heads(page, columns)
    for sync in report.syncs[:LINES_SHOWN]:
        texts = (sync.name, ms_text(sync.calls), ms_text(sync.ms), f"{sync.file}:{sync.line}" if sync.file else "-")
        _table(page, columns, texts, [""] * len(columns))
    _cut(page, len(report.syncs) - LINES_SHOWN, "call")


def _cut(page: Page, hidden: int, noun: str) -> None:
    if hidden > 0:
        page.say(f"… {hidden} more {count_text(hidden, noun).split(' ', 1)[1]} in the JSON report", "dim")


def _gpus(page: Page, report: ProfileReport) -> None:
    if not report.gpus:
        return
    page.heading("GPUs, median over the run")
    for gpu in report.gpus:
        facts = ", ".join(f"{name} {value}" for name, value in words.gpu_text(gpu) if value != "-")
        page.say(f"{gpu.index} {gpu.name}: {facts}", "yellow" if gpu.throttled else "")


def _host(page: Page, report: ProfileReport) -> None:
    facts = words.host_texts(report.host)
    if not facts:
        return
    page.heading("host")
    for name, text in facts:
        page.say(f"{name}: {text}")


def _unseen(page: Page, report: ProfileReport) -> None:
    if not report.unseen:
        return
    page.heading("what could not be seen")
    for sentence in report.unseen:
        page.say(f"- {sentence}")


def _origin(page: Page, report: ProfileReport) -> None:
    page.heading("where and how")
    page.say(f"machine: {words.machine_text(report.host)}")
    facts = (
        ("model", report.host.model),
        ("started", report.started),
        ("command", report.command),
        ("script", report.ended),
        ("trace", report.trace_file),
    )
    for name, text in facts:
        if text:
            page.say(f"{name}: {text}")

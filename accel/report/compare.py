"""Compare two reports of one kind: whether the newer run is slower, and what else changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from accel.errors import InvalidArgument, ReportError
from accel.profiler.report import ProfileReport
from accel.report import blocks, terminal
from accel.report.blocks import Document, Paragraph, Section, Table, TableCell, TableRow
from accel.report.optimize_document import TONE_OF
from accel.report.report import Report
from accel.report.words import ended_text, finite, gain_text, ms_text, percent_text

T = TypeVar("T")

_SAME_BATCH = 0.15
"""By how much samples per step, a mean over a run, may differ between runs of one batch size."""
_BUSY_CORES = 0.5
"""Cores in use by other processes above which they slow a step down."""
_BOTH = ("first", "second")


@dataclass(frozen=True, kw_only=True)
class ReportComparison:
    """Two reports of one kind side by side."""

    old_ms: float
    """Step of the older report, ms: the accelerated one, or the mean one of a profile."""
    new_ms: float
    threshold: float
    """Slow-down that still counts as the same, as a fraction."""
    unit: str
    """What the compared time is for."""
    facts: Sequence[str]
    """What else is compared, in words."""
    notes: tuple[str, ...]
    """Reasons why the two runs are hard to compare, one sentence each."""
    sections: Sequence[Section]
    """Strategies or causes, and the phases of the step, of both."""

    @property
    def ratio(self) -> float:
        """`new_ms` ÷ `old_ms`: above 1 the newer run is slower."""
        return self.new_ms / self.old_ms

    @property
    def regressed(self) -> bool:
        """Whether `new_ms` is above `old_ms` by more than `threshold`."""
        return self.new_ms > self.old_ms * (1 + self.threshold)

    def render(self, width: int | None = None, color: bool | None = None) -> str:
        """Render the comparison as text, verdict first; the arguments are those of `terminal.render`."""
        percent = 100 * (self.ratio - 1)
        change = f"{abs(percent):.3g} % {'slower' if percent > 0 else 'faster'}" if percent else "no change"
        times = f"{ms_text(self.old_ms)} → {ms_text(self.new_ms)} ms per {self.unit}"
        document = Document(
            kind="regression" if self.regressed else "no regression",
            model="",
            started="",
            verdict=f"{times}, {change} (threshold {100 * self.threshold:.3g} %)",
            tone="worse" if self.regressed else "good",
            lead=[
                *(Paragraph(text=fact) for fact in self.facts),
                *(Paragraph(text=f"note: {note}", tone="warn") for note in self.notes),
            ],
            sections=self.sections,
        )
        return terminal.render(document, width, color)


def compare(
    before: Report | ProfileReport, after: Report | ProfileReport, *, threshold: float = 0.05
) -> ReportComparison:
    """Compare two reports of the same training, both of `accel.optimize` or both of `accel profile`.

    Args:
        before: the older report.
        after: the newer report.
        threshold: slow-down of the step that still counts as the same; 0.05 is 5 %. The step is the accelerated one,
            or the mean one of a profile; where the batches differ in size, it is 1,000 samples.

    Raises:
        ReportError: if the reports are of two kinds, or one has no step time.
        InvalidArgument: if `threshold` is negative or not a number.
    """
    if not (math.isfinite(threshold) and threshold >= 0):
        raise InvalidArgument(f"threshold must be 0 or more, e.g. 0.05 for 5 %. Found: {threshold}")
    facts: list[str] = []
    if isinstance(before, Report) and isinstance(after, Report):
        times = [_ms_of_run(report, which) for report, which in zip((before, after), _BOTH, strict=True)]
        samples = [finite(report.samples_per_step) or 0.0 for report in (before, after)]
        # The batch is that of one rank: with another number of them, neither steps nor samples are the same work.
        changed = _batch_note(*samples) if before.machine.world_size == after.machine.world_size else []
        notes = _run_notes(before, after, changed)
        phases = _phases("accelerated step in ms", before.anatomy_after, after.anatomy_after)
        sections = [*_strategies(before, after), *phases]
    elif isinstance(before, ProfileReport) and isinstance(after, ProfileReport):
        times = [_ms_of_profile(report, which) for report, which in zip((before, after), _BOTH, strict=True)]
        samples = [finite((r.samples_per_s or 0.0) * r.step_ms / 1e3) or 0.0 for r in (before, after)]
        changed = _batch_note(*samples)
        notes = _profile_notes(before, after) + changed
        facts = list(_profile_facts(before, after))
        phases = _phases("step in ms, mean", *(_phases_of_profile(report) for report in (before, after)))
        sections = [*_findings(before, after), *phases]
    else:
        kinds = ["accel profile" if isinstance(each, ProfileReport) else "accel.optimize" for each in (before, after)]
        raise ReportError(f"A and B must be reports of one kind, got one of {kinds[0]} and one of {kinds[1]}.")
    old_ms, new_ms = (1e3 * ms / count if changed else ms for ms, count in zip(times, samples, strict=True))
    unit = "1,000 samples" if changed else "step"
    return ReportComparison(
        old_ms=old_ms,
        new_ms=new_ms,
        threshold=threshold,
        unit=unit,
        facts=facts,
        notes=tuple(notes),
        sections=sections,
    )


def _pairs(old: Mapping[str, T], new: Mapping[str, T]) -> Iterator[tuple[str, tuple[T | None, T | None]]]:
    """Yield what both reports have under each name; None where one lacks it."""
    for name in dict.fromkeys([*old, *new]):
        yield name, (old.get(name), new.get(name))


def _differences(pairs: Sequence[tuple[str, object, object]]) -> list[str]:
    return [f"{name.replace('_', ' ')} went from {old!r} to {new!r}" for name, old, new in pairs if old != new]


def _batch_note(old: float, new: float) -> list[str]:
    """Say that the batches differ in size, if they are known to; 0 is not known."""
    if old <= 0 or new <= 0 or abs(new / old - 1) <= _SAME_BATCH:
        return []
    return [f"samples per step went from {ms_text(old)} to {ms_text(new)}; so samples/s are compared"]


# --- reports of accel.optimize ---------------------------------------------------------------------------------------


def _ms_of_run(report: Report, which: str) -> float:
    ms = finite(report.accel_ms)
    # A report file may hold anything: NaN compares as "no regression", and zero has no ratio.
    if ms is None or ms <= 0:
        is_over = report.state in ("done", "replayed")
        remedy = "compare one with a speed-up of the whole" if is_over else "let its search end before comparing"
        raise ReportError(
            f"the {which} report has no accelerated step time (accel_ms is {report.accel_ms!r}, "
            f"state {report.state!r}); {remedy}."
        )
    return ms


def _run_notes(before: Report, after: Report, changed: list[str]) -> list[str]:
    names = ["model", "parameters", "fingerprint", "allow", *([] if changed else ["samples_per_step"])]
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in names]
    pairs += [(name, value, getattr(after.machine, name)) for name, value in vars(before.machine).items()]
    states = zip(_BOTH, (before.state, after.state), strict=True)
    unended = [f"the {which} run is {state}" for which, state in states if state in {"searching", "interrupted"}]
    return _differences(pairs) + changed + unended


def _strategies(before: Report, after: Report) -> Iterator[Section]:
    rows = []
    for name, pair in _pairs(*({row.name: row for row in report.rows} for report in (before, after))):
        gains = " → ".join("-" if row is None else gain_text(row.gain, row.gain_low, row.gain_high) for row in pair)
        statuses = dict.fromkeys("no row" if row is None else f"{row.status} {row.setting}".strip() for row in pair)
        if len(statuses) == 1 and gains == "- → -":
            continue
        mark, tone = ("*", "strong") if len(statuses) > 1 else (" ", "")
        status = TableCell(text=" → ".join(statuses), tone=TONE_OF.get(pair[1].status if pair[1] else "", "idle"))
        rows.append(TableRow(cells=[TableCell(text=f"{mark} {name}", tone=tone), status, TableCell(text=gains)]))
    columns = [*blocks.columns("strategy<26", whole=True), *blocks.columns("status<28"), *blocks.columns("gain<40")]
    yield from blocks.tabled("strategies", "strategies (* marks a changed one)", "", Table(columns=columns, rows=rows))


def _phases(title: str, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Section]:
    rows = []
    for name, (old, new) in _pairs(before, after):
        difference = "-" if old is None or new is None else f"{new - old:+.3g}"
        rows.append(TableRow(cells=blocks.cells(f"  {name}", ms_text(old), "→", ms_text(new), difference)))
    columns = [*blocks.columns("phase<22", whole=True), *blocks.columns("before>9", ">2", "after>9", "change>9")]
    yield from blocks.tabled("phases", title, "", Table(columns=columns, rows=rows))


# --- reports of accel profile ----------------------------------------------------------------------------------------


def _ms_of_profile(report: ProfileReport, which: str) -> float:
    if not (math.isfinite(report.step_ms) and report.step_ms > 0):
        raise ReportError(
            f"the {which} report has no step time (step_ms is {report.step_ms!r}, {report.steps} steps seen); "
            "profile a run that trains before comparing."
        )
    return report.step_ms


def _phases_of_profile(report: ProfileReport) -> dict[str, float]:
    phases: dict[str, float] = {}
    for node in report.evidence.children if report.evidence else ():
        phases[node.name] = phases.get(node.name, 0.0) + node.ms
    return phases


def _profile_facts(before: ProfileReport, after: ProfileReport) -> Iterator[str]:
    rates = [ms_text(report.samples_per_s) for report in (before, after)]
    limits = [("" if report.refused else report.bottleneck) or "no verdict" for report in (before, after)]
    for name, (old, new) in {"samples/s": rates, "bottleneck": limits}.items():
        if (old, new) != ("-", "-"):
            yield f"{name}: {old} → {new}" if old != new else f"{name}: {new}, as before"


def _profile_notes(before: ProfileReport, after: ProfileReport) -> list[str]:
    names = ("model", "optimizer", "device", "cores", "threads", "platform", "python", "torch", "accel")
    hosts = [", ".join(sorted({row.host for row in report.ranks})) for report in (before, after)]
    pairs = [
        *((name, getattr(before.host, name), getattr(after.host, name)) for name in names),
        ("number of ranks", max(len(before.ranks), 1), max(len(after.ranks), 1)),
        ("hosts", *hosts),
    ]
    # A value that one report lacks is not a difference.
    notes = _differences([(name, old, new) for name, old, new in pairs if old and new])
    for which, report in zip(_BOTH, (before, after), strict=True):
        if report.refused:
            notes.append(f"the {which} report has no verdict: {report.refused}")
        if ended := ended_text(report):
            notes.append(f"in the {which} run {ended}")
        if (busy := finite(report.host.foreign_cores) or 0.0) >= _BUSY_CORES:
            notes.append(f"in the {which} run other processes kept {ms_text(round(busy, 2))} cores busy")
    return notes


def _findings(before: ProfileReport, after: ProfileReport) -> Iterator[Section]:
    """Show what became of each cause that one of the reports names; one that is borderline now is not gone."""
    named = {finding.cause for report in (before, after) for finding in report.findings}
    seen = ([*report.borderline, *report.findings] for report in (before, after))
    rows = []
    for name, (old, new) in _pairs(*({each.cause: each for each in one if each.cause in named} for one in seen)):
        fate, tone = ("gone", "good") if new is None else ("new", "bad") if old is None else ("stayed", "")
        shares = " → ".join("-" if finding is None else percent_text(finding.share) for finding in (old, new))
        title = next((finding.title for finding in (new, old) if finding), "")
        texts = TableCell(text=fate, tone=tone), name, shares, TableCell(text=title, tone="idle")
        rows.append(TableRow(cells=blocks.cells(*texts)))
    columns = [
        *blocks.columns("<7", "cause<24", "share<14"),
        blocks.TableColumn(title="", width=49, left=True, prose=True),
    ]
    title = "what holds the run back, share of the step"
    yield from blocks.tabled("findings", title, "", Table(columns=columns, rows=rows))

"""Compare two reports of one kind: whether the newer run is slower, and what else changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from accel.errors import InvalidArgument, ReportError
from accel.profiler.report import Finding, ProfileReport
from accel.report import blocks, terminal
from accel.report.blocks import Document, Paragraph, Section, Table, TableCell, TableRow
from accel.report.model import RunReport, StrategyRow
from accel.report.optimize_document import TONE_OF
from accel.report.words import ended_text, finite, gain_text, ms_text, percent_text

T = TypeVar("T")

_SAME_BATCH = 0.15
"""By how much samples per step, a mean over a run, may differ between runs of one batch size."""
_BUSY_CORES = 0.5
"""Cores in use by other processes above which they slow a step down."""

_FATE_TONES = {"gone": "good", "new": "bad", "stayed": ""}


@dataclass(frozen=True, kw_only=True)
class ReportChange(Generic[T]):
    """A strategy, a cause or a phase in both reports; None where a report lacks it."""

    name: str
    old: T | None
    new: T | None

    @property
    def fate(self) -> str:
        """Whether it is `gone`, `new` or `stayed`."""
        return "gone" if self.new is None else "new" if self.old is None else "stayed"


@dataclass(frozen=True, kw_only=True)
class ReportComparison:
    """Two reports of one kind side by side."""

    old_ms: float
    """Step of the older report, ms: the accelerated one, or the mean one of a profile."""
    new_ms: float
    threshold: float
    """Slow-down that still counts as the same, as a fraction."""
    unit: str = "step"
    """What the compared time is for."""
    facts: tuple[tuple[str, str, str], ...] = ()
    """(what, old, new), in words."""
    notes: tuple[str, ...]
    """Reasons why the two runs are hard to compare, one sentence each."""
    strategies: tuple[ReportChange[StrategyRow], ...] = ()
    findings: tuple[ReportChange[Finding], ...] = ()
    phases: tuple[ReportChange[float], ...]
    """ms."""
    step: str
    """Which step the phases are of."""

    @property
    def ratio(self) -> float:
        """`new_ms` ÷ `old_ms`: above 1 the newer run is slower."""
        return self.new_ms / self.old_ms

    @property
    def regressed(self) -> bool:
        """Whether `new_ms` is above `old_ms` by more than `threshold`."""
        return self.new_ms > self.old_ms * (1 + self.threshold)

    def verdict(self) -> str:
        """Return the outcome in one line."""
        percent = 100 * (self.ratio - 1)
        change = f"{abs(percent):.3g} % {'slower' if percent > 0 else 'faster'}" if percent else "no change"
        times = f"{ms_text(self.old_ms)} → {ms_text(self.new_ms)} ms per {self.unit}"
        return f"{self._word}: {times}, {change} (threshold {100 * self.threshold:.3g} %)"

    @property
    def _word(self) -> str:
        return "regression" if self.regressed else "no regression"

    def render(self, width: int | None = None, color: bool | None = None) -> str:
        """Render the comparison as text, verdict first; the arguments are those of `terminal.render`."""
        facts = [
            f"{name}: {old} → {new}" if old != new else f"{name}: {new}, as before" for name, old, new in self.facts
        ]
        document = Document(
            kind=self._word,
            model="",
            started="",
            verdict=self.verdict().removeprefix(f"{self._word}: "),
            tone="worse" if self.regressed else "good",
            lead=[
                *(Paragraph(text=fact) for fact in facts),
                *(Paragraph(text=f"note: {note}", tone="warn") for note in self.notes),
            ],
            sections=[*_strategies(self.strategies), *_findings(self.findings), *_phases(self.step, self.phases)],
        )
        return terminal.render(document, width, color)


class _Side(NamedTuple):
    """What is compared of a report of either kind."""

    ms: float
    samples: float
    """Per step; 0 if that is not known."""
    ranks: int
    phases: dict[str, float]


def compare(
    before: RunReport | ProfileReport, after: RunReport | ProfileReport, *, threshold: float = 0.05
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
    facts: tuple[tuple[str, str, str], ...] = ()
    strategies: tuple[ReportChange[StrategyRow], ...] = ()
    findings: tuple[ReportChange[Finding], ...] = ()
    if isinstance(before, RunReport) and isinstance(after, RunReport):
        old, new = _side_of_run(before, "first"), _side_of_run(after, "second")
        strategies = _changes(*({row.name: row for row in report.rows} for report in (before, after)))
        names = ["model", "parameters", "fingerprint", "allow"]
        # The batch is that of one rank: with another number of them, neither steps nor samples are the same work.
        changed = _batch_note(old, new) if old.ranks == new.ranks else []
        notes = _run_notes(before, after, names if changed else [*names, "samples_per_step"])
        states = (("first", before.state), ("second", after.state))
        unended = [f"the {which} run is {state}" for which, state in states if state in {"searching", "interrupted"}]
        notes += changed + unended
    elif isinstance(before, ProfileReport) and isinstance(after, ProfileReport):
        old, new = _side_of_profile(before, "first"), _side_of_profile(after, "second")
        facts, findings = tuple(_profile_facts(before, after)), _changed_findings(before, after)
        changed = _batch_note(old, new)
        notes = _profile_notes(before, after) + changed
    else:
        kinds = ["accel profile" if isinstance(each, ProfileReport) else "accel.optimize" for each in (before, after)]
        raise ReportError(f"A and B must be reports of one kind, got one of {kinds[0]} and one of {kinds[1]}.")
    old_ms, new_ms = (1e3 * side.ms / side.samples if changed else side.ms for side in (old, new))
    return ReportComparison(
        old_ms=old_ms,
        new_ms=new_ms,
        threshold=threshold,
        unit="1,000 samples" if changed else "step",
        facts=facts,
        notes=tuple(notes),
        strategies=strategies,
        findings=findings,
        phases=_changes(old.phases, new.phases),
        step="accelerated step in ms" if isinstance(before, RunReport) else "step in ms, mean",
    )


def _changes(old: Mapping[str, T], new: Mapping[str, T]) -> tuple[ReportChange[T], ...]:
    return tuple(ReportChange(name=name, old=old.get(name), new=new.get(name)) for name in dict.fromkeys([*old, *new]))


def _differences(pairs: Sequence[tuple[str, object, object]]) -> list[str]:
    return [f"{name.replace('_', ' ')} went from {old!r} to {new!r}" for name, old, new in pairs if old != new]


def _batch_note(old: _Side, new: _Side) -> list[str]:
    """Say that the batches differ in size, if they are known to."""
    if old.samples <= 0 or new.samples <= 0 or abs(new.samples / old.samples - 1) <= _SAME_BATCH:
        return []
    went = f"samples per step went from {ms_text(old.samples)} to {ms_text(new.samples)}"
    return [f"{went}; so samples/s are compared"]


def _side_of_run(report: RunReport, which: str) -> _Side:
    ms = finite(report.accel_ms)
    # A report file may hold anything: NaN compares as "no regression", and zero has no ratio.
    if ms is None or ms <= 0:
        is_over = report.state in ("done", "replayed")
        remedy = "compare one with a speed-up of the whole" if is_over else "let its search end before comparing"
        raise ReportError(
            f"the {which} report has no accelerated step time (accel_ms is {report.accel_ms!r}, "
            f"state {report.state!r}); {remedy}."
        )
    return _Side(ms, finite(report.samples_per_step) or 0.0, report.machine.world_size, report.anatomy_after)


def _run_notes(before: RunReport, after: RunReport, names: Sequence[str]) -> list[str]:
    return _differences(
        [
            *((name, getattr(before, name), getattr(after, name)) for name in names),
            *((name, value, getattr(after.machine, name)) for name, value in vars(before.machine).items()),
        ]
    )


def _side_of_profile(report: ProfileReport, which: str) -> _Side:
    if not (math.isfinite(report.step_ms) and report.step_ms > 0):
        raise ReportError(
            f"the {which} report has no step time (step_ms is {report.step_ms!r}, {report.steps} steps seen); "
            "profile a run that trains before comparing."
        )
    phases: dict[str, float] = {}
    for node in report.evidence.children if report.evidence else ():
        phases[node.name] = phases.get(node.name, 0.0) + node.ms
    samples = finite((report.samples_per_s or 0.0) * report.step_ms / 1e3) or 0.0
    return _Side(report.step_ms, samples, len(report.ranks), phases)


def _profile_facts(before: ProfileReport, after: ProfileReport) -> Iterator[tuple[str, str, str]]:
    rates = [ms_text(report.samples_per_s) for report in (before, after)]
    if set(rates) != {"-"}:
        yield "samples/s", rates[0], rates[1]
    limits = [("" if report.refused else report.bottleneck) or "no verdict" for report in (before, after)]
    yield "bottleneck", limits[0], limits[1]


def _changed_findings(before: ProfileReport, after: ProfileReport) -> tuple[ReportChange[Finding], ...]:
    """Return what became of each cause that one of the reports names; one that is borderline now is not gone."""
    named = {finding.cause for report in (before, after) for finding in report.findings}
    seen = ([*report.borderline, *report.findings] for report in (before, after))
    return _changes(*({finding.cause: finding for finding in each if finding.cause in named} for each in seen))


def _profile_notes(before: ProfileReport, after: ProfileReport) -> list[str]:
    names = ("model", "optimizer", "device", "cores", "threads", "platform", "python", "torch", "accel")
    pairs = [
        *((name, getattr(before.host, name), getattr(after.host, name)) for name in names),
        ("number of ranks", max(len(before.ranks), 1), max(len(after.ranks), 1)),
        ("hosts", _hosts(before), _hosts(after)),
    ]
    # A value that one report lacks is not a difference.
    notes = _differences([(name, old, new) for name, old, new in pairs if old and new])
    for which, report in (("first", before), ("second", after)):
        if report.refused:
            notes.append(f"the {which} report has no verdict: {report.refused}")
        if ended := ended_text(report):
            notes.append(f"in the {which} run {ended}")
        if (busy := finite(report.host.foreign_cores) or 0.0) >= _BUSY_CORES:
            notes.append(f"in the {which} run other processes kept {ms_text(round(busy, 2))} cores busy")
    return notes


def _hosts(report: ProfileReport) -> str:
    return ", ".join(sorted({row.host for row in report.ranks}))


# --- as text ---------------------------------------------------------------------------------------------------------


def _strategies(changes: Sequence[ReportChange[StrategyRow]]) -> Iterator[Section]:
    rows = []
    for change in changes:
        pair = (change.old, change.new)
        gains = " → ".join("-" if row is None else gain_text(row.gain, row.gain_low, row.gain_high) for row in pair)
        statuses = dict.fromkeys("no row" if row is None else f"{row.status} {row.setting}".strip() for row in pair)
        if len(statuses) == 1 and gains == "- → -":
            continue
        mark, tone = ("*", "strong") if len(statuses) > 1 else (" ", "")
        status = TableCell(text=" → ".join(statuses), tone=TONE_OF.get(change.new.status if change.new else "", "idle"))
        rows.append(TableRow(cells=[TableCell(text=f"{mark} {change.name}", tone=tone), status, TableCell(text=gains)]))
    columns = [*blocks.columns("strategy<26", whole=True), *blocks.columns("status<28"), *blocks.columns("gain<40")]
    yield from blocks.tabled("strategies", "strategies (* marks a changed one)", "", Table(columns=columns, rows=rows))


def _findings(changes: Sequence[ReportChange[Finding]]) -> Iterator[Section]:
    rows = []
    for change in changes:
        pair = (change.old, change.new)
        shares = " → ".join("-" if finding is None else percent_text(finding.share) for finding in pair)
        title = next((finding.title for finding in reversed(pair) if finding), "")
        fate = TableCell(text=change.fate, tone=_FATE_TONES[change.fate])
        rows.append(TableRow(cells=blocks.cells(fate, change.name, shares, TableCell(text=title, tone="idle"))))
    columns = [
        *blocks.columns("<7", "cause<24", "share<14"),
        blocks.TableColumn(title="", width=49, left=True, prose=True),
    ]
    title = "what holds the run back, share of the step"
    yield from blocks.tabled("findings", title, "", Table(columns=columns, rows=rows))


def _phases(step: str, changes: Sequence[ReportChange[float]]) -> Iterator[Section]:
    rows = []
    for change in changes:
        difference = "-" if change.old is None or change.new is None else f"{change.new - change.old:+.3g}"
        numbers = (ms_text(change.old), "→", ms_text(change.new), difference)
        rows.append(TableRow(cells=blocks.cells(f"  {change.name}", *numbers)))
    columns = [*blocks.columns("phase<22", whole=True), *blocks.columns("before>9", ">2", "after>9", "change>9")]
    yield from blocks.tabled("phases", step, "", Table(columns=columns, rows=rows))

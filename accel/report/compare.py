"""Compare two reports of one kind: whether the newer run is slower, and what else changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from accel.errors import InvalidArgument, ReportError
from accel.profiler.report import Finding, ProfileReport
from accel.report.model import Report, StrategyRow
from accel.report.optimize_pictures import TONE_OF
from accel.report.profile_words import ended_text
from accel.report.terminal import TONES, Cell, Page
from accel.report.words import finite, gain_text, ms_text, percent_text

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


def _changes(old: Mapping[str, T], new: Mapping[str, T]) -> tuple[ReportChange[T], ...]:
    return tuple(ReportChange(name=name, old=old.get(name), new=new.get(name)) for name in dict.fromkeys([*old, *new]))


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
        word = "regression" if self.regressed else "no regression"
        change = f"{abs(percent):.3g} % {'slower' if percent > 0 else 'faster'}" if percent else "no change"
        times = f"{ms_text(self.old_ms)} → {ms_text(self.new_ms)} ms per {self.unit}"
        return f"{word}: {times}, {change} (threshold {100 * self.threshold:.3g} %)"

    def render(self, width: int | None = None, color: bool | None = None) -> str:
        """Render the comparison as text, verdict first; the arguments are those of `terminal.render`."""
        page = Page(width, color)
        page.paragraph(self.verdict(), "bold red" if self.regressed else "bold green")
        for name, old, new in self.facts:
            page.paragraph(f"{name}: {old} → {new}" if old != new else f"{name}: {new}, as before")
        for note in self.notes:
            page.paragraph(f"note: {note}", TONES["warn"])
        _strategies(page, self.strategies)
        _findings(page, self.findings)
        _phases(page, self.step, self.phases)
        return page.text()


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
    if isinstance(before, Report) and isinstance(after, Report):
        return _compare_runs(before, after, threshold)
    if isinstance(before, ProfileReport) and isinstance(after, ProfileReport):
        return _compare_profiles(before, after, threshold)
    kinds = ["accel profile" if isinstance(report, ProfileReport) else "accel.optimize" for report in (before, after)]
    raise ReportError(f"A and B must be reports of one kind, got one of {kinds[0]} and one of {kinds[1]}.")


def _differences(pairs: Sequence[tuple[str, object, object]]) -> list[str]:
    return [f"{name.replace('_', ' ')} went from {old!r} to {new!r}" for name, old, new in pairs if old != new]


def _batch_note(old: float, new: float) -> list[str]:
    """Say that the batches differ in size, if they are known to.

    Args:
        old: samples per step of the older run, 0 if that is not known.
        new: of the newer run.
    """
    if old <= 0 or new <= 0 or abs(new / old - 1) <= _SAME_BATCH:
        return []
    return [f"samples per step went from {ms_text(old)} to {ms_text(new)}; so samples/s are compared"]


def _unit(batch_note: list[str]) -> str:
    return "1,000 samples" if batch_note else "step"


# --- two runs under accel.optimize -----------------------------------------------------------------------------------


def _compare_runs(before: Report, after: Report, threshold: float) -> ReportComparison:
    old_ms, new_ms = _accel_ms(before, "first"), _accel_ms(after, "second")
    old, new = ({row.name: row for row in report.rows} for report in (before, after))
    old_batch, new_batch = (finite(report.samples_per_step) or 0.0 for report in (before, after))
    # The batch is that of one rank: with another number of them, neither steps nor samples are the same work.
    is_same_launch = before.machine.world_size == after.machine.world_size
    batch_note = _batch_note(old_batch, new_batch) if is_same_launch else []
    if batch_note:
        old_ms, new_ms = 1e3 * old_ms / old_batch, 1e3 * new_ms / new_batch
    return ReportComparison(
        old_ms=old_ms,
        new_ms=new_ms,
        threshold=threshold,
        unit=_unit(batch_note),
        strategies=_changes(old, new),
        phases=_changes(before.anatomy_after, after.anatomy_after),
        step="accelerated step in ms",
        notes=tuple(_run_notes(before, after, batch_note)),
    )


def _accel_ms(report: Report, which: str) -> float:
    value = finite(report.accel_ms)
    # A report file may hold anything: NaN compares as "no regression", and zero has no ratio.
    if value is None or value <= 0:
        is_over = report.state in ("done", "replayed")
        remedy = "compare one with a speed-up of the whole" if is_over else "let its search end before comparing"
        raise ReportError(
            f"the {which} report has no accelerated step time (accel_ms is {report.accel_ms!r}, "
            f"state {report.state!r}); {remedy}."
        )
    return value


def _run_notes(before: Report, after: Report, batch_note: list[str]) -> list[str]:
    names = ["model", "parameters", "fingerprint", "allow", *([] if batch_note else ["samples_per_step"])]
    notes = _differences(
        [
            *((name, getattr(before, name), getattr(after, name)) for name in names),
            *((name, value, getattr(after.machine, name)) for name, value in vars(before.machine).items()),
        ]
    )
    states = (("first", before.state), ("second", after.state))
    unended = [f"the {which} run is {state}" for which, state in states if state in {"searching", "interrupted"}]
    return notes + batch_note + unended


# --- two profiled runs -----------------------------------------------------------------------------------------------


def _compare_profiles(before: ProfileReport, after: ProfileReport, threshold: float) -> ReportComparison:
    old_ms, new_ms = _step_ms(before, "first"), _step_ms(after, "second")
    batches = [finite((report.samples_per_s or 0.0) * report.step_ms / 1e3) or 0.0 for report in (before, after)]
    batch_note = _batch_note(*batches)
    if batch_note and before.samples_per_s and after.samples_per_s:
        old_ms, new_ms = 1e6 / before.samples_per_s, 1e6 / after.samples_per_s
    rates = [ms_text(report.samples_per_s) for report in (before, after)]
    limits = [("" if report.refused else report.bottleneck) or "no verdict" for report in (before, after)]
    named = {finding.cause for report in (before, after) for finding in report.findings}
    seen = ([*report.borderline, *report.findings] for report in (before, after))  # from 13 to 11 % it is not gone
    old, new = ({finding.cause: finding for finding in each if finding.cause in named} for each in seen)
    return ReportComparison(
        old_ms=old_ms,
        new_ms=new_ms,
        threshold=threshold,
        unit=_unit(batch_note),
        facts=(
            *([] if set(rates) == {"-"} else [("samples/s", rates[0], rates[1])]),
            ("bottleneck", limits[0], limits[1]),
        ),
        findings=_changes(old, new),
        phases=_changes(_phases_of(before), _phases_of(after)),
        step="step in ms, mean",
        notes=tuple(_profile_notes(before, after) + batch_note),
    )


def _step_ms(report: ProfileReport, which: str) -> float:
    if not (math.isfinite(report.step_ms) and report.step_ms > 0):
        raise ReportError(
            f"the {which} report has no step time (step_ms is {report.step_ms!r}, {report.steps} steps seen); "
            "profile a run that trains before comparing."
        )
    return report.step_ms


def _phases_of(report: ProfileReport) -> dict[str, float]:
    phases: dict[str, float] = {}
    for node in report.evidence.children if report.evidence else ():
        phases[node.name] = phases.get(node.name, 0.0) + node.ms
    return phases


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
            notes.append(f"in the {which} run other processes kept {ms_text(busy)} cores busy")
    return notes


def _hosts(report: ProfileReport) -> str:
    return ", ".join(sorted({row.host for row in report.ranks}))


# --- as text ---------------------------------------------------------------------------------------------------------


def _status(row: StrategyRow | None) -> str:
    return "no row" if row is None else f"{row.status} {row.setting}".strip()


def _strategies(page: Page, changes: Sequence[ReportChange[StrategyRow]]) -> None:
    listed = [(change, dict.fromkeys([_status(change.old), _status(change.new)])) for change in changes]
    listed = [(change, statuses) for change, statuses in listed if len(statuses) > 1 or _gains(change) != "- → -"]
    if listed:
        page.heading("strategies (* marks a changed one)")
    for change, statuses in listed:
        mark, tone = ("*", "strong") if len(statuses) > 1 else (" ", "")
        new_tone = TONE_OF.get(change.new.status if change.new else "", "idle")
        page.row(
            [
                Cell(text=f"{mark} {change.name}", width=26, style=TONES[tone], whole=True),
                Cell(text=" → ".join(statuses), width=28, style=TONES[new_tone]),
                Cell(text=_gains(change), width=40, whole=True),
            ]
        )


def _gains(change: ReportChange[StrategyRow]) -> str:
    rows = (change.old, change.new)
    return " → ".join("-" if row is None else gain_text(row.gain, row.gain_low, row.gain_high) for row in rows)


def _findings(page: Page, changes: Sequence[ReportChange[Finding]]) -> None:
    if changes:
        page.heading("what holds the run back, share of the step")
    for change in changes:
        pair = (change.old, change.new)
        shares = " → ".join("-" if finding is None else percent_text(finding.share) for finding in pair)
        title = next((finding.title for finding in reversed(pair) if finding), "")
        page.row(
            [
                Cell(text=change.fate, width=7, style=TONES[_FATE_TONES[change.fate]]),
                Cell(text=change.name, width=24),
                Cell(text=shares, width=14),
                Cell(text=title, width=49, style=TONES["idle"], prose=True),
            ]
        )


def _phases(page: Page, step: str, changes: Sequence[ReportChange[float]]) -> None:
    if changes:
        page.heading(step)
    for change in changes:
        difference = "-" if change.old is None or change.new is None else f"{change.new - change.old:+.3g}"
        texts = (ms_text(change.old), "→", ms_text(change.new), difference)
        cells = [Cell(text=text, width=width, right=True) for text, width in zip(texts, (9, 2, 9, 9), strict=True)]
        page.row([Cell(text=f"  {change.name}", width=22, whole=True), *cells])

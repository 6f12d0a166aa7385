"""Compare two profile reports: is the newer run slower, and what became of what held the older one back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel.errors import ReportError
from accel.profiler.report import Finding, ProfileReport
from accel.report.compare import PhaseChange, StepChange, check_threshold, phase_changes, phase_rows
from accel.report.profile_words import ended_text, percent_text
from accel.report.terminal import Cell, Page, finite, ms_text

_SAME_BATCH = 0.15
"""By how much samples per step, a mean over a run, may differ between runs of one batch size."""
_BUSY_CORES = 0.5
"""Cores kept busy by others from which a step is slowed down by them."""

_STYLES = {"gone": "bold green", "new": "bold red", "stayed": ""}


@dataclass(frozen=True, kw_only=True)
class FindingChange:
    """One cause in both reports; None where a report did not find it."""

    cause: str
    old: Finding | None
    new: Finding | None

    @property
    def fate(self) -> str:
        """What became of it: `gone`, `new` or `stayed`."""
        return "gone" if self.new is None else "new" if self.old is None else "stayed"


@dataclass(frozen=True, kw_only=True)
class ProfileComparison(StepChange):
    """Two profile reports side by side; the step is the mean one."""

    old_bottleneck: str
    """'' if there is no verdict."""
    new_bottleneck: str
    old_samples_per_s: float | None
    new_samples_per_s: float | None
    findings: tuple[FindingChange, ...]
    phases: tuple[PhaseChange, ...]
    notes: tuple[str, ...]
    """What makes the two runs hard to compare, one sentence each."""
    other_batch: bool = False
    """The runs had batches of different sizes: samples/s are compared, and `old_ms`, `new_ms` are per 1,000 samples."""

    @property
    def unit(self) -> str:
        """What the compared time is for."""
        return "1,000 samples" if self.other_batch else "step"

    def render(self, width: int | None = None, color: bool | None = None) -> str:
        """Render the comparison as text, verdict first.

        Args:
            width: columns, at most 100; None asks the terminal.
            color: whether to write ANSI codes; None writes them only to a terminal, and never under `NO_COLOR`.

        Returns:
            Lines without a final newline.
        """
        page = Page(width, color)
        page.say(self.verdict(), "bold red" if self.regressed else "bold green")
        for name, old, new in (
            ("samples/s", ms_text(self.old_samples_per_s), ms_text(self.new_samples_per_s)),
            ("bottleneck", self.old_bottleneck or "no verdict", self.new_bottleneck or "no verdict"),
        ):
            if {old, new} != {"-"}:
                page.say(f"{name}: {old} → {new}" if old != new else f"{name}: {new}, as before")
        for note in self.notes:
            page.say(f"note: {note}", "yellow")
        _findings(page, self.findings)
        phase_rows(page, "step in ms, mean", self.phases)
        return page.text()


def compare(before: ProfileReport, after: ProfileReport, *, threshold: float = 0.05) -> ProfileComparison:
    """Compare two profile reports of the same training.

    Args:
        before: the older report.
        after: the newer report.
        threshold: slow-down of the mean step that still counts as the same; 0.05 is 5 %.

    Returns:
        The comparison; `regressed` is `after.step_ms > before.step_ms * (1 + threshold)`, or the same of the time for
        1,000 samples where the batches differ in size.

    Raises:
        ReportError: if a report has no step time.
        InvalidArgument: if `threshold` is negative or not a number.
    """
    check_threshold(threshold)
    old_ms, new_ms = _step_ms(before, "first"), _step_ms(after, "second")
    other_batch = bool(_batch_note(before, after))
    if other_batch and before.samples_per_s and after.samples_per_s:
        old_ms, new_ms = 1e6 / before.samples_per_s, 1e6 / after.samples_per_s
    return ProfileComparison(
        old_ms=old_ms,
        new_ms=new_ms,
        other_batch=other_batch,
        threshold=threshold,
        old_bottleneck="" if before.refused else before.bottleneck,
        new_bottleneck="" if after.refused else after.bottleneck,
        old_samples_per_s=before.samples_per_s,
        new_samples_per_s=after.samples_per_s,
        findings=_finding_changes(before, after),
        phases=phase_changes(_phases(before), _phases(after)),
        notes=tuple(_notes(before, after)),
    )


def _step_ms(report: ProfileReport, which: str) -> float:
    if not (math.isfinite(report.step_ms) and report.step_ms > 0):
        raise ReportError(
            f"the {which} report has no step time (step_ms is {report.step_ms!r}, {report.steps} steps seen); "
            "profile a run that trains before comparing."
        )
    return report.step_ms


def _finding_changes(before: ProfileReport, after: ProfileReport) -> tuple[FindingChange, ...]:
    old, new = ({finding.cause: finding for finding in report.findings} for report in (before, after))
    names = dict.fromkeys([*old, *new])
    return tuple(FindingChange(cause=name, old=old.get(name), new=new.get(name)) for name in names)


def _phases(report: ProfileReport) -> dict[str, float]:
    phases: dict[str, float] = {}
    for node in report.evidence.children if report.evidence else ():
        phases[node.name] = phases.get(node.name, 0.0) + node.ms
    return phases


def _notes(before: ProfileReport, after: ProfileReport) -> list[str]:
    names = ("model", "optimizer", "device", "cores", "threads", "platform", "python", "torch", "accel")
    pairs = [
        *((name, getattr(before.host, name), getattr(after.host, name)) for name in names),
        ("number of ranks", max(len(before.ranks), 1), max(len(after.ranks), 1)),
        ("hosts", _hosts(before), _hosts(after)),
    ]
    # What one report does not know is no difference.
    notes = [f"{name} went from {old!r} to {new!r}" for name, old, new in pairs if old and new and old != new]
    notes += _batch_note(before, after)
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


def _batch_note(before: ProfileReport, after: ProfileReport) -> list[str]:
    old, new = (finite((report.samples_per_s or 0.0) * report.step_ms / 1e3) or 0.0 for report in (before, after))
    if old <= 0 or new <= 0 or abs(new / old - 1) <= _SAME_BATCH:
        return []
    return [f"samples per step went from {ms_text(old)} to {ms_text(new)}; so samples/s are compared"]


def _findings(page: Page, changes: tuple[FindingChange, ...]) -> None:
    if not changes:
        return
    page.heading("what holds the run back, share of the step")
    for change in changes:
        shares = ["-" if finding is None else percent_text(finding.share) for finding in (change.old, change.new)]
        title = next((finding.title for finding in (change.new, change.old) if finding), "")
        page.row(
            [
                Cell(text=change.fate, width=7, style=_STYLES[change.fate]),
                Cell(text=change.cause, width=24),
                Cell(text=" → ".join(shares), width=14),
                Cell(text=title, width=49, style="dim", prose=True),
            ]
        )

"""Compare two reports of one kind: whether the newer run is slower, and what else changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from accel.errors import InvalidArgument, ReportError
from accel.profiler.report import ProfileReport
from accel.report import blocks, terminal
from accel.report.blocks import Document, Paragraph, Section, Table, TableCell
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
    if isinstance(before, Report) and isinstance(after, Report):
        sides = [_of_run(report, which) for report, which in zip((before, after), _BOTH, strict=True)]
        table, title = _strategies(before, after), "accelerated step in ms"
    elif isinstance(before, ProfileReport) and isinstance(after, ProfileReport):
        sides = [_of_profile(report, which) for report, which in zip((before, after), _BOTH, strict=True)]
        table, title = _findings(before, after), "step in ms, mean"
    else:
        kinds = ["accel profile" if isinstance(each, ProfileReport) else "accel.optimize" for each in (before, after)]
        raise ReportError(f"A and B must be reports of one kind, got one of {kinds[0]} and one of {kinds[1]}.")
    old, new = sides
    # The batch is that of one rank: with another number of them, neither steps nor samples are the same work.
    by_samples = old.ranks == new.ranks and _has_other_batch(old.samples, new.samples)
    notes = [*_differences(old, new, leave_out="samples_per_step" if by_samples else "")]
    if by_samples:
        samples = f"samples per step went from {ms_text(old.samples)} to {ms_text(new.samples)}"
        notes.append(f"{samples}; so samples/s are compared")
    notes += [*old.warnings, *new.warnings]
    return ReportComparison(
        old_ms=1e3 * old.ms / old.samples if by_samples else old.ms,
        new_ms=1e3 * new.ms / new.samples if by_samples else new.ms,
        threshold=threshold,
        unit="1,000 samples" if by_samples else "step",
        facts=[_fact(name, *pair) for name, pair in _pairs(old.facts, new.facts) if pair != ("-", "-")],
        notes=tuple(notes),
        sections=[*table, *_phases(title, old.phases, new.phases)],
    )


@dataclass(frozen=True, kw_only=True)
class _Side:
    """What is compared of a report of either kind."""

    ms: float
    samples: float
    """In a step; 0 if not known."""
    ranks: int
    conditions: Mapping[str, object]
    """What should be the same in both runs; what a profile could not find out is left out."""
    warnings: Sequence[str]
    facts: Mapping[str, str]
    phases: Mapping[str, float]


def _has_other_batch(old: float, new: float) -> bool:
    return old > 0 and new > 0 and abs(new / old - 1) > _SAME_BATCH


def _pairs(old: Mapping[str, T], new: Mapping[str, T]) -> Iterator[tuple[str, tuple[T | None, T | None]]]:
    """Yield what both reports have under each name; None where one lacks it."""
    for name in dict.fromkeys([*old, *new]):
        yield name, (old.get(name), new.get(name))


def _differences(old: _Side, new: _Side, leave_out: str) -> Iterator[str]:
    """Say which conditions of both sides are not the same."""
    for name, first in old.conditions.items():
        second = new.conditions.get(name, first)
        if first != second and name != leave_out:
            yield f"{name.replace('_', ' ')} went from {first!r} to {second!r}"


def _fact(name: str, old: str | None, new: str | None) -> str:
    return f"{name}: {old} → {new}" if old != new else f"{name}: {new}, as before"


def _of_run(report: Report, which: str) -> _Side:
    ms = finite(report.accel_ms)
    # A report file may hold anything: NaN compares as "no regression", and zero has no ratio.
    if ms is None or ms <= 0:
        is_over = report.state in ("done", "replayed")
        remedy = "compare one with a speed-up of the whole" if is_over else "let its search end before comparing"
        raise ReportError(
            f"the {which} report has no accelerated step time (accel_ms is {report.accel_ms!r}, "
            f"state {report.state!r}); {remedy}."
        )
    names = ("model", "parameters", "fingerprint", "allow", "samples_per_step")
    return _Side(
        ms=ms,
        samples=finite(report.samples_per_step) or 0.0,
        ranks=report.machine.world_size,
        conditions={**{name: getattr(report, name) for name in names}, **vars(report.machine)},
        warnings=[f"the {which} run is {report.state}"] if report.state in ("searching", "interrupted") else [],
        facts={},
        phases=report.anatomy_after,
    )


def _of_profile(report: ProfileReport, which: str) -> _Side:
    if not (math.isfinite(report.step_ms) and report.step_ms > 0):
        raise ReportError(
            f"the {which} report has no step time (step_ms is {report.step_ms!r}, {report.steps} steps seen); "
            "profile a run that trains before comparing."
        )
    names = ("model", "optimizer", "device", "cores", "threads", "platform", "python", "torch", "accel")
    ranks = max(len(report.ranks), 1)
    hosts = ", ".join(sorted({row.host for row in report.ranks}))
    warnings = [f"the {which} report has no verdict: {report.refused}"] if report.refused else []
    if ended := ended_text(report):
        warnings.append(f"in the {which} run {ended}")
    if (busy := finite(report.host.foreign_cores) or 0.0) >= _BUSY_CORES:
        warnings.append(f"in the {which} run other processes kept {ms_text(round(busy, 2))} cores busy")
    phases: dict[str, float] = {}
    for node in report.evidence.children if report.evidence else ():
        phases[node.name] = phases.get(node.name, 0.0) + node.ms
    conditions = {**{n: getattr(report.host, n) for n in names}, "number of ranks": ranks, "hosts": hosts}
    return _Side(
        ms=report.step_ms,
        samples=finite((report.samples_per_s or 0.0) * report.step_ms / 1e3) or 0.0,
        ranks=ranks,
        conditions={name: value for name, value in conditions.items() if value},
        warnings=warnings,
        facts={
            "samples/s": ms_text(report.samples_per_s),
            "bottleneck": ("" if report.refused else report.bottleneck) or "no verdict",
        },
        phases=phases,
    )


# --- tables ----------------------------------------------------------------------------------------------------------


def _strategies(before: Report, after: Report) -> Iterator[Section]:
    rows = []
    for name, pair in _pairs(*({row.name: row for row in report.rows} for report in (before, after))):
        gains = " → ".join("-" if row is None else gain_text(row.gain, row.gain_low, row.gain_high) for row in pair)
        statuses = dict.fromkeys("no row" if row is None else f"{row.status} {row.setting}".strip() for row in pair)
        if len(statuses) == 1 and gains == "- → -":
            continue
        mark, tone = ("*", "strong") if len(statuses) > 1 else (" ", "")
        status = TableCell(text=" → ".join(statuses), tone=TONE_OF.get(pair[1].status if pair[1] else "", "idle"))
        rows.append(blocks.row(TableCell(text=f"{mark} {name}", tone=tone), status, gains))
    table = Table(columns=blocks.columns("strategy<", "status<", "gain<"), rows=rows)
    yield from blocks.tabled("strategies", "strategies (* marks a changed one)", table)


def _phases(title: str, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Section]:
    rows = []
    for name, (old, new) in _pairs(before, after):
        difference = "-" if old is None or new is None else f"{new - old:+.3g}"
        rows.append(blocks.row(f"  {name}", ms_text(old), "→", ms_text(new), difference))
    table = Table(columns=blocks.columns("phase<", "before>", ">", "after>", "change>"), rows=rows)
    yield from blocks.tabled("phases", title, table)


def _findings(before: ProfileReport, after: ProfileReport) -> Iterator[Section]:
    """Show what became of each cause that one of the reports names; one that is borderline now is not gone."""
    named = {finding.cause for report in (before, after) for finding in report.findings}
    seen = ([*report.borderline, *report.findings] for report in (before, after))
    rows = []
    for name, (old, new) in _pairs(*({each.cause: each for each in one if each.cause in named} for one in seen)):
        fate, tone = ("gone", "good") if new is None else ("new", "bad") if old is None else ("stayed", "")
        shares = " → ".join("-" if finding is None else percent_text(finding.share) for finding in (old, new))
        title = next((finding.title for finding in (new, old) if finding), "")
        rows.append(blocks.row(TableCell(text=fate, tone=tone), name, shares, TableCell(text=title, tone="idle")))
    table = Table(columns=blocks.columns("<", "cause<", "share<", "<"), rows=rows)
    yield from blocks.tabled("findings", "what holds the run back, share of the step", table)

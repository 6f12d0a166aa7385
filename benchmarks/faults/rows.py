"""The fault matrix's figures: what was answered, whether it is right, and how far a prediction lies from the remedy."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accel.profiler.diagnose.causes import OVERSUBSCRIBED
from accel.profiler.report import ProfileReport, Saving
from benchmarks.faults.rivals import RIVALS, RivalAnswer
from benchmarks.faults.table import HEALTHY, Case, Compare

TOLERANCE = 0.10
"""How far a predicted saving may lie from the remedy's, as a share of the step."""
STABLE = 0.95
"""Share of a script's runs that must have the same first cause, on a quiet machine and on a half-busy one."""


@dataclass(frozen=True)
class Answer:
    """What accel's report says of a case."""

    cause: str
    """Of the first finding, `none` if nothing holds the run back, '' if no verdict was reached."""
    bottleneck: str = ""
    others: list[str] = field(default_factory=list)
    """Causes of the further findings."""
    refused: str = ""
    predicted: Saving | None = None
    measured: Saving | None = None
    step_ms: float = 0.0
    unattributed: float = 0.0
    verdict: str = ""
    failed: str = ""
    """Why there is no report, '' if there is one."""


@dataclass(frozen=True)
class Timing:
    """What a script says of its own speed."""

    steps: int
    seconds_per_step: float
    samples_per_second: float


@dataclass(frozen=True)
class Remedy:
    """What a remedy saved, by experiment."""

    plain: list[Timing]
    fixed: list[Timing]
    saving: float
    """1 - fixed ÷ plain time per step or per sample, of the mean of the turns."""
    low: float
    """The smaller saving of a pair of turns."""
    high: float


@dataclass(frozen=True)
class Stability:
    """The first causes of one script that was profiled again and again; '' where there was no verdict."""

    quiet: list[str]
    half_busy: list[str]
    """While other processes kept half of the cores busy."""
    beside: str = ""
    """The cause to be named then, where that is another one."""
    date: str = ""
    machine: str = ""
    """Of these runs; "" where they were not noted, and are the record's."""

    @property
    def cause(self) -> str:
        """The one that came most often on the quiet machine; of two the earlier."""
        return Counter(self.quiet).most_common(1)[0][0]

    @property
    def agreeing(self) -> tuple[int, int]:
        """How many of the quiet runs named it, and how many of the others what is to be named then."""
        return self.quiet.count(self.cause), self.half_busy.count(self.beside or self.cause)

    @property
    def share(self) -> float:
        """Of the runs that agree: the lesser one of both kinds of run."""
        quiet, half_busy = self.agreeing
        return min(quiet / len(self.quiet), half_busy / len(self.half_busy))

    def others(self) -> dict[str, int]:
        """Return what the other runs named, and how often."""
        quiet = [cause for cause in self.quiet if cause != self.cause]
        half_busy = [cause for cause in self.half_busy if cause != (self.beside or self.cause)]
        return dict(Counter(cause or "no verdict" for cause in quiet + half_busy))


@dataclass(frozen=True)
class Row:
    """One case of the matrix."""

    case: Case
    answer: Answer | None
    right: bool | None
    """Whether accel's answer is the expected one; None if it was not asked."""
    remedy: Remedy | None
    error: float | None
    """Predicted minus real saving; None where one of them is missing."""
    rivals: dict[str, RivalAnswer]
    remedy_failed: str = ""
    """Why the remedy could not be tried."""
    stability: Stability | None = None
    """None if it was profiled once."""
    script: str = ""
    """Digest of the script that was run; "" where it was not noted."""

    @property
    def is_stable(self) -> bool:
        """False if too many runs named another cause."""
        return self.stability is None or self.stability.share >= STABLE


def answer_of(report: ProfileReport) -> Answer:
    """Reduce a report to its answer."""
    first = report.findings[0] if report.findings else None
    return Answer(
        cause=first.cause if first else (HEALTHY if report.bottleneck == HEALTHY else ""),
        bottleneck=report.bottleneck,
        others=[finding.cause for finding in report.findings[1:]],
        refused=report.refused,
        predicted=first.predicted if first else None,
        measured=first.measured if first else None,
        step_ms=report.step_ms,
        unattributed=report.unattributed,
        verdict=report.verdict,
    )


def is_right(case: Case, answer: Answer, *, loaded: bool = False) -> bool:
    """Tell whether the answer is the one to give: on a busy host that it is busy, otherwise the case's cause."""
    if answer.failed:
        return False
    if loaded:
        named = answer.bottleneck == "host" and answer.cause == OVERSUBSCRIBED
        return named or "oversubscribed" in answer.refused.lower()
    if case.healthy:
        return answer.bottleneck == HEALTHY and answer.cause == HEALTHY and not answer.refused
    return answer.cause == case.cause


def prediction(answer: Answer) -> Saving | None:
    """Return the saving that the report foretells: the one its experiment gave, else the one from the clocks."""
    return answer.measured or answer.predicted


def saving(plain: Sequence[Timing], fixed: Sequence[Timing], compare: Compare) -> float:
    """Return 1 - fixed ÷ plain, of the time per step or per sample."""
    slow, fast = (statistics.fmean(_cost(timing, compare) for timing in side) for side in (plain, fixed))
    return 1 - fast / slow


def _cost(timing: Timing, compare: Compare) -> float:
    return timing.seconds_per_step if compare == "seconds_per_step" else 1 / timing.samples_per_second


def remedy_of(plain: list[Timing], fixed: list[Timing], compare: Compare) -> Remedy:
    """Put turns together; turn n of one side is the neighbour of turn n of the other."""
    pairs = [saving([slow], [fast], compare) for slow, fast in zip(plain, fixed, strict=True)]
    return Remedy(plain, fixed, saving(plain, fixed, compare), min(pairs), max(pairs))


def error_of(answer: Answer | None, remedy: Remedy | None, *, right: bool | None) -> float | None:
    """Return predicted minus real saving; None without either, or for a prediction about another cause."""
    foretold = prediction(answer) if answer is not None and right else None
    return None if foretold is None or remedy is None else foretold.value - remedy.saving


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the matrix' figures: accuracy, false alarms and the worst prediction of accel, and how the rivals did."""
    asked = [row for row in rows if row.right is not None]
    faults = [row for row in asked if not row.case.healthy]
    controls = [row for row in asked if row.case.healthy]
    errors = {row.case.name: row.error for row in rows if row.error is not None}
    worst = max(errors, key=lambda name: abs(errors[name]), default=None)
    rivals = {name: [row for row in rows if name in row.rivals] for name in RIVALS}
    return {
        "cases": len(asked),
        "right": sum(bool(row.right) for row in asked),
        "faults": len(faults),
        "faults_named": sum(bool(row.right) for row in faults),
        "controls": len(controls),
        "false_alarms": sum(not row.right for row in controls),
        "predictions": len(errors),
        "predictions_within": sum(abs(error) <= TOLERANCE for error in errors.values()),
        "worst_prediction": None if worst is None else {"case": worst, "error": errors[worst]},
        "rivals": {name: _rival_figures(name, seen) for name, seen in rivals.items() if seen},
        "stability": _stability_figures([row for row in rows if row.stability is not None]),
    }


def _stability_figures(rows: Sequence[Row]) -> dict[str, Any] | None:
    if not rows:
        return None
    shares = {row.case.name: row.stability.share for row in rows if row.stability is not None}
    worst = min(shares, key=lambda name: shares[name])
    return {
        "cases": len(rows),
        "stable": sum(row.is_stable for row in rows),
        "worst": {"case": worst, "share": shares[worst]},
    }


def _rival_figures(name: str, rows: Sequence[Row]) -> dict[str, int]:
    controls = [row for row in rows if row.case.healthy]
    return {
        "cases": len(rows),
        "right": sum(row.rivals[name].right for row in rows),
        "controls": len(controls),
        "false_alarms": sum(not row.rivals[name].right for row in controls),
        "failed": sum(bool(row.rivals[name].failed) for row in rows),
    }


def merged(recorded: Sequence[dict[str, Any]], rows: Sequence[Row]) -> list[Row]:
    """Return recorded rows with those of the cases that were run again in their places.

    What was not asked again, of rivals or by repeated runs, stays. So does a recorded answer with its remedy where only
    repeated runs were asked for, or the remedy was not raced again, the answer is still right, and the script the same.
    """
    new = {row.case.name: row for row in rows}
    result = []
    for held in recorded:
        old = row_of(held)
        row = new.pop(old.case.name, old)
        is_as_before = row.right and old.right and row.script == old.script
        stays = old.remedy is not None or row.stability is not None
        if is_as_before and row.remedy is None and not row.remedy_failed and stays:
            row = replace(old, rivals=row.rivals, stability=row.stability)
        result.append(replace(row, rivals=row.rivals or old.rivals, stability=row.stability or old.stability))
    return [*result, *new.values()]


def row_of(held: dict[str, Any]) -> Row:
    """Build a row from its JSON; the error is worked out anew."""
    answer, remedy = held["answer"], held["remedy"]
    if answer is not None:
        known = {name: Saving(**answer[name]) if answer[name] else None for name in ("predicted", "measured")}
        answer = Answer(**{**answer, **known})
    if remedy is not None:
        turns = {side: [Timing(**timing) for timing in remedy[side]] for side in ("plain", "fixed")}
        remedy = Remedy(**{**remedy, **turns})
    rivals = {name: RivalAnswer(**told) for name, told in held["rivals"].items()}
    error = error_of(answer, remedy, right=held["right"])
    stability = Stability(**held["stability"]) if held.get("stability") else None
    failed, script = held.get("remedy_failed", ""), held.get("script", "")
    return Row(Case(**held["case"]), answer, held["right"], remedy, error, rivals, failed, stability, script)

"""What a script or a coding agent may do after a report: an action, its command, its expected gain, its risk."""

from __future__ import annotations

import shlex

from accel.exactness import Exactness
from accel.profiler.report import NextStep, ProfileReport
from accel.report.report import Report

_RISKS = {
    Exactness.EXACT: "none: the same bits",
    Exactness.REORDERED: "rounding: sums in another order",
    Exactness.REDUCED: "bfloat16 or TF32: compare the loss",
    Exactness.FLOAT8: "8-bit products: compare the loss",
    Exactness.LOSSY: "compressed gradients: compare the loss",
}
_NO_RISK = "none: it only measures"
_OWN_RISK = "that of changing the script"


def after_profile(report: ProfileReport) -> NextStep:
    """Return what to do after a profiled run.

    Args:
        report: of `accel profile`, finished.
    """
    words = shlex.split(report.command)
    script = shlex.join(words[2:])
    if report.refused:
        return NextStep(action=f"profile again: {report.refused}", command=report.command, risk=_NO_RISK)
    if not report.findings:
        return NextStep(action="let accel.optimize try what it knows", command=f"accel run {script}", risk=_NO_RISK)
    first = report.findings[0]
    step = NextStep(action=first.remedy, risk=_OWN_RISK)
    if (saving := first.measured or first.predicted) is not None:
        step.gain, step.gain_low, step.gain_high = (_speedup(part) for part in (saving.value, saving.low, saving.high))
    if first.strategy:
        step.command, step.risk = f"accel run {script}", _RISKS[_exactness(first.strategy)]
    return step


def after_run(report: Report) -> NextStep:
    """Return what to do after a run with `accel.optimize`.

    Args:
        report: of that run.
    """
    if report.state in ("searching", "interrupted"):
        return NextStep(action='let the search end: budget="30s" or a longer run', risk=_NO_RISK)
    kept = [Exactness[row.exactness.upper()] for row in report.rows if row.status == "kept"]
    if kept:
        return NextStep(
            action="keep the plan without a search: plan= of accel.optimize, or accel run --patch",
            gain=report.speedup,
            gain_low=report.speedup_low,
            gain_high=report.speedup_high,
            risk=_RISKS[max(kept)],
        )
    if report.allow in ("exact", "reordered") and any(row.status == "not allowed" for row in report.rows):
        return NextStep(action='allow bfloat16 and TF32: allow="reduced"', risk=_RISKS[Exactness.REDUCED])
    return NextStep(action="profile the script for its cause: accel profile", risk=_NO_RISK)


def _speedup(saving: float) -> float | None:
    return 1 / (1 - saving) if saving < 1 else None


def _exactness(strategy: str) -> Exactness:
    from accel import strategies

    return next((each.exactness for each in strategies.REGISTRY if each.name == strategy), Exactness.REORDERED)

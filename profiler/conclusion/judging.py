"""What the experiments say of the findings: confirmed, dropped, or left to the prediction from the clocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from accel.profiler import naming
from accel.profiler.diagnose import consistency, findings
from accel.profiler.diagnose.causes import CAUSES, CROWDS, switched_with
from accel.profiler.diagnose.consistency import PhaseShares
from accel.profiler.diagnose.findings import WORTH, about
from accel.profiler.naming import Diagnosis
from accel.profiler.report import Experiment, Finding

_INCONCLUSIVE = {
    "void": "could not be tried, the switch had no effect in this loop; intended: ",
    "inconclusive": "tried, inconclusive: ",
}
"""Verdicts that measure nothing: the prediction from the clocks stands."""


def judge(
    diagnosis: Diagnosis,
    experiments: Mapping[str, Experiment],
    suspected: Sequence[Finding],
    why_untried: Callable[[Finding], str],
    shares: Mapping[str, float] | None = None,
) -> list[str]:
    """Add the results of the experiments to a diagnosis, in place.

    Args:
        diagnosis: from the evidence of the whole run.
        experiments: by the cause they tested.
        suspected: findings from before the experiments; one that an experiment has confirmed is kept.
        why_untried: says why there was no experiment for a finding.
        shares: cause → its share of the whole run, for causes that have no phases.

    Returns:
        A sentence for each finding that was dropped.
    """
    earlier, dropped = _confirmed_earlier(diagnosis, experiments, suspected, shares or {})
    kept = []
    for finding in [*diagnosis.findings, *earlier]:
        experiment = _experiment_of(finding.cause, experiments)
        if experiment is None:
            why = "" if finding.cause in CROWDS else why_untried(finding)
            kept.append(dataclasses.replace(finding, experiment=why))
        elif experiment.verdict == "drop" and experiment.saving.high < WORTH:
            dropped.append(_not_a_cause(finding, experiment))
            kept += _otherwise(finding)
        else:
            kept.append(_with_experiment(finding, experiment))
    diagnosis.findings = naming.ordered(kept)
    named = {name for finding in kept for name in switched_with(finding.cause)}
    borderline, diagnosis.borderline = diagnosis.borderline, []
    for finding in borderline:
        experiment = _experiment_of(finding.cause, experiments)
        if experiment is not None and experiment.verdict == "drop" and experiment.saving.high < WORTH:
            dropped.append(_not_a_cause(finding, experiment))
        elif finding.cause not in named:
            diagnosis.borderline.append(finding)
    if not diagnosis.refused or diagnosis.refused.startswith(naming.OVERLAP):
        diagnosis.refused = naming.too_close(diagnosis.findings)
    return dropped


def _not_a_cause(finding: Finding, experiment: Experiment) -> str:
    return (
        f"{finding.cause} looked like a cause ({finding.share:.0%} of the step); the experiment shows that removing it "
        f"saves {experiment.saving.value:.1%}"
    )


def _otherwise(finding: Finding) -> list[Finding]:
    """Return what takes the time of a finding that an experiment has cleared, if something else must."""
    name = CAUSES[finding.cause].otherwise
    if not name:
        return []
    share = finding.share
    predicted = about(share, 0.7, 1.1)
    untried = "not tried: it showed only once another cause was cleared"
    return [dataclasses.replace(findings.finding(name, share, finding.why[:1], predicted), experiment=untried)]


def _experiment_of(cause: str, experiments: Mapping[str, Experiment]) -> Experiment | None:
    """Return the experiment that switched a cause off, under whatever name it was suspected.

    Files that the page cache did not hold yet made `input.storage` of a loader, and `input.cpu` once it held them.
    """
    return next((experiments[name] for name in switched_with(cause) if name in experiments), None)


def _confirmed_earlier(
    diagnosis: Diagnosis,
    experiments: Mapping[str, Experiment],
    suspected: Sequence[Finding],
    shares: Mapping[str, float],
) -> tuple[list[Finding], list[str]]:
    """Look for findings that an experiment has confirmed and the evidence of the whole run no longer shows.

    Returns:
        Those that still may be what they were, no larger than the whole run allows, and a sentence for each other one.
    """
    current = {name for finding in diagnosis.findings for name in switched_with(finding.cause)}
    if current & set(CROWDS):  # no other figure is trusted then
        return [], []
    phases, kept, gone = PhaseShares.of_anatomy(diagnosis.anatomy), [], []
    for finding in suspected:
        experiment = experiments.get(finding.cause)
        if experiment is None or experiment.verdict != "keep" or finding.cause in current:
            continue
        room = shares.get(finding.cause, phases.room(finding.cause))
        if room >= WORTH:
            kept.append(consistency.within(finding, room))
        else:
            gone.append(
                f"{finding.cause} held up the steps of the experiment (removing it saved "
                f"{experiment.saving.value:.0%} of them), and not the run: it can take {room:.0%} of the mean step"
            )
    return kept, gone


def _with_experiment(finding: Finding, experiment: Experiment) -> Finding:
    if experiment.verdict in _INCONCLUSIVE:
        return dataclasses.replace(finding, experiment=_INCONCLUSIVE[experiment.verdict] + experiment.what)
    confirmed = experiment.verdict == "keep" and experiment.saving.low > 0
    return dataclasses.replace(finding, measured=experiment.saving, confirmed=confirmed, experiment=experiment.what)

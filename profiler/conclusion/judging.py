"""What the experiments say of the findings: confirmed, dropped, or left to the prediction from the clocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from accel.profiler import naming
from accel.profiler.diagnose.causes import CROWDS
from accel.profiler.diagnose.findings import WORTH
from accel.profiler.naming import Diagnosis
from accel.profiler.report import Experiment, Finding

_INCONCLUSIVE = {
    "void": "could not be tried, the switch had no effect in this loop; intended: ",
    "refused": "tried, too noisy to tell: ",
}
"""Verdicts that measure nothing: the prediction from the clocks stands."""


def judge(
    diagnosis: Diagnosis,
    experiments: Mapping[str, Experiment],
    suspected: Sequence[Finding],
    why_untried: Callable[[Finding], str],
) -> list[str]:
    """Add the results of the experiments to a diagnosis, in place.

    Args:
        diagnosis: from the evidence of the whole run.
        experiments: by the cause they tested.
        suspected: findings from before the experiments; one that an experiment has confirmed is kept.
        why_untried: says why there was no experiment for a finding.

    Returns:
        A sentence for each finding that was dropped.
    """
    dropped: list[str] = []
    kept = []
    for finding in [*diagnosis.findings, *_confirmed_earlier(diagnosis, experiments, suspected)]:
        experiment = experiments.get(finding.cause)
        if experiment is None:
            kept.append(dataclasses.replace(finding, experiment=why_untried(finding)))
        elif experiment.verdict == "drop" and experiment.saving.high < WORTH:
            dropped.append(
                f"{finding.cause} looked like a cause ({finding.share:.0%} of the step); the experiment shows that "
                f"removing it saves {experiment.saving.value:.1%}"
            )
        else:
            kept.append(_with_experiment(finding, experiment))
    diagnosis.findings = naming.ordered(kept)
    if not diagnosis.refused or diagnosis.refused.startswith(naming.OVERLAP):
        diagnosis.refused = naming.too_close(diagnosis.findings)
    return dropped


def _confirmed_earlier(
    diagnosis: Diagnosis, experiments: Mapping[str, Experiment], suspected: Sequence[Finding]
) -> list[Finding]:
    """Return findings that an experiment has confirmed and the evidence of the whole run no longer shows."""
    current = {finding.cause for finding in diagnosis.findings}
    if current & set(CROWDS):  # no other figure is trusted then
        return []
    confirmed = {cause for cause, experiment in experiments.items() if experiment.verdict == "keep"} - current
    return [finding for finding in suspected if finding.cause in confirmed]


def _with_experiment(finding: Finding, experiment: Experiment) -> Finding:
    if experiment.verdict in _INCONCLUSIVE:
        return dataclasses.replace(finding, experiment=_INCONCLUSIVE[experiment.verdict] + experiment.what)
    confirmed = experiment.verdict == "keep" and experiment.saving.low > 0
    return dataclasses.replace(finding, measured=experiment.saving, confirmed=confirmed, experiment=experiment.what)

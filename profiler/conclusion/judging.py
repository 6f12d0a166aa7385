"""What the experiments make of the findings: confirmed, taken off the list, or left to the clocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from accel.profiler import naming
from accel.profiler.diagnose.causes import CROWDS
from accel.profiler.diagnose.findings import WORTH
from accel.profiler.naming import Diagnosis
from accel.profiler.report import Experiment, Finding

_SAYS_NOTHING = {
    "void": "could not be tried, in this loop the switch took no hold; meant: ",
    "refused": "tried, too noisy to tell: ",
}
"""Verdicts that measure nothing: the prediction from the clocks stands."""


def judge(
    found: Diagnosis,
    experiments: Mapping[str, Experiment],
    suspected: Sequence[Finding],
    why_untried: Callable[[Finding], str],
) -> list[str]:
    """Add what the experiments found to a diagnosis, in place.

    Args:
        found: from the evidence of the whole run.
        experiments: by the cause they were made for.
        suspected: findings from before the experiments; one that an experiment has shown stays one.
        why_untried: says why there was no experiment for a finding.

    Returns:
        What to tell of causes that are taken off the list.
    """
    unseen: list[str] = []
    kept = []
    for finding in [*found.findings, *_forgotten(found, experiments, suspected)]:
        tried = experiments.get(finding.cause)
        if tried is None:
            kept.append(dataclasses.replace(finding, experiment=why_untried(finding)))
        elif tried.verdict == "drop" and tried.saving.high < WORTH:
            unseen.append(
                f"{finding.cause} looked like a cause ({finding.share:.0%} of the step); the experiment says removing "
                f"it gives {tried.saving.value:.1%}"
            )
        else:
            kept.append(_with_experiment(finding, tried))
    found.findings = naming.ordered(kept)
    if not found.refused or found.refused.startswith(naming.OVERLAP):
        found.refused = naming.too_close(found.findings)
    return unseen


def _forgotten(found: Diagnosis, experiments: Mapping[str, Experiment], suspected: Sequence[Finding]) -> list[Finding]:
    """Return findings that an experiment has shown and the evidence of the whole run no longer does."""
    named = {finding.cause for finding in found.findings}
    if named & set(CROWDS):  # nothing else is believed then
        return []
    shown = {cause for cause, tried in experiments.items() if tried.verdict == "keep"} - named
    return [finding for finding in suspected if finding.cause in shown]


def _with_experiment(finding: Finding, tried: Experiment) -> Finding:
    if tried.verdict in _SAYS_NOTHING:
        return dataclasses.replace(finding, experiment=_SAYS_NOTHING[tried.verdict] + tried.what)
    shown = tried.verdict == "keep" and tried.saving.low > 0
    return dataclasses.replace(finding, measured=tried.saving, confirmed=shown, experiment=tried.what)

"""Which candidate comes next, and which could gain too little to be tried."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.evidence import Evidence
from accel.profiler.naming import Diagnosis
from accel.search.actions import Candidate, Result
from accel.search.pace import Pace


def first(
    pending: Iterable[str], candidates: Mapping[str, Candidate], postponed: Collection[str], diagnosis: Diagnosis
) -> str:
    """Return which of the pending candidates comes next; the arguments are those of `rank`, by name."""
    order = list(candidates)
    return min(pending, key=lambda name: rank(candidates[name], order.index(name), name in postponed, diagnosis))


def rank(
    candidate: Candidate, order: int, postponed: bool, diagnosis: Diagnosis
) -> tuple[bool, bool, bool, bool, bool, bool, int, int]:
    """Return what sorts candidates: cheap ones first, and among them what treats the present bottleneck.

    Before those comes what saves page faults: a comparison by the guard can make the heap grow for good, and then it is
    too late to see what such a strategy gives. A small network's plain steps took 77 ms before one, and 46 after it.

    Args:
        candidate: to be ranked.
        order: its place in the registry, which decides among equals.
        postponed: it has had a brief trial without a verdict.
        diagnosis: names the bottleneck.
    """
    limits = [Bottleneck(finding.bottleneck) for finding in diagnosis.findings] + diagnosis.limits
    treated = (limits.index(limit) for limit in candidate.treats if limit in limits)
    return (
        candidate.by_epoch(),
        postponed,
        candidate.is_dear,
        not candidate.lasting,
        candidate.name not in [finding.strategy for finding in diagnosis.findings],
        candidate.is_compared,
        min(treated, default=len(limits)),
        order,
    )


def share(candidate: Candidate, anatomy: Mapping[str, float]) -> float | None:
    """Return the share of the step that a candidate can shorten; None if that is not one phase, or not known."""
    total = sum(anatomy.values())
    return anatomy.get(candidate.phase, 0.0) / total if candidate.phase and total > 0 else None


def faulting(evidence: Evidence | None) -> float | None:
    """Return the share of a step that page faults take if one thread has them all; None if they are not counted."""
    if evidence is None or evidence.page_faults is None or not evidence.steps:
        return None
    step_s = statistics.median(m.seconds for m in evidence.steps)
    return min(1.0, evidence.page_faults * evidence.page_fault_s / step_s)


def too_little(
    candidate: Candidate, anatomy: Mapping[str, float], drop_gain: float, faulting: float | None = None
) -> str:
    """Return why a candidate can't gain enough: all that it can shorten is shorter than the least gain; else ''.

    Args:
        candidate: to be tried.
        anatomy: phase → seconds of a step.
        drop_gain: the least gain, as a fraction.
        faulting: share of the step that page faults take at most.
    """
    if candidate.lasting and faulting is not None and faulting < drop_gain:
        return f"page faults take {faulting:.1%} of the step at most: too little to win"
    of_step = None if candidate.by_epoch() else share(candidate, anatomy)
    if of_step is None or of_step >= drop_gain:
        return ""
    return f"{candidate.phase} is {of_step:.1%} of the step: too little to win"


def too_little_of_epoch(candidate: Candidate, epoch: Result, drop_gain: float) -> str:
    """Return the same of a candidate that takes effect when an epoch begins, after a whole one."""
    of_epoch = sum(m.phases.get(candidate.phase, 0.0) for m in epoch.measurements) / sum(epoch.seconds)
    return "" if of_epoch >= drop_gain else f"{candidate.phase} is {of_epoch:.1%} of an epoch: too little to win"


def is_urgent(candidate: Candidate, anatomy: Mapping[str, float], pace: Pace) -> bool:
    """Return whether what it can shorten is so much of the step that its gain stands out from any noise."""
    return (share(candidate, anatomy) or 0.0) >= pace.urgent


def shows_when_crowded(
    candidate: Candidate, anatomy: Mapping[str, float], drop_gain: float, pace: Pace, faulting: float | None = None
) -> bool:
    """Return whether its gain shows beside other processes: it doesn't depend on them, or is large."""
    if is_urgent(candidate, anatomy, pace):
        return True
    free = not candidate.host_dependent and not candidate.is_dear and not candidate.by_epoch()
    return free and not too_little(candidate, anatomy, drop_gain, faulting)


def first_undone(plan: Iterable[str], candidates: Mapping[str, Candidate]) -> list[str]:
    """Return what is undone of a plan that is not faster; the rest is tried once more without it.

    First what depends on the host (threads, workers): when other processes come or go it can lose more than all else
    gives. What has a lasting effect has had its trial, and goes last.
    """
    lasting = [name for name in plan if candidates[name].lasting]
    others = [name for name in plan if name not in lasting]
    loose = [name for name in others if candidates[name].host_dependent]
    return (loose if len(loose) < len(others) else []) or others or lasting

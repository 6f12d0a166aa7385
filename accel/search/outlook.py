"""What a report says of a search: what limits the run, whether there is a verdict, what more there would be."""

from __future__ import annotations

import math

from accel.profiler.bottleneck import Bottleneck
from accel.report import Report
from accel.search import costs
from accel.search.state import Candidate, SearchState

_LIMITS = {
    "host.oversubscribed": "crowded cores",
    "host.own_processes": "crowded cores",
    "host.gc": "garbage collection",
    "outside.periodic": "stalls",
    "outside.checkpoint": "checkpoints",
    "outside.evaluation": "evaluations",
}
"""Cause → its name in the report, where the bottleneck's name would be mistaken for a phase of the step."""

_FORMATS = {"autocast_bf16": "bfloat16", "tf32": "TF32"}
"""Strategy → the format in which it computes, in words."""
_DEVICES = ("cuda", "cpu with AMX")
"""Kinds of device with arithmetic for them."""
_MOSTLY = 0.5
"""Share of the plain step that the model's calls must take."""
LEAST = 1.1
"""Gain that is worth a sentence."""


def is_crowded(state: SearchState) -> bool:
    """Tell whether other processes keep the machine busy."""
    from accel.profiler.diagnose import causes

    crowd = state.diagnosis.crowd
    return crowd is not None and crowd.cause == causes.OVERSUBSCRIBED


def is_too_early(state: SearchState) -> bool:
    """Tell whether nothing has been tried, and something may be tried later in this run."""
    if state.replay is not None or state.has_tried:
        return False
    waiting = [each for each in state.pending() if not state.recollection.postponed(each.name, state.elapsed_s)]
    expected = (costs.expected_s(state, candidate) for candidate in waiting)
    return not all(state.budget.exhausted(state.cost_s, seconds) for seconds in expected)


def beginning(state: SearchState) -> str:
    """Say that the loop is followed, when trials begin, and how they come sooner; '' if there is nothing to try."""
    if not state.plain_ms or not any(not candidate.refusal() for candidate in state.pending()):
        return ""
    from_s = state.budget.allowed_from(spent=state.cost_s, expected=0.0, saved=state.saved_s)
    if costs.affordable(state, 0.0) or not state.lasted_s < from_s < math.inf:
        when = "trials begin now"
        if is_crowded(state):
            when += ", beside other processes that keep the machine busy"
    else:
        when = f'trials begin {from_s:.0f} s into the run; sooner: budget="30s" (accel run --budget 30s)'
    return f"following a loop of {state.plain_ms:.3g} ms a step, budget {state.budget.text}: {when}"


def why_open(state: SearchState) -> tuple[str, str]:
    """Say why there is no verdict yet, and what would bring it sooner; '' twice if nothing is left to decide."""
    if not state.plain_ms:
        return "too few steps to time the plain loop", "it takes a longer run"
    if state.recollection.is_checking:
        return "the remembered plan was still being checked", "the next run checks it again"
    if is_crowded(state):
        return "other processes kept the machine busy, and trials took long", "it takes a quieter machine"
    left = [
        costs.expected_s(state, candidate)
        for candidate in state.candidates.values()
        if candidate.row.status == "not tried"
        and not state.recollection.postponed(candidate.name, state.elapsed_s)
        and not candidate.refusal()
        and not candidate.design.too_little(state.anatomy_after, state.config.drop_gain)
    ]
    expected_s, longer = min(left, default=0.0), "a longer run decides"
    if state.budget.share < 1:
        enough = f"{max(30, math.ceil(state.cost_s + 2 * expected_s))}s"
        longer = f'to decide sooner: budget="{enough}" (accel run --budget {enough}), or a longer run'
    if not left:
        is_closing = state.plan and state.searching
        return ("the trial of the whole plan had not ended", longer) if is_closing else ("", "")
    from_s = state.budget.allowed_from(spent=state.cost_s, expected=expected_s, saved=state.saved_s)
    if state.lasted_s < from_s < math.inf:
        return f"the budget of {state.budget.text} allows the next trial {from_s:.0f} s into the run", longer
    return "trials were under way", longer


def left_out(state: SearchState) -> list[Candidate]:
    """Return what `allow` leaves out and has not been asked, where most of a step is the model's."""
    if state.device not in _DEVICES or state.replay is not None or state.plain_ms <= 0:
        return []
    if state.plain_diagnosis.share(Bottleneck.COMPUTE) < _MOSTLY:
        return []
    named = (state.candidates[name] for name in _FORMATS if name in state.candidates and name not in state.offers)
    return [each for each in named if each.row.status == "not allowed" and not each.refusal()]


def offers_of(state: SearchState) -> dict[str, float]:
    """Return number format → what it would gain, the largest first, as far as the user's level leaves that out."""
    offers = sorted(state.offers.items(), key=lambda offer: -offer[1])
    return {_FORMATS[name]: gain for name, gain in offers if gain >= LEAST}


def limit(report: Report, state: SearchState) -> None:
    """Set what limits the run, with a share that agrees with the anatomy."""
    from accel.profiler.diagnose.causes import PHASES_OF
    from accel.profiler.diagnose.findings import PhaseShares

    diagnosis = state.diagnosis if state.plan or state.searching else state.plain_diagnosis
    total = sum(report.anatomy_after.values())
    shares = {phase: ms / total for phase, ms in report.anatomy_after.items()} if total > 0 else {}
    report.bottleneck, report.bottleneck_share, report.bottleneck_advice = "", None, ""
    if diagnosis.findings:
        finding = diagnosis.findings[0]
        report.bottleneck = _LIMITS.get(finding.cause, finding.bottleneck)
        report.bottleneck_share = finding.share
        if finding.cause not in _LIMITS:
            report.bottleneck_share = min(finding.share, PhaseShares(shares=shares).room(finding.cause))
        report.bottleneck_advice = f"{finding.title}: {finding.remedy}"
    elif shares:
        parts = {part: sum(shares.get(phase, 0.0) for phase in phases) for part, phases in PHASES_OF.items()}
        largest = max(parts, key=lambda part: parts[part])
        report.bottleneck, report.bottleneck_share = largest.value, parts[largest]
        report.bottleneck_advice = "the largest part; nothing else stands out"

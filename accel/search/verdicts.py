"""What is decided about a candidate: its row in the report, and who hears of it."""

from __future__ import annotations

from accel.guard.comparison import Comparison as Finding
from accel.profiler.trial import Outcome
from accel.profiler.trial_driver import TrialResult
from accel.report import Status, StrategyRow
from accel.report.words import finite
from accel.search.plan import without
from accel.search.state import Candidate, CandidateStage, SearchState


def decide(state: SearchState, candidate: Candidate, status: Status, why: str) -> None:
    """Record a decision, and announce it."""
    candidate.row.status, candidate.row.why = status, why
    announce(state, candidate)


def give_up(state: SearchState, candidate: Candidate, status: Status, why: str) -> None:
    """Try a candidate no more in this search; where there is a verdict on one of its settings, that stands."""
    candidate.stage = CandidateStage.DECIDED
    if candidate.row.status == "not tried" and candidate.name not in state.plan:
        decide(state, candidate, status, why)
    candidate.settings_left = None


def conclude(state: SearchState, candidate: Candidate) -> None:
    """Announce the result of a candidate whose settings have all been tried."""
    if candidate.row.status == "not tried" and not candidate.row.why:
        candidate.row.why = f"the search was interrupted before a verdict, after {candidate.row.steps} steps"
    announce(state, candidate)


def remove(state: SearchState, name: str, why: str, *, is_slower: bool = False) -> None:
    """Undo a strategy of the plan.

    Args:
        is_slower: it does not pay as things are; what was kept beside other processes has its turn again.
    """
    candidate = state.candidates[name]
    state.plan = without(state.plan, name)
    state.note(f"{name} undone: {why}")
    candidate.standing, candidate.stage, candidate.settings_left = None, CandidateStage.DECIDED, None
    decide(state, candidate, "undone", why)
    watch = candidate.design.watch
    if watch is not None and watch.is_used:
        watch.not_kept()
        if is_slower:
            candidate.queue_again()


def record_finding(candidate: Candidate, finding: Finding) -> None:
    """Record the deviation from the plain path that the guard has measured."""
    row = candidate.row
    row.output_error, row.gradient_error = finite(finding.output_error), finite(finding.gradient_error)
    row.tolerance = finding.tolerance
    candidate.other_draws = finding.other_draws


def judge(state: SearchState, candidate: Candidate, setting: object, result: TrialResult) -> None:
    """Record a trial's outcome in the row: the report shows the best setting."""
    outcome, row = result.outcome, candidate.row
    assert outcome is not None
    if outcome.verdict == "keep":
        _join(row, outcome)
        why = result.why or f"faster in {outcome.pairs} pairs of interleaved blocks"
        row.status, row.why = "kept", with_draws(candidate, why)
        row.setting = candidate.describe(setting)
    elif row.status != "kept" and (row.gain is None or outcome.gain > row.gain):
        row.before_ms, row.after_ms, row.spread_ms = outcome.before_ms, outcome.after_ms, outcome.spread_ms
        row.gain, row.gain_low, row.gain_high = outcome.gain, outcome.low, outcome.high
        row.status, row.why = _why_not(result, state.config.drop_gain)
        row.setting = candidate.describe(setting)


def judge_left_out(candidate: Candidate, without: Outcome) -> None:
    """Record what a strategy of the plan gives, by a trial of the plan without it."""
    row = candidate.row
    row.gain, row.gain_low, row.gain_high = 1 / without.gain, 1 / without.high, 1 / without.low
    row.before_ms, row.after_ms, row.spread_ms = without.after_ms, without.before_ms, without.spread_ms


def with_draws(candidate: Candidate, why: str) -> str:
    """Return why a strategy is kept, and that dropout draws other numbers with it, if it does."""
    return why + ("; dropout draws other numbers, as with another seed" if candidate.other_draws else "")


def is_open(state: SearchState, candidate: Candidate) -> bool:
    """Return whether noise may have hidden a gain: no verdict, or a drop whose interval reaches far above 1."""
    row = candidate.row
    if row.status == "undone" and row.gain_high is not None:
        return row.gain_high > _highest_of_small(state.config.drop_gain)
    return row.status == "inconclusive"


def announce(state: SearchState, candidate: Candidate) -> None:
    """Announce a row, unless it was announced as it is now."""
    row = candidate.row
    news = (row.status, row.setting, row.why)
    if state.announced.get(candidate.name) != news:
        state.announced[candidate.name] = news
        state.announce(row)


def remember(state: SearchState, *, ended: bool = False) -> None:
    """Keep what is known by now for the next run.

    Args:
        ended: the run is over.
    """
    plan = {} if state.recipe.is_checking else state.lasting_plan()  # it has shown nothing yet
    undone = [each.row for each in state.candidates.values() if each.row.status == "undone" and not each.is_pending]
    lost = {
        row.name: ", ".join(filter(None, ("" if row.gain is None else f"{row.gain:.2f}x", row.why[:200])))
        for row in undone
        if not is_open(state, each := state.candidates[row.name]) and not each.design.may_grow
    }
    speedup = state.closing.gain if state.closing is not None and plan == state.closed_plan else None
    names = {row.name for row in undone}
    state.recollection.store(plan, lost, names, speedup, state.elapsed_s, ended=ended)


def _join(row: StrategyRow, outcome: Outcome) -> None:
    """Put the outcome of a further setting on top of what the row has: of several settings, the product."""
    is_first = row.status != "kept"
    row.before_ms = outcome.before_ms if is_first or row.before_ms is None else row.before_ms
    row.gain = outcome.gain * (1.0 if is_first else row.gain or 1.0)
    row.gain_low = outcome.low * (1.0 if is_first else row.gain_low or 1.0)
    row.gain_high = outcome.high * (1.0 if is_first else row.gain_high or 1.0)
    row.after_ms = row.before_ms / row.gain
    row.spread_ms = outcome.spread_ms * row.after_ms / outcome.after_ms


def _highest_of_small(drop_gain: float) -> float:
    """Return up to where the interval of a gain may reach that is too small to keep."""
    return 1 + 2 * drop_gain


def _why_not(result: TrialResult, drop_gain: float) -> tuple[Status, str]:
    outcome = result.outcome
    assert outcome is not None
    if outcome.verdict == "inconclusive":
        return "inconclusive", result.why or f"too noisy to tell after {outcome.pairs} pairs of blocks; left off"
    if outcome.high < 1:
        return "undone", "slower"
    if outcome.high <= _highest_of_small(drop_gain):
        return "undone", f"gives less than {drop_gain:.0%}"
    return "undone", f"looks {'slower' if outcome.gain < 1 else 'no faster'} on a noisy machine"

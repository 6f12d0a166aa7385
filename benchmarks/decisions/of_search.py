"""Faults of the search: trials, what they may cost, what comes next, what is remembered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from benchmarks.decisions.fault import (
    Fault,
    ends_with,
    generator_becomes,
    is_now,
    property_becomes,
    result_becomes,
    returns,
)

_TRIAL = ("tests/profiler/test_trial.py", "tests/accel/test_controller.py")
_LASTING = ("tests/accel/strategies/test_allocator.py",)
_SHORT = ("tests/accel/test_short_runs.py",)
_BUDGET = ("tests/accel/test_budget.py", "tests/accel/test_search_budget.py")
_SPENT = ("tests/accel/test_search_budget.py", "tests/accel/test_controller.py")
_CONTROLLER = ("tests/accel/test_controller.py", "tests/accel/test_search_budget.py")
_REMEMBERED = ("tests/accel/test_remembered.py", "tests/accel/test_second_run.py")
_KEY = ("tests/accel/test_cache.py", "tests/accel/test_second_run.py")


def _keeps_losers(verdict: Any) -> Any:
    return "keep" if verdict == "drop" else verdict


def _without_haste(order: Any) -> Any:
    return (max(0, order[0]), *order[1:])


def _narrow(bounds: tuple[float, float]) -> tuple[float, float]:
    middle, half = sum(bounds) / 2, (bounds[1] - bounds[0]) / 4
    return middle - half, middle + half


def _first_pair_decides(right: Any) -> Any:
    return lambda trial: "keep" if sum(trial._differences()) > 0 else "drop"


def _looks_at_every_pair(right: Any) -> Any:
    def decide(trial: Any) -> Any:
        before, pairs = trial.config, len(trial.blocks["A"])
        trial.config = replace(before, looks=tuple(sorted({2, 3, 4, 5, pairs, *before.looks} - {1})))
        try:
            return right(trial)
        finally:
            trial.config = before

    return decide


def _kept(tried: Any) -> Any:
    return tried and tried._replace(outcome=replace(tried.outcome, verdict="keep"))


def _free(tried: Any) -> Any:
    return tried and tried._replace(cost_s=0.0)


def _dear(tried: Any) -> Any:
    return tried and tried._replace(cost_s=tried.cost_s + 60.0)


def _charges_another(right: Any) -> Any:
    def charged(state: Any, candidate: Any = None) -> Any:
        others = [other for other in state.candidates.values() if other is not candidate]
        return right(state, others[0] if candidate is not None and others else candidate)

    return charged


def _dear_ones_first(rank: tuple[Any, ...]) -> tuple[Any, ...]:
    order, at_length, crowded, is_dear, named, compared, *rest = rank
    return (order, at_length, crowded, not is_dear, named, not compared, *rest)


def _backwards(rank: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(-int(part) for part in rank)


def _always_late(right: Any) -> Any:
    def postponed(self: Any, name: str, elapsed_s: float) -> Any:
        return right(self, name, -math.inf)

    return postponed


def _takes_any_file(right: Any) -> Any:
    def parse(self: Any, text: str) -> Any:
        import json

        self._key = json.loads(text)["conditions"]
        return right(self, text)

    return parse


FAULTS = [
    # Trial
    Fault(
        "keeps_a_loser",
        "trial",
        "keeps what is slower",
        "accel.profiler.trial:Trial._decide",
        result_becomes(_keeps_losers),
        _TRIAL,
    ),
    Fault(
        "narrow_interval",
        "trial",
        "believes an interval half as wide",
        "accel.profiler.trial:interval",
        result_becomes(_narrow),
        _TRIAL,
    ),
    Fault(
        "ends_at_once",
        "trial",
        "decides by the sign of the first pair",
        "accel.profiler.trial:Trial._decide",
        _first_pair_decides,
        _TRIAL,
    ),
    Fault(
        "never_ends",
        "trial",
        "goes on where noise hides the gain",
        "accel.profiler.trial:Trial._decide",
        result_becomes(lambda verdict: None if verdict == "inconclusive" else verdict),
        _TRIAL,
    ),
    Fault(
        "sign_flipped",
        "trial",
        "takes slower for faster",
        "accel.profiler.trial:log_ratios",
        result_becomes(lambda ratios: [-ratio for ratio in ratios]),
        _TRIAL,
    ),
    Fault(
        "looks_at_every_pair",
        "trial",
        "may keep at any pair, not at the planned looks alone",
        "accel.profiler.trial:Trial._decide",
        _looks_at_every_pair,
        _TRIAL,
    ),
    Fault(
        "not_interleaved",
        "trial",
        "runs A B A B, so that a drift favours one of them",
        "accel.profiler.trial:Trial.arm",
        property_becomes(lambda trial, arm: "AB"[(len(trial.blocks["A"]) + len(trial.blocks["B"])) % 2]),
        _TRIAL,
    ),
    Fault(
        "outliers_count_in_full",
        "trial",
        "lets one burst decide",
        "accel.profiler.trial:winsorised",
        lambda right: lambda differences, limit=5.0: list(differences),
        _TRIAL,
    ),
    Fault(
        "before_and_after_keeps_all",
        "trial",
        "keeps whatever can't be switched back",
        "accel.profiler.trial_driver:before_and_after",
        generator_becomes(_kept),
        _LASTING,
    ),
    Fault(
        "page_faults_say_nothing",
        "trial",
        "undoes what noise leaves open, though steps with it are seen to have no page faults",
        "accel.strategies.allocator:_judged",
        lambda right: lambda result, share, saved, config: result,
        _LASTING,
    ),
    Fault(
        "page_faults_say_all",
        "trial",
        "keeps what saves page faults and is slower",
        "accel.strategies.allocator:_judged",
        lambda right: lambda result, share, saved, config: _kept(result),
        _LASTING,
    ),
    Fault(
        "all_undone_at_once",
        "trial",
        "undoes all of a plan for what other processes do to its threads and workers",
        "accel.search.experiment:_first_undone",
        lambda right: lambda state, plan: list(plan),
        ("tests/accel/test_crowded_machine.py", "tests/accel/test_controller.py"),
    ),
    # Budget
    Fault(
        "budget_never_ends", "budget", "allows any cost", "accel.search.budget:Budget.allows", returns(True), _BUDGET
    ),
    Fault(
        "budget_spends_nothing",
        "budget",
        "allows no cost",
        "accel.search.budget:Budget.allows",
        returns(False),
        _BUDGET,
    ),
    Fault(
        "absolute_budget_comes_back",
        "budget",
        "waits for an absolute budget that is spent",
        "accel.search.budget:Budget.exhausted",
        returns(False),
        _BUDGET,
    ),
    Fault(
        "reinvests_all",
        "budget",
        "spends all that it has saved, not half",
        "accel.search.budget:_REINVESTED",
        is_now(1.0),
        _BUDGET,
    ),
    Fault(
        "startup_is_free",
        "budget",
        "tries things before the run can pay for accel's imports",
        "accel.search.controller:_begin_affordably",
        returns(()),
        _SHORT,
    ),
    Fault(
        "trials_have_no_limit",
        "budget",
        "goes on with a trial whatever it costs",
        "accel.search.costs:trial_limit_s",
        returns(math.inf),
        _SHORT,
    ),
    Fault(
        "trials_are_free",
        "budget",
        "does not count the slower steps of a trial",
        "accel.profiler.trial_driver:by_blocks",
        generator_becomes(_free),
        _SPENT,
    ),
    Fault(
        "trials_are_dear",
        "budget",
        "counts a minute too much for each trial",
        "accel.profiler.trial_driver:by_blocks",
        generator_becomes(_dear),
        _SPENT,
    ),
    Fault(
        "charges_another",
        "budget",
        "books a trial's cost to another candidate",
        "accel.search.experiment:charged_to",
        _charges_another,
        _SPENT,
    ),
    Fault(
        "stalls_count",
        "budget",
        "counts a stall of seconds as the candidate's cost",
        "accel.profiler.trial_driver:_LONGEST_SETTLING",
        is_now(math.inf),
        _CONTROLLER,
    ),
    # Controller of the search
    Fault(
        "order_reversed",
        "search",
        "tries the least promising first",
        "accel.search.priority:rank",
        result_becomes(_backwards),
        _CONTROLLER,
    ),
    Fault(
        "heap_grows_first",
        "search",
        "compares others first, which makes the heap grow, and then looks at page faults",
        "accel.search.priority:rank",
        result_becomes(_without_haste),
        _LASTING,
    ),
    Fault(
        "faults_unheeded",
        "search",
        "tries what saves page faults where there are next to none",
        "accel.strategies.allocator:_faulting",
        returns(1.0),
        _LASTING,
    ),
    Fault(
        "starves_the_cheap",
        "search",
        "tries what is dear before what costs nothing",
        "accel.search.priority:rank",
        result_becomes(_dear_ones_first),
        _CONTROLLER,
    ),
    Fault(
        "tries_what_can_not_win",
        "search",
        "tries what shortens a phase that takes next to nothing",
        "accel.search.priority:too_little",
        returns(""),
        ("tests/accel/test_controller.py", "tests/accel/test_parts.py"),
    ),
    Fault(
        "never_undoes",
        "search",
        "leaves on what was found wrong, slower or failing",
        "accel.search.verdicts:remove",
        returns(None),
        _CONTROLLER,
    ),
    Fault(
        "no_closing_trial",
        "search",
        "does not try the plan as a whole",
        "accel.search.experiment:close",
        ends_with(None),
        _CONTROLLER,
    ),
    Fault(
        "skips_the_guard",
        "search",
        "runs a candidate that the guard has not passed",
        "accel.search.experiment:check",
        ends_with(True),
        _CONTROLLER,
    ),
    Fault(
        "never_looks_again",
        "search",
        "does not notice that the plan has become slower",
        "accel.search.controller:StepLevel.add",
        returns(""),
        ("tests/accel/test_step_level.py", *_CONTROLLER),
    ),
    Fault(
        "ignores_another_regime",
        "search",
        "goes on with a plan for other batches",
        "accel.search.experiment:_is_another_regime",
        returns(False),
        _CONTROLLER,
    ),
    Fault(
        "ignores_trips",
        "search",
        "keeps a strategy that has failed while it was on",
        "accel.search.experiment:_record_trip",
        returns(None),
        _CONTROLLER,
    ),
    Fault(
        "tries_what_does_not_apply",
        "search",
        "does not ask whether a candidate applies",
        "accel.search.state:Candidate.refusal",
        returns(""),
        _CONTROLLER,
    ),
    # Remembered plans
    Fault(
        "any_run_is_this_one",
        "remembered plans",
        "takes each run for one of the same kind",
        "accel.cache.remembered_plans:conditions",
        result_becomes(lambda conditions: dict.fromkeys(conditions, "")),
        _KEY,
    ),
    Fault(
        "takes_a_plan_of_others",
        "remembered plans",
        "takes a file that is about another kind of run",
        "accel.cache.remembered_plans:RememberedPlans._parse",
        _takes_any_file,
        _KEY,
    ),
    Fault(
        "remembered_unchecked",
        "remembered plans",
        "switches a remembered plan on without the guard",
        "accel.search.experiment:check_whole",
        ends_with(""),
        _REMEMBERED,
    ),
    Fault(
        "remembered_untried",
        "remembered plans",
        "keeps a remembered plan that is no faster any more",
        "accel.search.trying:close",
        ends_with(None),
        _REMEMBERED,
    ),
    Fault(
        "never_too_old",
        "remembered plans",
        "relies on a result of last year",
        "accel.search.remembered:MOST_DAYS",
        is_now(math.inf),
        _REMEMBERED,
    ),
    Fault(
        "losers_tried_each_run",
        "remembered plans",
        "tries in every run what gave nothing in the one before",
        "accel.search.remembered:RememberedPlan.postponed",
        returns(""),
        _REMEMBERED,
    ),
    Fault(
        "losers_never_tried_again",
        "remembered plans",
        "never tries again what gave nothing once",
        "accel.search.remembered:RememberedPlan.postponed",
        _always_late,
        _REMEMBERED,
    ),
]

"""Faults of the search: trials, what they may cost, what comes next, what is remembered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from benchmarks.decisions.fault import (
    ends_with,
    faults,
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
    least, order, at_length, crowded, is_dear, named, compared, *rest = rank
    return (least, order, at_length, crowded, not is_dear, named, not compared, *rest)


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
    *faults(
        "trial",
        "accel.profiler.trial",
        _TRIAL,
        keeps_a_loser=("keeps what is slower", "Trial._decide", result_becomes(_keeps_losers)),
        narrow_interval=("believes an interval half as wide", "interval", result_becomes(_narrow)),
        ends_at_once=("decides by the sign of the first pair", "Trial._decide", _first_pair_decides),
        never_ends=(
            "goes on where noise hides the gain",
            "Trial._decide",
            result_becomes(lambda verdict: None if verdict == "inconclusive" else verdict),
        ),
        sign_flipped=(
            "takes slower for faster",
            "log_ratios",
            result_becomes(lambda ratios: [-ratio for ratio in ratios]),
        ),
        looks_at_every_pair=(
            "may keep at any pair, not at the planned looks alone",
            "Trial._decide",
            _looks_at_every_pair,
        ),
        not_interleaved=(
            "runs A B A B, so that a drift favours one of them",
            "Trial.arm",
            property_becomes(lambda trial, arm: "AB"[(len(trial.blocks["A"]) + len(trial.blocks["B"])) % 2]),
        ),
        outliers_count_in_full=(
            "lets one burst decide",
            "winsorised",
            lambda right: lambda differences, limit=5.0: list(differences),
        ),
    ),
    *faults(
        "trial",
        "accel.profiler.trial_driver",
        _LASTING,
        before_and_after_keeps_all=(
            "keeps whatever can't be switched back",
            "before_and_after",
            generator_becomes(_kept),
        ),
    ),
    *faults(
        "trial",
        "accel.strategies.allocator",
        _LASTING,
        page_faults_say_nothing=(
            "undoes what noise leaves open, though steps with it are seen to have no page faults",
            "_judged",
            lambda right: lambda result, share, saved, config: result,
        ),
        page_faults_say_all=(
            "keeps what saves page faults and is slower",
            "_judged",
            lambda right: lambda result, share, saved, config: _kept(result),
        ),
    ),
    *faults(
        "trial",
        "accel.search.experiment",
        ("tests/accel/test_crowded_machine.py", "tests/accel/test_controller.py"),
        all_undone_at_once=(
            "undoes all of a plan for what other processes do to its threads and workers",
            "_first_undone",
            lambda right: lambda state, plan: list(plan),
        ),
    ),
    *faults(
        "budget",
        "accel.search.budget",
        _BUDGET,
        budget_never_ends=("allows any cost", "Budget.allows", returns(True)),
        budget_spends_nothing=("allows no cost", "Budget.allows", returns(False)),
        absolute_budget_comes_back=("waits for an absolute budget that is spent", "Budget.exhausted", returns(False)),
        reinvests_all=("spends all that it has saved, not half", "_REINVESTED", is_now(1.0)),
    ),
    *faults(
        "budget",
        "accel.search.controller",
        _SHORT,
        startup_is_free=("tries things before the run can pay for accel's imports", "_begin_affordably", returns(())),
    ),
    *faults(
        "budget",
        "accel.search.costs",
        _SHORT,
        trials_have_no_limit=("goes on with a trial whatever it costs", "trial_limit_s", returns(math.inf)),
    ),
    *faults(
        "budget",
        "accel.profiler.trial_driver",
        _SPENT,
        trials_are_free=("does not count the slower steps of a trial", "by_blocks", generator_becomes(_free)),
        trials_are_dear=("counts a minute too much for each trial", "by_blocks", generator_becomes(_dear)),
    ),
    *faults(
        "budget",
        "accel.search.experiment",
        _SPENT,
        charges_another=("books a trial's cost to another candidate", "charged_to", _charges_another),
    ),
    *faults(
        "budget",
        "accel.profiler.trial_driver",
        _CONTROLLER,
        stalls_count=("counts a stall of seconds as the candidate's cost", "_LONGEST_SETTLING", is_now(math.inf)),
    ),
    *faults(
        "search",
        "accel.search.priority",
        _CONTROLLER,
        order_reversed=("tries the least promising first", "rank", result_becomes(_backwards)),
        starves_the_cheap=("tries what is dear before what costs nothing", "rank", result_becomes(_dear_ones_first)),
    ),
    *faults(
        "search",
        "accel.search.priority",
        _LASTING,
        heap_grows_first=(
            "compares others first, which makes the heap grow, and then looks at page faults",
            "rank",
            result_becomes(_without_haste),
        ),
    ),
    *faults(
        "search",
        "accel.strategies.allocator",
        _LASTING,
        faults_unheeded=("tries what saves page faults where there are next to none", "_faulting", returns(1.0)),
    ),
    *faults(
        "search",
        "accel.search.priority",
        ("tests/accel/test_controller.py", "tests/accel/test_parts.py"),
        tries_what_can_not_win=("tries what shortens a phase that takes next to nothing", "too_little", returns("")),
    ),
    *faults(
        "search",
        "accel.search.verdicts",
        _CONTROLLER,
        never_undoes=("leaves on what was found wrong, slower or failing", "remove", returns(None)),
    ),
    *faults(
        "search",
        "accel.search.experiment",
        _CONTROLLER,
        no_closing_trial=("does not try the plan as a whole", "close", ends_with(None)),
        skips_the_guard=("runs a candidate that the guard has not passed", "check", ends_with(True)),
        ignores_another_regime=("goes on with a plan for other batches", "_is_another_regime", returns(False)),
        ignores_trips=("keeps a strategy that has failed while it was on", "_record_trip", returns(None)),
    ),
    *faults(
        "search",
        "accel.search.controller",
        ("tests/accel/test_step_level.py", *_CONTROLLER),
        never_looks_again=("does not notice that the plan has become slower", "StepLevel.add", returns("")),
    ),
    *faults(
        "search",
        "accel.search.state",
        _CONTROLLER,
        tries_what_does_not_apply=("does not ask whether a candidate applies", "Candidate.refusal", returns("")),
    ),
    *faults(
        "remembered plans",
        "accel.cache.remembered_plans",
        _KEY,
        any_run_is_this_one=(
            "takes each run for one of the same kind",
            "conditions",
            result_becomes(lambda conditions: dict.fromkeys(conditions, "")),
        ),
        takes_a_plan_of_others=(
            "takes a file that is about another kind of run",
            "RememberedPlans._parse",
            _takes_any_file,
        ),
    ),
    *faults(
        "remembered plans",
        "accel.search.experiment",
        _REMEMBERED,
        remembered_unchecked=("switches a remembered plan on without the guard", "check_whole", ends_with("")),
    ),
    *faults(
        "remembered plans",
        "accel.search.trying",
        _REMEMBERED,
        remembered_untried=("keeps a remembered plan that is no faster any more", "close", ends_with(None)),
    ),
    *faults(
        "remembered plans",
        "accel.search.remembered",
        _REMEMBERED,
        never_too_old=("relies on a result of last year", "MOST_DAYS", is_now(math.inf)),
        losers_tried_each_run=(
            "tries in every run what gave nothing in the one before",
            "RememberedPlan.postponed",
            returns(""),
        ),
        losers_never_tried_again=("never tries again what gave nothing once", "RememberedPlan.postponed", _always_late),
    ),
]

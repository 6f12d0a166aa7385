"""The recipe of the records: on within thirty steps where it is right, undone where it is wrong, on a played H200."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.search.budget import Budget
from accel.search.controller import decisions
from accel.search.recipes import PATH, members
from accel.search.state import SearchState
from accel.strategies import Exactness, names
from benchmarks import recipes
from benchmarks.gpu.decisive import MOST_SEARCH, WAYS
from tests.accel.memory import FakeMemory, remembered
from tests.accel.played_h200 import H200, MODELS, offered
from tests.accel.simulation import Machine, candidate, search, simulate, step_of_first
from tests.sampling import examples

FIVE_MINUTES_S = 300.0


def session(machine: H200, seconds: float = FIVE_MINUTES_S, budget: str | float = "3%", **options: Any) -> SearchState:
    """Play a run of so many seconds, whose steps are known unless `steps_in_all` says otherwise."""
    candidates = options.pop("candidates", None) or offered(machine.model)
    state = search(candidates, budget=budget, device="cuda", reduce=lambda times: sum(times) / len(times), **options)
    actions = decisions(state)
    action = next(actions)
    while machine.seconds_of_run < seconds:
        action = actions.send(machine.answer(action))
    return state


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_is_what_the_records_say() -> None:
    assert PATH.read_text(encoding="utf-8") == recipes.text()


def test_it_names_strategies_and_only_what_is_exact_is_free() -> None:
    from accel.strategies import REGISTRY

    exactness = {kind.name: kind.exactness for kind in REGISTRY}
    for device in json.loads(PATH.read_text(encoding="utf-8"))["recipes"]:
        for member in members(device):
            assert member.strategy in names()
            assert not member.is_free or exactness[member.strategy] == Exactness.EXACT
            assert member.won + member.lost <= member.trials
    assert members("an abacus") == ()


def row(status: str, gain: float, high: float, low: float | None = None, why: str = "") -> recipes.Verdict:
    figures = {"status": status, "gain": gain, "gain_low": low, "gain_high": high, "why": why}
    (verdict,) = recipes._of_row("channels_last", figures)
    return verdict


@pytest.mark.parametrize(
    ("recorded", "is_in"),
    [
        ([], True),
        ([row("kept", 1.2, 1.3)], True),
        ([row("kept", 1.2, 1.3), row("undone", 1.0, 1.02)], False),
        ([row("undone", 1.006, 1.008, 1.005, "gives less than 3%")], True),
        ([row("undone", 1.5, 1.6, 1.4, "wrong: its output is off by 1")], False),
        ([row("kept", 1.2, 1.3)] * 3 + [row("undone", 0.7, 0.8)], True),
        ([row("kept", 1.2, 1.3)] * 2 + [row("undone", 0.7, 0.8)], False),
    ],
)
def test_records_outweigh_the_expert(recorded: Any, is_in: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "verdicts", lambda device: recorded)
    assert any(each["strategy"] == "channels_last" for each in recipes.recipe("cpu")) == is_in


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_it_is_on_within_thirty_steps_where_it_is_right(model: str) -> None:
    machine = H200(model)
    state = session(machine, 120.0)
    assert step_of_first(machine, lambda plan: "autocast_bf16" in plan) <= 30
    kept = {"autocast_bf16"} if model != "transformer" else {"cuda_graphs"}
    assert kept <= set(state.plan)
    for name in kept:
        assert state.rows[name].status == "kept" and state.rows[name].why


def test_the_guard_compares_it_as_a_whole() -> None:
    machine = H200("resnet")
    state = session(machine, 60.0)
    first = next(action.check for action in machine.actions if action.check)
    assert list(first) == ["autocast_bf16", "channels_last", "fused_optimizer", "pin_memory"]
    assert "tried as a whole" in state.rows["autocast_bf16"].why
    assert state.rows["autocast_bf16"].gain is not None  # by leaving it out
    assert state.rows["autocast_bf16"].gain == pytest.approx(1.02, abs=0.01)  # launches limit the step without it


def test_what_is_wrong_never_runs_and_the_search_goes_on() -> None:
    machine = H200("resnet", wrong=frozenset({"channels_last"}))
    state = session(machine)
    assert not any("channels_last" in action.plan for action in machine.actions)
    assert "pin_memory" in state.plan and "channels_last" not in state.plan


def test_what_is_slower_is_undone_at_once_and_the_search_goes_on() -> None:
    class Slow(H200):
        def seconds(self, plan: dict[str, Any]) -> float:
            return super().seconds(plan) * (3.0 if "autocast_bf16" in plan else 1.0)

    machine = Slow("resnet")
    state = session(machine)
    on = [action for action in machine.actions if "autocast_bf16" in action.plan]
    assert "autocast_bf16" not in state.plan and "pin_memory" in state.plan
    assert sum(action.settle + action.steps for action in on) < 60


def test_a_member_that_makes_the_plan_slower_is_left_out() -> None:
    class Bad(H200):
        def seconds(self, plan: dict[str, Any]) -> float:
            return super().seconds(plan) * (1.08 if "channels_last" in plan else 1.0)

    state = session(Bad("resnet"))
    assert "autocast_bf16" in state.plan and "channels_last" not in state.plan
    assert state.rows["channels_last"].why == "the plan is faster without it"


def test_it_respects_what_the_user_leaves_out_and_what_does_not_apply() -> None:
    machine = H200("resnet")
    candidates = offered("resnet")
    for each in candidates:
        if each.name == "autocast_bf16":
            each.ruled_out = ("not allowed", "it is reduced")
        if each.name == "channels_last":
            each.strategy._refusal = lambda: "no 2-d convolution"  # type: ignore[attr-defined]
    session(machine, 60.0, candidates=candidates)
    on = {name for action in machine.actions for name in action.plan}
    checked = {name for action in machine.actions for name in action.check or {}}
    assert not on & {"autocast_bf16", "channels_last"} and "pin_memory" in on
    assert "channels_last" not in checked


def test_a_remembered_plan_comes_before_it_and_what_has_lost_is_not_tried() -> None:
    machine = H200("resnet")
    session(machine, 20.0, memory=FakeMemory(remembered(plan={"pin_memory": None})))
    assert next(action.check for action in machine.actions if action.check) == {"pin_memory": None}
    machine = H200("resnet")
    session(machine, 20.0, memory=FakeMemory(remembered(lost={"channels_last": "0.9x"}, run_s=99.0)))
    assert "channels_last" not in next(action.check for action in machine.actions if action.check)


def test_a_run_that_ends_while_it_is_checked_remembers_none_of_it() -> None:
    memory, machine = FakeMemory(), H200("resnet")
    state = search(offered("resnet"), device="cuda", memory=memory)
    actions = decisions(state)
    action = next(actions)
    while not action.plan:
        action = actions.send(machine.answer(action))
    from accel.search.verdicts import remember

    remember(state, ended=True)
    assert memory.search is None or not memory.search.plan


def test_free_strategies_are_on_from_the_first_steps_of_slow_loops_and_judged_afterwards() -> None:
    """A step takes a second: a budget of 3 % allows nothing in the first minute, and accel's start has cost 2 s."""
    for gain, stays in ((1.2, True), (0.9, False)):
        slow = Machine(speed={"dropout_masks": gain}, noise=0.01, drift=lambda step: 50.0)
        offer = [candidate("dropout_masks", touches=frozenset(), cost_s=0.3), candidate("channels_last")]
        state = simulate(offer, slow, budget="3%", device="cpu", startup_s=lambda: 2.0, steps=70, until_settled=False)
        assert step_of_first(slow, lambda plan: "dropout_masks" in plan) <= 30
        assert ("dropout_masks" in state.plan) == stays


# -- five minutes ------------------------------------------------------------------------------------------------------


def best_ms(model: str) -> float:
    """What the best of all plans takes: the hand plan."""
    every = [each.name for each in offered(model)]
    plans = itertools.chain.from_iterable(itertools.combinations(every, n) for n in range(len(every) + 1))
    return min(MODELS[model].ms(dict.fromkeys(plan)) for plan in plans)


@pytest.mark.parametrize("model", MODELS)
def test_five_minutes_end_within_five_percent_of_the_hand_plan(model: str) -> None:
    machine = H200(model)
    state = session(machine, steps_in_all=lambda: machine.steps_in(FIVE_MINUTES_S))
    assert MODELS[model].ms(state.plan) <= 1.05 * best_ms(model), state.plan
    assert state.cost_s <= Budget.parse("3%").in_all(elapsed=FIVE_MINUTES_S, saved=state.saved_s) + 1.0


@pytest.mark.parametrize(("model", "compiling_s"), [("bert", 7.0), ("gpt", 7.0), ("resnet", 19.0)])
def test_a_budget_of_25_s_ends_near_the_hand_plan_in_the_time_of_the_deciding_table(
    model: str, compiling_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what compiling is expected to take on a GPU."""
    monkeypatch.setitem(MODELS, model, replace(MODELS[model], compiling_s=compiling_s))
    way = WAYS["reduced"]
    state = session(H200(model), MOST_SEARCH * way.run_s - way.start_s, "25s")
    assert not state.searching
    assert best_ms(model) >= 0.97 * MODELS[model].ms(state.plan), state.plan


@given(
    model=st.sampled_from(sorted(MODELS)),
    slower=st.dictionaries(st.sampled_from(["autocast_bf16", "channels_last", "cuda_graphs"]), st.floats(0.5, 3.0)),
    budget=st.sampled_from(["3%", "10%", "5s", "20s"]),
    seconds=st.floats(5.0, 120.0),
    is_known=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(25), deadline=None)
def test_no_search_costs_more_than_its_budget_by_over_a_second(
    model: str, slower: dict[str, float], budget: str, seconds: float, is_known: bool, seed: int
) -> None:
    class Other(H200):
        def seconds(self, plan: dict[str, Any]) -> float:
            factor = 1.0
            for name in plan:
                factor *= slower.get(name, 1.0)
            return super().seconds(plan) * factor

    machine = Other(model, seed=seed)
    steps = (lambda: machine.steps_in(seconds)) if is_known else (lambda: None)
    state = session(machine, seconds, budget, steps_in_all=steps)
    allowed = Budget.parse(budget).in_all(elapsed=state.lasted_s, saved=state.saved_s)
    assert state.cost_s <= allowed + 1.0

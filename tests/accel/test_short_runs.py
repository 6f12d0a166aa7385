"""Runs of seconds: accel's start counts as a cost, and at any moment it has cost a small share of the run."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import accel
from accel import startup
from accel.search.actions import Action, Result
from accel.search.plan import Plan
from accel.search.state import SearchState
from tests.accel.simulation import INPUT, PLAIN_S, Machine, candidate, simulate
from tests.sampling import examples


class Stalls(Machine):
    """Each switch makes the next step longer, as workers do that begin with an empty queue."""

    def __init__(self, stall_s: float, **options: Any) -> None:
        super().__init__(**options)
        self.stall_s, self.now_on = stall_s, dict[str, Any]()
        self.wall_s = 0.0
        self.lost: list[tuple[float, float]] = []
        """Seconds of the run so far, and how many of them accel has cost."""

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        if action.plan != self.now_on and result.settling:
            self.now_on = action.plan
            result.settling[0].seconds += self.stall_s
            result.elapsed_s += self.stall_s
        self.wall_s += result.elapsed_s + result.aside_s
        self.lost.append((self.wall_s, self.wall_s - self.step * PLAIN_S))
        return result


def seconds_before(machine: Machine, holds: Any) -> float:
    actions = itertools.takewhile(lambda action: not holds(action), machine.actions)
    return PLAIN_S * sum(action.rest + action.settle + action.steps for action in actions)


@pytest.mark.parametrize("startup_s", [0.0, 0.2])
def test_nothing_is_tried_before_the_budget_has_room_for_the_start(startup_s: float) -> None:
    machine = Machine(speed={"free": 1.3})
    controller = simulate([candidate("free", touches=frozenset())], machine, budget="3%", startup_s=lambda: startup_s)
    began_s = seconds_before(machine, lambda action: action.plan)
    assert began_s == pytest.approx(startup_s / 0.03, abs=1.0)
    assert controller.plan == {"free": None} and controller.cost_s >= startup_s


def test_what_the_run_has_lasted_before_its_first_step_counts() -> None:
    """A process on a GPU is 8 s old by then: imports, the device's start, the model."""
    machine = Machine(speed={"free": 1.3})
    offered = [candidate("free", touches=frozenset())]
    controller = simulate(offered, machine, budget="3%", startup_s=lambda: 0.4, ran_s=lambda: 8.0)
    assert seconds_before(machine, lambda action: action.plan) == pytest.approx(0.4 / 0.03 - 8.0, abs=1.0)
    assert controller.elapsed_s == pytest.approx(0.4 + machine.step * PLAIN_S, rel=0.05)  # of which plans save a part


def test_what_is_seen_then_is_the_plain_loop() -> None:
    machine = Machine(speed={"free": 1.3}, drift=lambda step: 2.0 if step < 100 else 1.0)  # slow while it warms up
    controller = simulate([candidate("free", touches=frozenset())], machine, budget="3%", startup_s=lambda: 0.2)
    assert controller.plain_ms == pytest.approx(PLAIN_S * 1e3, rel=0.05)
    assert sum(controller.anatomy_before.values()) == pytest.approx(PLAIN_S, rel=0.05)


def test_a_budget_in_seconds_is_not_waited_for() -> None:
    machine = Machine(speed={"free": 1.3})
    simulate([candidate("free", touches=frozenset())], machine, budget="5s", startup_s=lambda: 0.2)
    assert seconds_before(machine, lambda action: action.plan) < 1.0


def slow_to_switch(**options: Any) -> Any:
    return candidate("input", treats=INPUT, touches=frozenset({"input"}), settle_steps=lambda setting: 4, **options)


def test_a_trial_is_cut_short_once_it_has_cost_what_is_left_and_goes_on_later() -> None:
    machine = Stalls(0.3, speed={"input": 1.2})
    said: list[str] = []
    controller = simulate(
        [slow_to_switch()],
        machine,
        budget="3%",
        until_settled=False,
        steps=20_000,
        announce=lambda row: said.append(f"{row.status}: {row.why}"),
    )
    assert controller.plan == {"input": None}
    assert any("more than the budget of 3% allows now; tried once the run is long enough" in each for each in said)
    assert all(lost <= 0.05 * seconds + 0.35 for seconds, lost in machine.lost)


def test_the_verdict_on_an_earlier_setting_stands_where_the_next_one_is_cut_short() -> None:
    class OneStalls(Stalls):
        def answer(self, action: Action) -> Result:
            self.stall_s = 2.0 if 2 in (*action.plan.values(), *self.now_on.values()) else 0.0
            return super().answer(action)

    machine = OneStalls(0.0, speed={("input", 1): 1.3, ("input", 2): 1.31})
    controller = simulate([slow_to_switch(settings=(1, 2))], machine, budget="3%")
    assert controller.plan == {"input": 1} and controller.rows["input"].status == "kept"


@given(
    stall_s=st.floats(0.0, 0.5),
    gain=st.floats(0.8, 1.5),
    startup_s=st.floats(0.0, 0.5),
    noise=st.floats(0.0, 0.05),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(40), deadline=None)
def test_at_no_moment_has_accel_cost_more_than_a_small_share(
    stall_s: float, gain: float, startup_s: float, noise: float, seed: int
) -> None:
    machine = Stalls(stall_s, speed={"input": gain, "model": 0.97}, noise=noise, seed=seed)
    candidates = [slow_to_switch(), candidate("model", touches=frozenset())]
    simulate(candidates, machine, budget="3%", until_settled=False, steps=6000, startup_s=lambda: startup_s)
    # 3 %, a trial that is cut short at 1 % more, and the block in which that shows: two switches.
    slack = 2 * stall_s + 10 * PLAIN_S * (0.5 + 10 * noise)
    assert all(lost <= 0.05 * (seconds + startup_s) + slack for seconds, lost in machine.lost)


# -- what the start takes ----------------------------------------------------------------------------------------------


@pytest.fixture
def uncharged() -> Iterator[None]:
    startup.charge()
    yield
    startup.charge()


@pytest.mark.usefixtures("uncharged")
def test_blocks_are_counted_once_and_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 2.0, 4.0])
    monkeypatch.setattr(startup.time, "perf_counter", lambda: next(now))
    with startup.counted(), startup.counted():
        pass
    assert startup.charge() == 3.0
    assert startup.charge() == 0.0


@pytest.mark.usefixtures("uncharged")
@pytest.mark.parametrize("has_torch", [True, False])
def test_imports_after_torch_are_counted_and_torch_is_not(has_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_torch:
        monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(vars(accel), "Plan", raising=False)
    assert accel.Plan is Plan
    assert (startup.charge() > 0.0) == has_torch


def test_a_controller_is_charged_as_its_search_begins() -> None:
    charged = iter([0.25])
    controller = simulate([candidate("free", touches=frozenset())], Machine(), startup_s=lambda: next(charged))
    assert isinstance(controller, SearchState) and controller.cost_s >= 0.25


# -- what a review found -----------------------------------------------------------------------------------------------


def test_of_a_run_that_ends_while_it_waits_the_length_is_known() -> None:
    machine = Machine()
    controller = simulate([candidate("free")], machine, budget="3%", startup_s=lambda: 1.0, steps=1000)
    assert controller.elapsed_s - 1.0 == pytest.approx(machine.step * PLAIN_S, abs=160 * PLAIN_S)
    assert max(action.rest for action in machine.actions) <= 150


def test_work_that_did_not_begin_is_not_charged() -> None:
    asked: list[bool] = []

    def waits() -> str:
        asked.append(True)
        return "noting a sample takes 60% of the time of its fetch"

    finds_out = candidate("input", touches=frozenset(), prepare=waits, cost_s=lambda setting: 0.0 if asked else 2.0)
    controller = simulate([finds_out], Machine(), budget="10%", until_settled=False, steps=3000)
    assert asked and controller.rows["input"].cost_s == controller.cost_s == 0.0


def test_a_kept_setting_stays_kept_where_the_others_could_gain_too_little() -> None:
    class Shrinks(Stalls):
        """With one thread data takes no time; two stall."""

        def answer(self, action: Action) -> Result:
            self.data_share = 0.001 if action.plan else 0.3
            self.stall_s = 2.0 if 2 in (*action.plan.values(), *self.now_on.values()) else 0.0
            return super().answer(action)

    machine = Shrinks(0.0, speed={("input", 1): 1.3, ("input", 2): 1.31})
    controller = simulate(
        [slow_to_switch(settings=(1, 2), phase="data")], machine, budget="3%", until_settled=False, steps=30_000
    )
    assert controller.plan == {"input": 1} and controller.rows["input"].status == "kept"


def test_the_work_of_the_process_counts_once_and_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a processor: what a notebook has slept between two cells doesn't count.
    for worked_s, counted_s in ((2.5, 2.5), (500.0, startup._OLDEST_S)):
        monkeypatch.setattr(startup, "_has_aged", False)
        monkeypatch.setattr(startup, "time", SimpleNamespace(thread_time=lambda worked_s=worked_s: worked_s))
        assert [startup.ran_s() for _ in range(2)] == [counted_s, 0.0]


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_rests_while_accel_starts_and_is_left_as_it_was(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with startup.counted(), startup.counted():
            assert not gc.isenabled()
        assert gc.isenabled() == was_on
        with pytest.raises(KeyError), startup.counted():
            raise KeyError
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()

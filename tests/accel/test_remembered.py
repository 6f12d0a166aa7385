"""What an earlier run found, in searches on simulated machines: tried first and as a whole, and never trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from accel.search.actions import Action, Result
from accel.search.controller import decisions
from accel.search.remembered import MOST_DAYS, RememberedSearch
from accel.search.state import Candidate, SearchState
from accel.search.verdicts import remember
from accel.strategies import Exactness
from accel.strategies.trial_design import EpochDesign
from tests.accel.memory import FakeMemory, day, remembered
from tests.accel.simulation import FAST, Machine, candidate, search, simulate, step_of_first

pytestmark = pytest.mark.usefixtures("today")


def candidates() -> list[Candidate]:
    return [candidate("good"), candidate("better"), candidate("bad"), candidate("none")]


def machine(**options: Any) -> Machine:
    return Machine(**{"speed": {"good": 1.3, "better": 1.5, "bad": 0.8}, "noise": 0.02, **options})


# -- the second run ----------------------------------------------------------------------------------------------------


def test_the_second_run_is_fast_within_twenty_steps_and_its_gain_is_measured() -> None:
    memory = FakeMemory()
    first = simulate(candidates(), machine(), memory=memory)
    assert first.plan == {"good": None, "better": None}
    assert memory.search is not None
    assert memory.search.plan == first.plan
    assert memory.search.speedup == pytest.approx(1.3 * 1.5, rel=0.05)
    assert set(memory.search.lost) == {"bad", "none"}

    again = machine()
    second = simulate(candidates(), again, memory=memory)

    assert step_of_first(again, lambda plan: len(plan) == 2) <= 20
    assert [action.check for action in again.actions if action.check] == [{"good": None, "better": None}]
    assert second.plan == first.plan
    assert second.closing is not None
    assert second.closing.low < 1.3 * 1.5 < second.closing.high
    assert again.step < 150  # one closing trial
    assert second.recollection.text.startswith("from 2026-11-23 ")
    assert "plan good, better (1.9" in second.recollection.text
    assert second.recollection.text.endswith("checked again: kept")
    assert second.rows["good"].status == "kept"
    assert "the plan as a whole was checked again" in second.rows["good"].why
    assert second.rows["good"].gain is None  # not measured by itself in this run


def test_a_remembered_plan_of_one_strategy_has_its_gain_from_the_closing_trial() -> None:
    memory = FakeMemory(remembered(plan={"good": None}))
    controller = simulate([candidate("good")], machine(), memory=memory)
    assert controller.rows["good"].gain == pytest.approx(1.3, rel=0.05)
    assert controller.rows["good"].why.startswith("remembered from 2026-11-20")


def test_a_later_check_ends_the_run_as_it_would_any_plan() -> None:
    memory = FakeMemory(remembered(plan={"good": None, "better": None}))
    later = machine(trips_at={"better": 1500})
    controller = simulate(candidates(), later, memory=memory, until_settled=False, steps=3000)
    assert list(controller.plan) == ["good"]
    assert memory.search is not None
    assert list(memory.search.plan) == ["good"]
    assert "not finite" in memory.search.lost["better"]


def kept(gain: float, noise: float) -> int:
    """In how many of 30 runs a remembered plan stays."""
    runs = (Machine(speed={"good": gain}, noise=noise, seed=seed) for seed in range(30))
    return sum(
        bool(simulate([candidate("good")], run, memory=FakeMemory(remembered(plan={"good": None}))).plan)
        for run in runs
    )


def test_noise_does_not_undo_a_plan_and_what_has_become_slower_goes() -> None:
    assert kept(1.1, noise=0.2) >= 26
    assert kept(1.1, noise=0.05) == 30
    assert kept(1.0, noise=0.05) <= 2
    assert kept(0.95, noise=0.2) <= 2


def test_what_is_judged_in_epochs_is_tried_again_by_that_in_its_turn() -> None:
    workers = candidate("workers", phase="data", kind=EpochDesign)
    memory = FakeMemory(remembered(plan={"good": None, "workers": None}))
    epochs = machine(data_share=0.0, epoch_start_s=lambda plan: 0.0 if "workers" in plan else 0.1)
    controller = simulate([workers, candidate("good")], epochs, memory=memory)
    assert next(action.check for action in epochs.actions if action.check) == {"good": None}
    assert controller.plan == {"good": None, "workers": None}


# -- what is remembered is a suggestion --------------------------------------------------------------------------------


def test_a_plan_that_the_guard_finds_wrong_never_runs_and_is_forgotten() -> None:
    memory = FakeMemory(remembered(plan={"wrong": None}))
    wrong = machine(wrong=frozenset({"wrong"}))
    controller = simulate([candidate("wrong"), candidate("good")], wrong, memory=memory)

    assert not any("wrong" in action.plan for action in wrong.actions)
    assert list(controller.plan) == ["good"]  # the ordinary search came after it
    assert controller.rows["wrong"].why == "wrong: its output is off"
    assert "checked again: undone (wrong: its output is off), and searched again" in controller.recollection.text
    assert memory.calls[:3] == ["recall", "begin_check", "forget"]
    assert memory.search is not None
    assert memory.search.plan == {"good": None}


def test_a_plan_that_is_no_faster_any_more_is_undone_and_searched_anew() -> None:
    memory = FakeMemory(remembered(plan={"bad": None, "none": None}, lost={"good": "0.99x, slower"}))
    controller = simulate(candidates(), machine(), memory=memory)

    assert controller.plan == {"good": None, "better": None}  # what had lost beside it is tried like all others
    assert controller.rows["bad"].status == "undone"
    assert controller.rows["bad"].gain == pytest.approx(0.8, rel=0.05)  # tried by itself
    assert "it was not shown to be faster than plain" in controller.recollection.text
    assert "forget" in memory.calls
    assert memory.search is not None
    assert memory.search.plan == controller.plan
    assert memory.search.searched[:10] == "2026-11-23"


def test_a_strategy_that_fails_when_it_is_switched_on_leaves_the_rest_to_the_search() -> None:
    class Failing(Machine):
        def answer(self, action: Action) -> Result:
            result = super().answer(action)
            if action.check and "fails" in action.check:
                result.trips["fails"] = "it could not be switched on: OSError: no"
            return result

    memory = FakeMemory(remembered(plan={"good": None, "fails": None}))
    failing = Failing(speed={"good": 1.3}, noise=0.02)
    controller = simulate([candidate("fails"), candidate("good")], failing, memory=memory)
    assert controller.plan == {"good": None}
    assert controller.rows["fails"].status == "undone"
    assert "could not be switched on" in controller.recollection.text


@pytest.mark.parametrize("days_ago", [MOST_DAYS + 1, -MOST_DAYS - 1], ids=["old", "a clock that was wrong"])
def test_an_old_result_is_searched_anew(days_ago: float) -> None:
    memory = FakeMemory(remembered(days_ago, plan={"good": None}))
    again = machine()
    controller = simulate(candidates(), again, memory=memory)
    assert len([action for action in again.actions if action.check]) == 4
    assert "it is 31 days old, so all is searched again" in controller.recollection.text
    assert memory.search is not None and memory.search.searched[:10] == "2026-11-23"


def test_a_plan_that_a_run_was_killed_with_is_not_tried_again() -> None:
    memory = FakeMemory(remembered(plan={"good": None}), "the last run that checked it was killed")
    controller = simulate(candidates(), machine(), memory=memory)
    assert "begin_check" not in memory.calls
    assert "was killed, so all is searched again" in controller.recollection.text


def test_what_no_longer_applies_is_left_out_and_the_rest_is_tried_as_a_whole() -> None:
    plan = {"gone": None, "unfit": None, "barred": None, "workers": 1000, "fused": 1, "broken": None, "good": None}
    offered = [
        candidate("unfit", refusal=lambda: "it needs another machine"),
        candidate("barred", ruled_out=("not allowed", "it is lossy"), exactness=Exactness.LOSSY),
        candidate("workers", settings=(1, 2)),
        candidate("fused", settings=(True,)),  # equal to 1, and not the same
        candidate("broken", settings=lambda: 1 / 0),
        candidate("good"),
    ]
    again, state = machine(speed={"good": 1.3}), search(offered, memory=FakeMemory(remembered(plan=plan)))
    actions = decisions(state)
    action = next(actions)
    while action.check is None:
        action = actions.send(again.answer(action))
    assert action.check == {"good": None}
    assert state.recollection.text.endswith(": plan good; the rest of it does not apply now; being checked again")


def test_a_run_that_ends_in_the_check_leaves_what_was_remembered() -> None:
    before = remembered(plan={"good": None}, lost={"bad": "0.99x, slower"}, run_s=99.0)
    memory = FakeMemory(before)
    state = run_until(candidates(), machine(), memory, lambda c: bool(c.plan))
    remember(state, ended=True)
    assert memory.search == before
    assert memory.calls[-1] == "store"  # which takes the mark of the check away


def test_a_failure_of_accel_in_the_check_is_not_met_again() -> None:
    memory = FakeMemory(remembered(plan={"good": None}))
    state = run_until(candidates(), machine(), memory, lambda c: bool(c.plan))
    state.recollection.failed()
    assert memory.calls[-1] == "forget"


def test_another_batch_shape_is_looked_up_anew() -> None:
    memory = FakeMemory(remembered(plan={"good": None}))
    changing = machine(regime=lambda step: "small" if step < 16 else "large")
    controller = simulate(candidates(), changing, memory=memory)
    assert memory.calls[:4] == ["recall", "begin_check", "store", "recall"]  # the check of the first is off
    assert "good" in controller.plan
    assert controller.recollection.text.endswith("checked again: kept")


# -- what gave nothing, and what was not decided -----------------------------------------------------------------------


def test_what_gave_nothing_is_not_tried_again_before_the_run_is_longer_and_says_when_it_was() -> None:
    lost = {"bad": "0.80x, slower", "better": "1.00x, gives less than 3%"}
    memory = FakeMemory(remembered(plan={"good": None}, lost=lost, run_s=20.0))
    again = machine()
    early = simulate(candidates()[:3], again, memory=memory, budget="10%")
    assert not any({"bad", "better"} & set(action.plan) for action in again.actions)
    assert early.rows["bad"].status == "not tried"
    assert early.rows["bad"].why == "tried 3 days ago: 0.80x, slower; again if this run lasts longer"
    assert memory.search is not None and memory.search.lost == lost

    again, memory = machine(), FakeMemory(remembered(plan={"good": None}, lost=lost, run_s=20.0))
    later = simulate(candidates()[:3], again, memory=memory, budget="10%", pace=FAST, until_settled=False, steps=6000)
    assert 0.020 / 1.3 * step_of_first(again, lambda plan: "better" in plan) == pytest.approx(20.4, rel=0.3)
    assert later.plan == {"good": None, "better": None}  # it had been wronged
    assert memory.search is not None
    assert memory.search.plan == later.plan and set(memory.search.lost) == {"bad"}
    assert memory.search.searched == day(3)


def test_a_run_in_which_nothing_had_helped_is_left_alone_at_first() -> None:
    lost = dict.fromkeys(("good", "better", "bad", "none"), "0.99x, slower")
    again = machine()
    controller = simulate(candidates(), again, memory=FakeMemory(remembered(lost=lost, run_s=60.0)), budget="10%")
    assert not any(action.plan or action.check for action in again.actions)
    assert controller.recollection.text.endswith(": nothing that helped")


def test_what_noise_leaves_open_is_not_remembered_as_lost() -> None:
    memory = FakeMemory()
    noisy = Machine(speed={"maybe": 1.04}, noise=0.5, seed=3)
    controller = simulate([candidate("maybe")], noisy, memory=memory)
    assert controller.rows["maybe"].status in ("inconclusive", "undone")
    assert memory.search is None


def test_a_search_that_was_not_finished_goes_on_in_the_next_run() -> None:
    memory = FakeMemory()
    state = run_until(candidates(), machine(), memory, lambda c: c.rows["better"].status == "kept")
    assert memory.search is None
    remember(state, ended=True)
    assert memory.search is not None
    assert memory.search.plan == {"good": None, "better": None}

    again = machine()
    second = simulate(candidates(), again, memory=memory)
    assert [action.check for action in again.actions if action.check] == [
        {"good": None, "better": None},
        {"good": None, "better": None, "bad": None},
        {"good": None, "better": None, "none": None},
    ]
    assert second.plan == {"good": None, "better": None}


def test_a_trial_that_the_end_of_the_run_cuts_short_is_no_result() -> None:
    memory = FakeMemory()
    offered = [candidate("good"), candidate("bad", settings=(1, 2))]
    state = run_until(offered, machine(), memory, lambda c: c.rows["bad"].status == "undone")
    remember(state, ended=True)
    assert memory.search is not None
    assert memory.search.lost == {}


def test_a_run_that_found_nothing_out_leaves_no_trace() -> None:
    memory = FakeMemory()
    state = run_until(candidates(), machine(), memory, lambda c: c.steps > 0)
    remember(state, ended=True)
    assert memory.calls == ["recall"]


# -- one-off work ------------------------------------------------------------------------------------------------------


class Compiles(Machine):
    """The first check of a plan with `compile` takes some seconds."""

    seconds_of_it = 4.0
    done = False

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        if action.check and "compile" in action.check and not self.done:
            self.done = True
            result.aside_s += self.seconds_of_it
        return result


def test_what_one_off_work_took_last_stands_in_for_the_guess() -> None:
    memory = FakeMemory()
    compiled = candidate("compile", cost_s=30.0)
    for seconds in (4.0, 0.8):  # in the second process torch has a part of it on disk
        again = Compiles(speed={"compile": 1.5})
        again.seconds_of_it = seconds
        simulate([compiled], again, memory=memory, budget="1m", steps=5000, until_settled=False)
        assert memory.search is not None
        assert memory.search.cost_s == {"compile": pytest.approx(seconds)}

    old = replace(
        memory.search, searched=day(MOST_DAYS + 1), cost_s={"compile": 4.0}
    )  # a compiler takes as long as ever
    again = Compiles(speed={"compile": 1.5})
    simulate([compiled], again, memory=FakeMemory(old), budget="10%", steps=5000, until_settled=False)
    assert 0.020 * step_of_first(again, lambda plan: "compile" in plan) == pytest.approx(40.0, rel=0.2)


def test_one_off_work_is_weighed_against_the_length_of_the_last_run() -> None:
    done: dict[str, Any] = {"plan": {"compile": None, "good": None}, "cost_s": {"compile": 4.0}}
    offered = [candidate("compile", cost_s=30.0), candidate("good")]

    again = Compiles(speed={"compile": 1.5, "good": 1.3})
    simulate(offered, again, memory=FakeMemory(remembered(**done, run_s=50.0)), budget="10%")
    assert step_of_first(again, lambda plan: len(plan) == 2) <= 20

    short_run = FakeMemory(remembered(**done, run_s=20.0, speedup=1.9))
    again = Compiles(speed={"compile": 1.5, "good": 1.3})
    controller = simulate(offered, again, memory=short_run, budget="10%")
    assert controller.plan == {"good": None}
    assert controller.recollection.text.endswith("; waiting for the budget: compile; checked again: kept")
    assert "about 4 s of one-off work" in controller.rows["compile"].why
    remember(controller, ended=True)
    assert short_run.search is not None
    assert short_run.search.plan == {"good": None, "compile": None}  # for a longer run
    assert short_run.search.speedup == 1.9  # of the whole plan


@pytest.mark.parametrize(("speedup", "waits"), [(1.3, False), (None, True)])
def test_what_a_plan_saves_counts_towards_its_one_off_work(speedup: float | None, waits: bool) -> None:
    plan = {"compile": None, "good": None}
    earlier = remembered(plan=plan, cost_s={"compile": 6.0}, run_s=100.0, speedup=speedup)
    again = Compiles(speed={"compile": 1.5, "good": 1.3})
    offered = [candidate("compile", cost_s=30.0), candidate("good")]
    controller = simulate(offered, again, memory=FakeMemory(earlier), budget="3%")
    assert ("compile" not in controller.plan) == waits  # 3 s of 100 s, and half of the 30 s that it saves


def test_the_length_of_a_run_is_remembered_at_its_end() -> None:
    memory = FakeMemory(remembered(plan={"good": None}, run_s=500.0))
    controller = simulate([candidate("good")], machine(), memory=memory)
    assert memory.search is not None
    assert memory.search.run_s == 500.0  # this one may still become as long
    remember(controller, ended=True)
    assert memory.search.run_s == pytest.approx(controller.elapsed_s, abs=0.1)


# -- helpers -----------------------------------------------------------------------------------------------------------


def run_until(
    offered: list[Candidate], on: Machine, memory: FakeMemory, condition: Callable[[SearchState], bool]
) -> SearchState:
    """Run a search until a condition holds, or for 5,000 steps."""
    state = search(offered, memory=memory)
    actions = decisions(state)
    action = next(actions)
    while not condition(state):
        action = actions.send(on.answer(action))
        assert on.step < 5000
    return state


def test_a_remembered_search_is_checked_field_by_field() -> None:
    remembered(plan={"good": None}, speedup=1.2).check()
    for wrong in ({"speedup": -1.0}, {"run_s": float("nan")}, {"cost_s": {"x": 1e15}}, {"searched": "soon"}):
        with pytest.raises(ValueError, match="must"):
            replace(RememberedSearch(searched=day(3)), **wrong).check()  # type: ignore[arg-type]

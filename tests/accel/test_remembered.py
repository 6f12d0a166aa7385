"""What an earlier run found, in the controller on simulated machines: tried first and as a whole, and never trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from accel.report import StrategyRow
from accel.search.actions import Candidate
from accel.search.controller import Controller
from accel.search.remembered import MOST_DAYS, MOST_RUNS, Recollection, RememberedSearch
from accel.strategies import Exactness
from tests.accel.memory import NOW, FakeMemory, day, lost, remembered
from tests.accel.simulation import CROWDED, FAST, Machine, candidate, simulate, step_of_first

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
    assert {name: trial.status for name, trial in memory.search.trials.items()} == {
        "good": "kept",
        "better": "kept",
        "bad": "undone",
        "none": "undone",
    }

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
    assert memory.search.runs == 1


def test_a_remembered_plan_of_one_strategy_has_its_gain_from_the_closing_trial() -> None:
    memory = FakeMemory(remembered(plan={"good": None}))
    controller = simulate([candidate("good")], machine(), memory=memory)
    assert controller.rows["good"].gain == pytest.approx(1.3, rel=0.05)
    assert controller.rows["good"].why.startswith("remembered from 2026-11-20")


def test_without_a_memory_nothing_is_different() -> None:
    plain, first = machine(), machine()
    simulate(candidates(), plain)
    simulate(candidates(), first, memory=FakeMemory())
    assert plain.actions == first.actions


def test_a_later_check_ends_the_run_as_it_would_any_plan() -> None:
    memory = FakeMemory(remembered(plan={"good": None, "better": None}))
    later = machine(trips_at={"better": 1500})
    controller = simulate(candidates(), later, memory=memory, until_settled=False, steps=3000)
    assert list(controller.plan) == ["good"]
    assert memory.search is not None
    assert list(memory.search.plan) == ["good"]
    assert memory.search.trials["better"].status == "undone"
    assert "not finite" in memory.search.trials["better"].why


# -- what is remembered is a suggestion --------------------------------------------------------------------------------


def test_a_plan_that_the_guard_finds_wrong_never_runs_and_is_forgotten() -> None:
    memory = FakeMemory(remembered(plan={"wrong": None}))
    wrong = machine(wrong=frozenset({"wrong"}))
    controller = simulate([candidate("wrong"), candidate("good")], wrong, memory=memory)

    assert not any("wrong" in action.plan for action in wrong.actions)
    assert list(controller.plan) == ["good"]  # the ordinary search came after it
    assert controller.rows["wrong"].why == "wrong: its output is off"
    assert "checked again: undone (wrong: its output is off), and searched anew" in controller.recollection.text
    assert memory.calls[:3] == ["recall", "begin_check", "forget"]
    assert memory.search is not None
    assert memory.search.plan == {"good": None}


def test_a_plan_that_is_no_faster_any_more_is_undone_and_searched_anew() -> None:
    memory = FakeMemory(remembered(plan={"bad": None, "none": None}, trials={"good": lost()}))
    controller = simulate(candidates(), machine(), memory=memory)

    assert controller.plan == {"good": None, "better": None}  # what had lost beside it is tried like all others
    assert controller.rows["bad"].status == "undone"
    assert controller.rows["bad"].gain == pytest.approx(0.8, rel=0.05)  # tried by itself
    assert "it was not shown to be faster than plain" in controller.recollection.text
    assert "forget" in memory.calls
    assert memory.search is not None
    assert memory.search.plan == controller.plan
    assert memory.search.runs == 0
    assert memory.search.searched[:10] == "2026-11-23"


def test_a_strategy_that_fails_when_it_is_switched_on_leaves_the_rest_to_the_search() -> None:
    memory = FakeMemory(remembered(plan={"good": None, "fails": None}))
    failing = machine(trips_at={})
    answer = failing.answer

    def answered(action: Any) -> Any:
        result = answer(action)
        if action.check and "fails" in action.check:
            result.trips["fails"] = "it could not be switched on: OSError: no"
        return result

    failing.answer = answered  # type: ignore[method-assign]
    controller = simulate([candidate("fails"), candidate("good")], failing, memory=memory)
    assert controller.plan == {"good": None}
    assert controller.rows["fails"].status == "undone"
    assert "could not be switched on" in controller.recollection.text


@pytest.mark.parametrize(
    ("search", "why"),
    [
        (remembered(MOST_DAYS + 1, plan={"good": None}), "it is 31 days old"),
        (remembered(-MOST_DAYS - 1, plan={"good": None}), "it is 31 days old"),  # a clock that was wrong
        (remembered(plan={"good": None}, runs=MOST_RUNS), f"{MOST_RUNS} runs have relied on it"),
    ],
)
def test_an_old_result_is_searched_anew(search: RememberedSearch, why: str) -> None:
    memory = FakeMemory(search)
    again = machine()
    controller = simulate(candidates(), again, memory=memory)
    assert len([action for action in again.actions if action.check]) == 4
    assert f"{why}, so all is searched anew" in controller.recollection.text
    assert memory.search is not None
    assert (memory.search.runs, memory.search.searched[:10]) == (0, "2026-11-23")


def test_a_plan_that_a_run_was_killed_with_is_not_tried_again() -> None:
    memory = FakeMemory(remembered(plan={"good": None}), "the run that checked it last was killed meanwhile")
    controller = simulate(candidates(), machine(), memory=memory)
    assert "begin_check" not in memory.calls
    assert "was killed meanwhile, so all is searched anew" in controller.recollection.text


def test_what_no_longer_applies_is_left_out_and_the_rest_is_tried_as_a_whole() -> None:
    plan = {"gone": None, "unfit": None, "barred": None, "workers": 1000, "fused": 1, "broken": None, "good": None}
    memory = FakeMemory(remembered(plan=plan))
    offered = [
        replace(candidate("unfit"), refusal=lambda: "it needs another machine"),
        candidate("barred", ruled_out=("not allowed", "it is lossy"), exactness=Exactness.LOSSY),
        candidate("workers", settings=(1, 2)),
        candidate("fused", settings=(True,)),  # equal to 1, and not the same
        replace(candidate("broken"), settings=lambda: 1 / 0),  # type: ignore[arg-type,return-value]
        candidate("good"),
    ]
    again = machine(speed={"good": 1.3})
    controller = Controller(offered, budget=budget(), memory=memory)
    decisions = controller.decisions()
    action = next(decisions)
    while action.check is None:
        action = decisions.send(again.answer(action))
    assert action.check == {"good": None}
    assert controller.recollection.text.endswith(": plan good; the rest of it does not apply now; being checked again")


def test_a_run_that_ends_in_the_check_leaves_what_was_remembered() -> None:
    before = remembered(plan={"good": None}, trials={"bad": lost()}, run_s=99.0)
    memory = FakeMemory(before)
    controller = run_until(candidates(), machine(), memory, lambda c: bool(c.plan))
    controller.remember(ended=True)
    assert memory.search == before
    assert memory.calls[-1] == "store"  # which takes the mark of the check away


def test_a_failure_of_accel_in_the_check_is_not_met_again() -> None:
    memory = FakeMemory(remembered(plan={"good": None}))
    controller = run_until(candidates(), machine(), memory, lambda c: bool(c.plan))
    controller.recollection.failed()
    assert memory.calls[-1] == "forget"


def test_another_batch_shape_is_looked_up_anew() -> None:
    memory = FakeMemory(remembered(plan={"good": None}))
    changing = machine(regime=lambda step: "small" if step < 16 else "large")
    controller = simulate(candidates(), changing, memory=memory)
    assert memory.calls[:4] == ["recall", "begin_check", "store", "recall"]  # the check of the first is off
    assert "good" in controller.plan
    assert controller.recollection.text.endswith("checked again: kept")


# -- what gave nothing -------------------------------------------------------------------------------------------------


def test_what_gave_nothing_is_not_tried_again_in_a_short_run_and_says_when_it_was() -> None:
    trials = {"bad": lost(0.8), "none": lost(1.0, status="refused", why="too noisy")}
    memory = FakeMemory(remembered(plan={"good": None, "better": None}, trials=trials))
    again = machine()
    controller = simulate(candidates(), again, memory=memory, budget="10%")

    assert not any({"bad", "none"} & set(action.plan) for action in again.actions)
    assert controller.rows["bad"].status == "not tried"
    assert controller.rows["bad"].why == "tried 3 days ago: 0.80x, slower; again once the run is long enough"
    assert controller.rows["none"].why.startswith("tried 3 days ago: 1.00x, too noisy; ")
    assert memory.search is not None
    assert memory.search.trials["bad"] == trials["bad"]


def test_what_noise_may_have_hidden_is_tried_as_if_for_the_first_time() -> None:
    """One noisy first run once kept all later ones from trying anything."""
    trials = {"bad": lost(0.8), "good": replace(lost(0.72), open=True)}
    memory = FakeMemory(remembered(plan={}, trials=trials))
    controller = simulate(candidates(), machine(), memory=memory, budget="10%")
    assert controller.rows["good"].status == "kept"
    assert controller.rows["bad"].status == "not tried"
    assert memory.search is not None
    assert {name: trial.open for name, trial in memory.search.trials.items() if name in trials} == {
        "bad": False,
        "good": False,
    }


def test_a_trial_that_noise_may_have_decided_is_remembered_as_open() -> None:
    rows = {
        name: StrategyRow(name=name, summary="", treats=[], exactness="exact", status=status, gain=gain, gain_high=high)
        for name, status, gain, high in (("bad", "undone", 0.8, 0.9), ("good", "undone", 0.72, 1.3))
    }
    memory = FakeMemory(None)
    recollection = Recollection(memory, candidates())
    recollection.recall()
    for name in rows:
        recollection.tried(name, 1.0)
    recollection.store({}, rows, None, 10.0, open_rows=["good"], ended=True)
    assert memory.search is not None
    assert {name: trial.open for name, trial in memory.search.trials.items()} == {"bad": False, "good": True}


def test_what_gave_nothing_is_tried_again_together_once_the_run_is_long_enough() -> None:
    memory = FakeMemory(remembered(plan={"good": None}, trials={"bad": lost(trial_s=2.0), "better": lost(trial_s=3.0)}))
    again = machine()
    controller = simulate(
        candidates()[:3], again, memory=memory, budget="10%", pace=FAST, until_settled=False, steps=6000
    )
    step_s = 0.020 / 1.3
    assert 0.8 * 10 * 5.0 < step_s * step_of_first(again, lambda plan: "better" in plan) < 1.5 * 10 * 5.0
    assert controller.plan == {"good": None, "better": None}  # it had been wronged
    assert controller.rows["bad"].status == "undone"
    assert memory.search is not None
    assert memory.search.plan == controller.plan
    assert memory.search.trials["bad"].on[:10] == "2026-11-23"
    assert memory.search.searched == day(3)


def test_a_run_in_which_nothing_had_helped_is_left_alone_at_first() -> None:
    memory = FakeMemory(remembered(trials={name: lost() for name in ("good", "better", "bad", "none")}))
    again = machine()
    controller = simulate(candidates(), again, memory=memory, budget="10%")
    assert not any(action.plan or action.check for action in again.actions)
    assert controller.recollection.text == "from 2026-11-20 12:00: nothing that helped".replace(
        "12:00", datetime.fromtimestamp(NOW).strftime("%H:%M")
    )


# -- one-off work ------------------------------------------------------------------------------------------------------


class Compiles(Machine):
    """The first check of a plan with `compile` takes some seconds."""

    seconds_of_it = 4.0
    done = False

    def answer(self, action: Any) -> Any:
        result = super().answer(action)
        if action.check and "compile" in action.check and not self.done:
            self.done = True
            result.aside_s += self.seconds_of_it
        return result


def test_the_measured_compile_time_stands_in_for_the_guess() -> None:
    memory = FakeMemory()
    compiled = candidate("compile", one_off_s=30.0)
    simulate([compiled], Compiles(speed={"compile": 1.5}), memory=memory, budget="1m", steps=5000, until_settled=False)
    assert memory.search is not None
    assert memory.search.one_off_s == {"compile": pytest.approx(4.0)}
    assert memory.search.trials["compile"].trial_s > 4.0

    old = replace(memory.search, searched=day(MOST_DAYS + 1))  # even then: a compiler takes as long as ever
    again = Compiles(speed={"compile": 1.5})
    simulate([compiled], again, memory=FakeMemory(old), budget="10%", steps=5000, until_settled=False)
    assert 0.020 * step_of_first(again, lambda plan: "compile" in plan) == pytest.approx(40.0, rel=0.2)


def test_of_a_first_compilation_the_part_that_torch_keeps_is_not_expected_again() -> None:
    memory = FakeMemory()
    compiled = candidate("compile", one_off_s=3.0, repeated_share=0.25)
    for seconds, expected in ((4.0, 1.0), (0.8, 0.8), (0.9, 0.9)):
        again = Compiles(speed={"compile": 1.5})
        again.seconds_of_it = seconds
        simulate([compiled], again, memory=memory, budget="1m", steps=3000, until_settled=False)
        assert memory.search is not None
        assert memory.search.one_off_s == {"compile": pytest.approx(expected)}


def test_one_off_work_that_was_done_is_not_expected_again_in_the_same_run() -> None:
    """A brief trial that has no verdict is followed by one at length."""
    compiled = candidate("compile", one_off_s=30.0)
    noisy = Compiles(speed={"compile": 1.1}, noise=0.5, seed=5)
    controller = simulate([compiled], noisy, budget="33s", steps=4000, until_settled=False)
    assert controller.rows["compile"].steps > 200  # more than a brief trial has
    assert controller.rows["compile"].status != "not tried"


def test_one_off_work_is_weighed_against_the_length_of_the_last_run() -> None:
    done: dict[str, Any] = {"plan": {"compile": None, "good": None}, "one_off_s": {"compile": 4.0}}
    offered = [candidate("compile", one_off_s=30.0), candidate("good")]

    long_run = FakeMemory(remembered(**done, run_s=50.0))
    again = Compiles(speed={"compile": 1.5, "good": 1.3})
    simulate(offered, again, memory=long_run, budget="10%")
    assert step_of_first(again, lambda plan: len(plan) == 2) <= 20

    short_run = FakeMemory(remembered(**done, run_s=20.0))
    again = Compiles(speed={"compile": 1.5, "good": 1.3})
    controller = simulate(offered, again, memory=short_run, budget="10%")
    assert controller.plan == {"good": None}
    assert controller.recollection.text.endswith("; waiting for the budget: compile; checked again: kept")
    assert "about 4 s of one-off work" in controller.rows["compile"].why
    controller.remember(ended=True)
    assert short_run.search is not None
    assert short_run.search.plan == {"good": None, "compile": None}  # for a longer run


@pytest.mark.parametrize(("speedup_of", "waits"), [(None, False), (["good"], True)], ids=["of the plan", "of a part"])
def test_what_a_plan_saves_counts_towards_its_one_off_work(speedup_of: list[str] | None, waits: bool) -> None:
    shown: dict[str, Any] = {"speedup": 1.3, "speedup_low": 1.2, "speedup_of": speedup_of}
    earlier = remembered(plan={"compile": None, "good": None}, one_off_s={"compile": 6.0}, run_s=100.0, **shown)
    again = Compiles(speed={"compile": 1.5, "good": 1.3})
    offered = [candidate("compile", one_off_s=30.0), candidate("good")]
    controller = simulate(offered, again, memory=FakeMemory(earlier), budget="3%")
    assert ("compile" not in controller.plan) == waits  # 3 s of 100 s, and half of the 20 s that it saves at the least


def test_what_gave_nothing_is_not_tried_again_just_before_the_run_ends() -> None:
    for run_s, begins_s in ((70.0, 1.02 * 70.0), (200.0, 50.0)):
        earlier = remembered(plan={"good": None}, trials={"better": lost(trial_s=5.0)}, run_s=run_s)
        again = machine(noise=0.0)
        offered = [candidate("good"), candidate("better")]
        controller = simulate(
            offered, again, memory=FakeMemory(earlier), budget="10%", pace=FAST, until_settled=False, steps=8000
        )
        assert "better" in controller.plan
        step_s = 0.020 / 1.3
        assert step_s * step_of_first(again, lambda plan: "better" in plan) == pytest.approx(begins_s, rel=0.1)


def test_the_length_of_a_run_is_remembered_at_its_end() -> None:
    memory = FakeMemory(remembered(plan={"good": None}, run_s=500.0))
    controller = simulate([candidate("good")], machine(), memory=memory)
    assert memory.search is not None
    assert memory.search.run_s == 500.0  # this one may still become as long
    controller.remember(ended=True)
    assert memory.search.run_s == pytest.approx(controller.elapsed_s, abs=0.1)


# -- unfinished searches, crowded machines -----------------------------------------------------------------------------


def test_a_search_that_was_not_finished_goes_on_in_the_next_run() -> None:
    memory = FakeMemory()
    controller = run_until(candidates(), machine(), memory, lambda c: c.rows["better"].status == "kept")
    assert memory.search is None
    controller.remember(ended=True)
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
    controller = run_until(offered, machine(), memory, lambda c: c.rows["bad"].status == "undone")
    controller.remember(ended=True)
    assert memory.search is not None
    assert set(memory.search.trials) == {"good"}


def test_a_run_that_found_nothing_out_leaves_no_trace() -> None:
    memory = FakeMemory()
    controller = run_until(candidates(), machine(), memory, lambda c: c.steps > 0)
    controller.remember(ended=True)
    assert memory.calls == ["recall"]


def test_on_a_crowded_machine_a_remembered_plan_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.search import controller as module

    monkeypatch.setattr(module, "_is_crowded", lambda diagnosis: True)
    memory = FakeMemory(remembered(plan={"good": None}))
    again = machine(thread=lambda step: CROWDED)
    simulate([candidate("good"), candidate("threads", host_dependent=True)], again, memory=memory, pace=FAST)
    assert step_of_first(again, lambda plan: "good" in plan) <= 20
    waits = [action for action in again.actions if action.rest and not action.settled]
    assert waits
    assert all("good" in action.plan for action in waits)


def test_on_a_crowded_machine_nothing_waits_where_nothing_is_left_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.search import controller as module

    monkeypatch.setattr(module, "_is_crowded", lambda diagnosis: True)
    trials = {"threads": lost()}
    again = machine(thread=lambda step: CROWDED)
    offered = [candidate("good"), candidate("threads", host_dependent=True)]
    simulate(offered, again, memory=FakeMemory(remembered(plan={"good": None}, trials=trials)), pace=FAST)
    assert not [action for action in again.actions if action.rest and not action.settled]


# -- helpers -----------------------------------------------------------------------------------------------------------


def budget() -> Any:
    from accel.search.budget import Budget

    return Budget.parse(1e9)


def run_until(
    offered: list[Candidate], on: Machine, memory: FakeMemory, condition: Callable[[Controller], bool]
) -> Controller:
    """Run a controller until a condition holds, or for 5,000 steps."""
    controller = Controller(offered, budget=budget(), memory=memory)
    decisions = controller.decisions()
    action = next(decisions)
    while not condition(controller):
        action = decisions.send(on.answer(action))
        assert on.step < 5000
    return controller

"""The controller on simulated machines: right when it is quiet, silent when it is noisy, and never stubborn."""

from __future__ import annotations

import math
import statistics
from typing import Any, ClassVar

import pytest

from accel.profiler.trial import TrialConfig
from accel.search.actions import Action, Result
from accel.strategies.trial_design import TrialDesign
from tests.accel.simulation import FAST, INPUT, PLAIN_S, QUIET, Machine, candidate, simulate, step_of_first


def test_the_known_best_combination_is_found_on_a_noisy_machine() -> None:
    candidates = [candidate("good"), candidate("bad"), candidate("none"), candidate("better")]
    machine = Machine(speed={"good": 1.3, "bad": 0.8, "better": 1.6}, noise=0.2, seed=1)

    controller = simulate(candidates, machine)

    assert list(controller.plan) == ["good", "better"]
    assert controller.closing is not None
    assert controller.closing.low < 1.3 * 1.6 < controller.closing.high
    assert controller.rows["bad"].status == "undone"
    assert controller.rows["none"].status in ("undone", "inconclusive")


def test_the_best_of_several_settings_is_kept() -> None:
    machine = Machine(speed={("w", 1): 1.2, ("w", 2): 1.5, ("w", 4): 1.1}, noise=0.03)

    controller = simulate([candidate("w", settings=(1, 2, 4))], machine)

    assert controller.plan == {"w": 2}
    row = controller.rows["w"]
    assert row.setting == "2"
    assert row.gain == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("runs", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_false_keep_in_many_runs_at_twenty_percent_noise(runs: int) -> None:
    """Measured: in 10 of 1,000 runs of five worthless candidates a trial kept one (1.0 %, or 0.2 % of trials); the
    closing trial undid all but one, whose own trial was the last and stands for the closing trial."""
    names = ["a", "b", "c", "d", "e"]
    kept = ended_with_one = 0
    for seed in range(runs):
        controller = simulate([candidate(name) for name in names], Machine(noise=0.2, seed=seed))
        ended_with_one += bool(controller.plan)
        kept += bool(controller.plan) or any("undone" in event.text for event in controller.events)

    assert kept <= 0.01 * runs + 3 * math.sqrt(0.01 * runs)  # three standard deviations above that
    assert ended_with_one <= runs * 0.005


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_a_slow_strategy_is_never_kept(noise: float) -> None:
    for seed in range(20):
        controller = simulate([candidate("slow")], Machine(speed={"slow": 0.9}, noise=noise, seed=seed))

        assert controller.plan == {}


def test_noise_is_said_rather_than_guessed_at() -> None:
    config = TrialConfig(looks=(6, 12))
    controller = simulate([candidate("maybe")], Machine(speed={"maybe": 1.2}, noise=0.5, seed=3), config=config)

    row = controller.rows["maybe"]
    assert row.status == "inconclusive"
    assert "too noisy to tell after 12 pairs" in row.why


def test_a_wrong_candidate_never_runs_a_real_step() -> None:
    machine = Machine(speed={"wrong": 5.0}, wrong=frozenset({"wrong"}))

    controller = simulate([candidate("wrong")], machine)

    assert controller.plan == {}
    assert controller.rows["wrong"].why == "wrong: its output is off"
    assert not any("wrong" in action.plan for action in machine.actions)


def test_a_strategy_that_trips_in_its_trial_is_dropped_and_the_search_goes_on() -> None:
    machine = Machine(speed={"trips": 2.0, "good": 1.5}, trips_at={"trips": 40})

    controller = simulate([candidate("trips"), candidate("good")], machine)

    assert list(controller.plan) == ["good"]
    assert "not finite" in controller.rows["trips"].why


def test_a_setting_that_trips_leaves_the_one_on_that_was_kept_before() -> None:
    machine = Machine(speed={("compile", "blocks"): 1.3, ("compile", "whole"): 1.5}, trips_at={("compile", "whole"): 0})

    controller = simulate([candidate("compile", settings=("blocks", "whole"))], machine)

    assert controller.plan == {"compile": "blocks"}
    assert controller.rows["compile"].status == "kept"
    assert any(event.text.startswith("compile whole undone: its output is not finite") for event in controller.events)


def test_a_kept_strategy_that_trips_later_is_undone() -> None:
    machine = Machine(speed={"a": 1.5, "b": 1.4}, trips_at={"a": 1500})

    controller = simulate([candidate("a"), candidate("b")], machine, until_settled=False, steps=3000)

    assert list(controller.plan) == ["b"]
    assert controller.rows["a"].status == "undone"
    assert any("a undone" in event.text for event in controller.events)


def test_a_strategy_that_was_faster_and_then_regresses_is_undone() -> None:
    class Regresses(Machine):
        def seconds(self, plan: dict[str, object]) -> float:
            return super().seconds(plan) * (2.0 if "fades" in plan and self.step > 1500 else 1.0)

    machine = Regresses(speed={"fades": 1.5, "good": 1.3}, noise=0.05)
    controller = simulate([candidate("fades"), candidate("good")], machine, until_settled=False, steps=4000, pace=FAST)

    assert list(controller.plan) == ["good"]
    assert "no longer pays" in controller.rows["fades"].why
    assert any("became slower" in event.text for event in controller.events)


def test_a_strategy_that_paid_only_on_a_busy_machine_is_undone_on_a_quiet_one() -> None:
    class Quietens(Machine):
        """One thread is faster while another process holds a core; the plan's own step never becomes slower."""

        def seconds(self, plan: dict[str, object]) -> float:
            busy = self.step < 600
            return super().seconds(plan) * (1.0 if "threads" in plan else 1.5 if busy else 0.6)

    threads = candidate("threads", depends_on_host=True)
    controller = simulate([threads, candidate("good")], Quietens(speed={"good": 1.3}), until_settled=False, steps=3000)

    assert list(controller.plan) == ["good"]
    assert "no longer pays" in controller.rows["threads"].why


def test_what_depends_on_the_host_takes_nothing_else_with_it_out_of_a_closing_trial() -> None:
    class Frees(Machine):
        """One thread is faster until the closing trial, which is the first to go back to the plain loop."""

        tried = freed = False

        def answer(self, action: Action) -> Result:
            self.tried = self.tried or "threads" in action.plan
            self.freed = self.freed or (self.tried and not action.plan)
            return super().answer(action)

        def seconds(self, plan: dict[str, object]) -> float:
            return super().seconds(plan) * ((1.4 if self.freed else 0.7) if "threads" in plan else 1.0)

    offered = [candidate("good"), candidate("threads", depends_on_host=True)]
    controller = simulate(offered, Frees(speed={"good": 1.1}), steps=3000)

    assert list(controller.plan) == ["good"]
    assert "not shown to be faster" in controller.rows["threads"].why
    assert controller.closing is not None and controller.closing.verdict == "keep"


def test_what_has_a_small_gain_left_on_a_slower_machine_stays() -> None:
    """A keep takes 0.5 %; what was kept goes when it likely has less than that, not when it has less than 3 %."""

    class Slows(Machine):
        def seconds(self, plan: dict[str, Any]) -> float:
            return super().seconds(plan) * (1.0 if self.step < 2000 else 1.15 * (1.1 / 1.02 if plan else 1.0))

    for seed in range(5):
        machine = Slows(speed={"good": 1.1}, noise=0.01, seed=seed)
        controller = simulate([candidate("good")], machine, until_settled=False, steps=4000, pace=FAST)
        assert any("became slower" in event.text for event in controller.events)
        assert list(controller.plan) == ["good"]


@pytest.mark.parametrize("at", ["retry", "close"])
def test_another_batch_shape_in_a_trial_of_a_slower_plan_is_noticed(at: str) -> None:
    class Flips(Machine):
        """The shape changes when the plan is tried again, or in the closing trial of what that has left of it."""

        flipped = False

        def seconds(self, plan: dict[str, Any]) -> float:
            return super().seconds(plan) * (2.0 if "fades" in plan and self.step > 1500 else 1.0)

        def answer(self, action: Action) -> Result:
            without = action.plan == {"good": None} if at == "retry" else not action.plan
            self.flipped = self.flipped or (self.step > 1500 and without)
            return super().answer(action)

    machine = Flips(speed={"fades": 1.5, "good": 1.3})
    machine.regime = lambda step: "large" if machine.flipped else "small"
    controller = simulate([candidate("fades"), candidate("good")], machine, until_settled=False, steps=4000, pace=FAST)
    assert sum("searching again" in event.text for event in controller.events) == 1
    assert list(controller.plan) == ["good"]


def test_a_batch_shape_that_never_settles_does_not_search_for_ever() -> None:
    machine = Machine(speed={"good": 1.5}, regime=lambda step: step // 100)

    controller = simulate([candidate("good")], machine, until_settled=False, steps=6000, pace=FAST)

    assert sum("searching again" in event.text for event in controller.events) == FAST.reopenings


def test_what_treats_the_bottleneck_is_tried_first() -> None:
    candidates = [candidate("compute"), candidate("input", treats=INPUT), candidate("input2", treats=INPUT)]
    machine = Machine(data_share=0.8)

    simulate(candidates, machine)

    tried = [name for action in machine.actions if action.check for name in action.check]
    assert tried[0] == "input"


def test_a_candidate_that_noise_hides_does_not_hold_up_the_others() -> None:
    machine = Machine(speed={"maybe": 1.02, "good": 1.5})
    seconds = machine.seconds

    def noisy(plan: dict[str, Any]) -> float:
        return seconds(plan) * (math.exp(machine.random.gauss(0, 0.6)) if "good" not in plan else 1.0)

    machine.seconds = noisy  # type: ignore[method-assign]
    controller = simulate([candidate("maybe"), candidate("good")], machine, pace=FAST)
    first = next(n for n, action in enumerate(machine.actions) if "good" in action.plan)
    assert sum(a.steps for a in machine.actions[:first] if "maybe" in a.plan) <= 12 * TrialConfig().block_steps
    assert "good" in controller.plan


def test_what_is_much_slower_is_left_after_two_steps_and_tried_once_more() -> None:
    machine = Machine(speed={"terrible": 0.5, "good": 1.3}, noise=0.03)
    controller = simulate([candidate("terrible"), candidate("good")], machine)

    slow = [action for action in machine.actions if "terrible" in action.plan]
    assert [action.steps for action in slow] == [2, 2]
    assert all("terrible" not in machine.actions[machine.actions.index(action) + 1].plan for action in slow)
    first_good = next(n for n, action in enumerate(machine.actions) if "good" in action.plan)
    assert machine.actions.index(slow[0]) < first_good < machine.actions.index(slow[1])
    assert controller.rows["terrible"].status == "undone"
    assert controller.rows["terrible"].why == "slower"
    assert controller.rows["terrible"].gain == pytest.approx(0.5, rel=0.2)


class Drained(Machine):
    """A device that ends each action idle."""

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        result.drained = True
        return result


def test_on_a_device_what_is_much_slower_is_left_after_a_whole_block() -> None:
    """To look after two steps, it would have to be drained within the block."""
    machine = Drained(speed={"terrible": 0.5, "good": 1.3}, noise=0.03)
    controller = simulate([candidate("terrible"), candidate("good")], machine, reduce=statistics.fmean)

    slow = [action for action in machine.actions if "terrible" in action.plan]
    assert [action.steps for action in slow] == [5, 5]
    assert (controller.rows["terrible"].status, controller.rows["terrible"].why) == ("undone", "slower")
    assert controller.rows["terrible"].gain == pytest.approx(0.5, rel=0.1)
    assert {action.steps for action in machine.actions if "good" in action.plan and not action.anatomy} >= {5}


def test_two_slow_steps_by_chance_do_not_cost_a_candidate_its_trial() -> None:
    machine = Machine(speed={"good": 1.3}, noise=0.03)
    burst: list[int] = []

    def stalled(step: int) -> float:
        if "good" in machine.actions[-1].plan and len(burst) < 4:
            burst.append(step)
        return 3.0 if step in burst else 1.0

    machine.drift = stalled
    controller = simulate([candidate("good")], machine)
    assert len(burst) == 4
    assert controller.rows["good"].status == "kept"


def test_what_needs_no_comparison_comes_first() -> None:
    machine = Machine(speed={"free": 1.2, "other": 1.3})
    simulate([candidate("other"), candidate("free", touches=frozenset())], machine)

    assert next(action.plan for action in machine.actions if action.plan) == {"free": None}
    assert all("free" not in action.check or "other" in action.check for action in machine.actions if action.check)


def test_a_stall_while_a_switch_settles_is_not_the_candidate_s_cost() -> None:
    good = candidate("good", settle_steps=lambda setting: 2)
    quiet = Machine(speed={"good": 1.3})
    simulate([good], quiet)
    assert next(action for action in quiet.actions if "good" in action.plan).settle >= 2
    first = step_of_first(quiet, lambda plan: "good" in plan)

    stalled = Machine(speed={"good": 1.3}, drift=lambda step: 500.0 if step == first else 1.0)  # 10 s
    controller = simulate([good], stalled)
    assert controller.rows["good"].status == "kept"
    assert controller.cost_s < 1.0


@pytest.mark.parametrize("settle", [0, 1, 2, 3])
@pytest.mark.parametrize("slow", [1.0, 5.0, 7.0, 50.0])
def test_steps_of_two_kinds_by_turns_are_compared_each_with_its_like(settle: int, slow: float) -> None:
    """As where a generator is updated in every second step."""
    machine = Machine(speed={"good": 1.2}, drift=lambda step: slow * (1, 2)[step % 2])
    controller = simulate([candidate("good", settle_steps=lambda setting: settle)], machine)
    assert controller.plan == {"good": None}
    assert controller.closing is not None
    assert controller.closing.gain == pytest.approx(1.2)


def blocks_without(machine: Machine) -> int:
    """Number of plain blocks, of trials alone."""
    return sum(not action.plan and not action.check and not action.anatomy for action in machine.actions)


def test_the_trial_that_has_just_been_made_of_the_same_two_plans_is_the_closing_trial() -> None:
    machine = Machine(speed={"good": 1.2}, noise=0.08, seed=1)
    controller = simulate([candidate("good"), candidate("absent", refusal=lambda: "it does not apply")], machine)
    assert controller.rows["good"].why == "faster in 6 pairs of interleaved blocks"
    assert controller.closing is not None
    assert controller.closing.gain == controller.rows["good"].gain
    assert blocks_without(machine) == 6


def test_four_pairs_are_too_few_for_a_closing_trial() -> None:
    machine = Machine(speed={"good": 1.5}, noise=0.02)
    controller = simulate([candidate("good")], machine)
    assert controller.rows["good"].why == "faster in 4 pairs of interleaved blocks"
    assert controller.closing is not None and controller.closing.pairs == 6
    assert blocks_without(machine) == 4 + 6


def test_what_a_finding_names_comes_before_what_treats_its_class() -> None:
    candidates = [candidate("other", treats=INPUT), candidate("loader_workers", treats=INPUT)]
    machine = Machine(data_share=0.8, thread=lambda step: QUIET)

    simulate(candidates, machine)

    tried = [name for action in machine.actions if action.check for name in action.check]
    assert tried[0] == "loader_workers"


def first_plan(machine: Machine) -> dict[str, Any]:
    return next(action.plan for action in machine.actions if action.plan)


@pytest.mark.parametrize(("data_share", "first"), [(0.8, "exchange"), (0.3, "heap")])
def test_what_treats_most_of_the_step_comes_before_all_that_it_need_not_wait_for(data_share: float, first: str) -> None:
    """Beside 65 % of communication an allocator was tried for a minute and gave 3 %."""

    class EarlyTrial(TrialDesign):
        order: ClassVar[int] = -1

    heap = candidate("heap", touches=frozenset(), kind=EarlyTrial)
    exchange = candidate("exchange", treats=INPUT, touches=frozenset())
    machine = Machine(data_share=data_share, thread=lambda step: QUIET)
    simulate([heap, exchange], machine)
    assert first_plan(machine) == {first: None}


@pytest.mark.parametrize(("slower", "first"), [(1.0, "other"), (60.0, "measured")])
def test_what_takes_seconds_once_is_cheap_beside_slow_steps(slower: float, first: str) -> None:
    measured = candidate("measured", treats=INPUT, touches=frozenset(), cost_s=5.0)
    other = candidate("other", touches=frozenset())
    machine = Machine(data_share=0.45, thread=lambda step: QUIET, drift=lambda step: slower)
    simulate([other, measured], machine)
    assert first_plan(machine) == {first: None}


def test_a_finished_plan_is_looked_at_now_and_then_only() -> None:
    machine = Machine(speed={"good": 1.5})
    simulate([candidate("good")], machine, until_settled=False, steps=4000, pace=FAST)
    held = [action for action in machine.actions if action.after_search and action.check is None]

    assert {action.rest for action in held[:3]} == {0}  # the usual step time is learnt first
    rested = sum(action.rest for action in held)
    assert rested > 0.7 * sum(action.rest + action.steps for action in held)


def test_where_nothing_is_on_or_waits_the_loop_is_hardly_looked_at() -> None:
    """A measured step takes 50 µs: 50 of 200 steps of 0.5 ms added 2.5 %."""
    machine = Machine(speed={"slow": 0.9}, drift=lambda step: 0.0005 / PLAIN_S)
    controller = simulate([candidate("slow")], machine, steps=40_000, until_settled=False)
    held = [action for action in machine.actions if action.after_search]
    assert controller.plan == {} and held
    rested = sum(action.rest for action in held)
    assert rested > 0.96 * sum(action.rest + action.steps for action in held)


def test_a_plan_that_is_not_faster_as_a_whole_is_undone() -> None:
    class Clash(Machine):
        """Each strategy pays alone against the other, together they are slower than plain."""

        def seconds(self, plan: dict[str, object]) -> float:
            return 0.03 if len(plan) == 2 and self.step > 160 else super().seconds(plan)

    controller = simulate([candidate("a"), candidate("b")], Clash(speed={"a": 1.2, "b": 1.2}))

    assert controller.plan == {}
    assert "as a whole" in controller.rows["a"].why


def test_a_replayed_plan_is_switched_on_without_a_trial() -> None:
    machine = Machine(speed={"good": 1.5}, wrong=frozenset({"bad"}))

    controller = simulate([candidate("good"), candidate("bad")], machine, replay={"good": None, "bad": None})

    assert list(controller.plan) == ["good"]
    assert controller.rows["good"].why == "taken over from the plan, without a trial"
    assert controller.search_steps == 0


def test_a_strategy_that_does_not_apply_says_why() -> None:
    broken = candidate("broken", refusal=lambda: 1 / 0)
    absent = candidate("absent", refusal=lambda: "it needs a CUDA device")
    barred = candidate("barred", ruled_out=("not allowed", "it needs allow='reduced'"))

    rows = simulate([broken, absent, barred], Machine()).rows

    assert "ZeroDivisionError" in rows["broken"].why
    assert (rows["absent"].status, rows["absent"].why) == ("not applicable", "it needs a CUDA device")
    assert (rows["barred"].status, rows["barred"].why) == ("not allowed", "it needs allow='reduced'")


class Moves(Machine):
    """Whenever the loop goes on to another loader, a strategy that is on then can't stay on."""

    def answer(self, action: Action) -> Result:
        before = self.regime(self.step)
        result = super().answer(action)
        result.regime = self.regime(self.step)
        if result.regime != before:
            result.trips.update({name: "the loop went on to another loader" for name in action.plan})
        return result


@pytest.mark.parametrize("first", range(40, 107, 6))
def test_a_search_that_begins_again_tells_of_no_decision_that_was_none(first: int) -> None:
    told: list[tuple[str, str]] = []
    machine = Moves(speed={"good": 1.5}, regime=lambda step: "one" if step < first else "other")
    offered = [candidate("good"), candidate("other")]
    simulate(offered, machine, pace=FAST, announce=lambda row: told.append((row.name, row.status)))
    assert "not tried" not in [status for _, status in told]
    assert [name for name, _ in told][-2:] == ["good", "other"]


def test_blocks_of_slow_steps_have_fewer() -> None:
    for slow, steps in ((1.0, 5), (5.0, 4), (50.0, 2)):
        machine = Machine(speed={"good": 1.5}, drift=lambda step, slow=slow: slow)  # type: ignore[misc]
        controller = simulate([candidate("good")], machine)
        assert controller.plan == {"good": None}
        counted = {
            action.steps for action in machine.actions if action.plan and not action.after_search and not action.anatomy
        }
        assert counted == ({steps} if steps == 2 else {2, steps - 2, steps})


# -- what outlasts its own use -----------------------------------------------------------------------------------------


def test_what_shortens_a_phase_that_takes_next_to_nothing_is_not_tried() -> None:
    machine = Machine(data_share=0.01)
    controller = simulate([candidate("workers", treats=INPUT, phase="data"), candidate("other")], machine)

    assert controller.rows["workers"].status == "not tried"
    assert controller.rows["workers"].why == "data is 1.0% of the step: too little to win"
    assert all("workers" not in {**action.plan, **(action.check or {})} for action in machine.actions)

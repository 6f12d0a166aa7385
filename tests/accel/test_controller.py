"""The controller on simulated machines: right when it is quiet, silent when it is noisy, and never stubborn."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.evidence import ThreadShare
from accel.profiler.trial import TrialConfig
from accel.search.actions import Action, Candidate, Result
from tests.accel.simulation import FAST, PLAIN_S, Machine, candidate, simulate

INPUT = frozenset({Bottleneck.INPUT})


def test_the_known_best_combination_is_found_on_a_noisy_machine() -> None:
    candidates = [candidate("good"), candidate("bad"), candidate("none"), candidate("better")]
    machine = Machine(speed={"good": 1.3, "bad": 0.8, "better": 1.6}, noise=0.2, seed=1)

    controller = simulate(candidates, machine)

    assert list(controller.plan) == ["good", "better"]
    assert controller.closing is not None
    assert controller.closing.low < 1.3 * 1.6 < controller.closing.high
    assert controller.rows["bad"].status == "undone"
    assert controller.rows["none"].status in ("undone", "refused")


def test_the_best_of_several_settings_is_kept() -> None:
    machine = Machine(speed={("w", 1): 1.2, ("w", 2): 1.5, ("w", 4): 1.1}, noise=0.03)

    controller = simulate([candidate("w", settings=(1, 2, 4))], machine)

    assert controller.plan == {"w": 2}
    row = controller.rows["w"]
    assert row.setting == "2"
    assert row.gain == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("runs", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_false_keep_in_many_runs_at_twenty_percent_noise(runs: int) -> None:
    """Measured: in 10 of 1,000 runs of five worthless candidates a trial kept one (1.0 %, or 0.2 % of trials); the
    closing trial undid each, so no run ended with one."""
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
    assert row.status == "refused"
    assert "too noisy to tell after 12 pairs" in row.why


def test_a_drifting_machine_does_not_fool_a_paired_trial() -> None:
    for seed in range(20):
        machine = Machine(noise=0.02, seed=seed, drift=lambda step: 1.0 + step / 300)
        assert simulate([candidate("none")], machine).plan == {}


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

    threads = candidate("threads", host_dependent=True)
    controller = simulate([threads, candidate("good")], Quietens(speed={"good": 1.3}), until_settled=False, steps=3000)

    assert list(controller.plan) == ["good"]
    assert "no longer pays" in controller.rows["threads"].why


def test_a_machine_that_becomes_slower_costs_no_good_strategy() -> None:
    machine = Machine(speed={"good": 1.5}, noise=0.05, drift=lambda step: 1.0 if step < 1500 else 2.0)

    controller = simulate([candidate("good")], machine, until_settled=False, steps=4000, pace=FAST)

    assert list(controller.plan) == ["good"]


def test_the_search_begins_again_when_the_batch_shape_changes() -> None:
    machine = Machine(speed={"good": 1.5}, noise=0.02, regime=lambda step: "small" if step < 1000 else "large")

    controller = simulate([candidate("good")], machine, until_settled=False, steps=2500, pace=FAST)

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


CROWDED, QUIET = ThreadShare(run=0.5, wait=0.45, blocked=0.05), ThreadShare(run=0.98, wait=0.01, blocked=0.01)


@pytest.fixture
def _quiet_machine() -> None:
    """The controller sees what it is told of the machine."""


def test_the_search_waits_for_a_crowded_machine() -> None:
    machine = Machine(speed={"good": 1.5}, noise=0.02, thread=lambda step: CROWDED if step < 300 else QUIET)

    controller = simulate([candidate("good", host_dependent=True)], machine, pace=FAST)

    assert [event.text for event in controller.events] == ["the machine is crowded: the search waits"] * 2
    assert next(action for action in machine.actions if action.check).plan == {}
    assert machine.actions[1].rest == FAST.recheck
    assert list(controller.plan) == ["good"]


def test_a_machine_that_stays_crowded_is_searched_all_the_same() -> None:
    controller = simulate([candidate("good")], Machine(speed={"good": 1.5}, thread=lambda step: CROWDED), pace=FAST)

    assert controller.events[-1].text == "the machine is crowded: the search begins anyway"
    assert len(controller.events) == FAST.crowded_looks + 1
    assert list(controller.plan) == ["good"]


def test_a_crowded_machine_holds_up_no_trial_whose_effect_is_far_above_the_noise() -> None:
    said: list[str] = []
    machine = Machine(
        speed={("loader_workers", 2): 20.0, "other": 1.5},
        noise=0.3,
        data_share=0.95,
        thread=lambda step: CROWDED if step < 2000 else QUIET,
    )
    workers = candidate("loader_workers", treats=INPUT, phase="data", settings=(1, 2), host_dependent=True)
    controller = simulate([candidate("other", host_dependent=True), workers], machine, pace=FAST, say=said.append)

    waited = next(number for number, action in enumerate(machine.actions) if action.rest)
    tried = [name for action in machine.actions[:waited] for name in action.plan]
    assert set(tried) == {"loader_workers"}
    assert controller.plan["loader_workers"] == 2
    assert "other" in controller.plan  # tried once the waiting was over
    assert said == ["other processes keep the machine busy: what that would hide or distort is tried later"]
    assert controller.plain_ms == pytest.approx(20, rel=0.3)


def test_what_does_not_depend_on_other_processes_is_tried_beside_them() -> None:
    machine = Machine(speed={"good": 1.5, "threads": 1.5}, noise=0.02, thread=lambda step: CROWDED)
    threads = candidate("threads", host_dependent=True)
    controller = simulate([candidate("good"), threads, candidate("none")], machine, pace=FAST)

    waited = next(number for number, action in enumerate(machine.actions) if action.rest)
    assert {name for action in machine.actions[:waited] for name in action.plan} == {"good", "none"}
    assert machine.actions[waited].plan == {"good": None}
    assert list(controller.plan) == ["good", "threads"]
    assert controller.rows["none"].status == "undone"


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
    simulate([candidate("other"), candidate("free", is_compared=False)], machine)

    assert next(action.plan for action in machine.actions if action.plan) == {"free": None}
    assert all("free" not in action.check or "other" in action.check for action in machine.actions if action.check)


def test_a_stall_while_a_switch_settles_is_not_the_candidate_s_cost() -> None:
    machine = Machine(speed={"good": 1.3})
    machine.drift = lambda step: 500.0 if step == 15 else 1.0  # 10 s
    controller = simulate([candidate("good")], machine)
    assert controller.rows["good"].status == "kept"
    assert controller.cost_s < 1.0


def test_a_large_gain_is_kept_after_four_pairs() -> None:
    controller = simulate([candidate("good")], Machine(speed={"good": 1.5}, noise=0.02))
    assert controller.rows["good"].why == "faster in 4 pairs of interleaved blocks"


def test_what_is_not_kept_on_a_crowded_machine_is_tried_again_on_a_quiet_one() -> None:
    machine = Machine(
        speed={"loader_workers": 1.0},
        data_share=0.95,
        thread=lambda step: CROWDED if step < 400 else QUIET,
    )
    machine.drift = lambda step: 1.0
    workers = candidate("loader_workers", treats=INPUT, phase="data")
    seconds = machine.seconds

    def faster_when_quiet(plan: dict[str, Any]) -> float:
        return seconds(plan) / (3.0 if plan and machine.step > 400 else 1.0)

    machine.seconds = faster_when_quiet  # type: ignore[method-assign]
    controller = simulate([workers], machine, pace=FAST)

    assert list(controller.plan) == ["loader_workers"]
    assert controller.rows["loader_workers"].status == "kept"


def test_waiting_for_a_quiet_machine_has_an_end_in_seconds_too() -> None:
    machine = Machine(thread=lambda step: CROWDED, drift=lambda step: 100.0)  # 2 s a step
    simulate([candidate("good")], machine, pace=FAST)

    rests = [action.rest for action in machine.actions if action.rest]
    assert rests == [FAST.observe] * FAST.crowded_looks  # 10 steps are 20 s; a look needs more


def test_a_regime_that_changes_while_the_search_waits_begins_it_anew() -> None:
    machine = Machine(
        speed={"loader_workers": 3.0},
        data_share=0.95,
        thread=lambda step: CROWDED if step < 300 else QUIET,
        regime=lambda step: "one" if step < 30 else "other",
    )
    workers = candidate("loader_workers", treats=INPUT, phase="data")
    controller = simulate([workers], machine, pace=FAST)

    assert any("searching again" in event.text for event in controller.events)
    assert list(controller.plan) == ["loader_workers"]


def test_what_a_finding_names_comes_before_what_treats_its_class() -> None:
    candidates = [candidate("other", treats=INPUT), candidate("loader_workers", treats=INPUT)]
    machine = Machine(data_share=0.8, thread=lambda step: QUIET)

    simulate(candidates, machine)

    tried = [name for action in machine.actions if action.check for name in action.check]
    assert tried[0] == "loader_workers"


def test_a_finished_plan_is_looked_at_now_and_then_only() -> None:
    machine = Machine(speed={"good": 1.5})
    simulate([candidate("good")], machine, until_settled=False, steps=4000, pace=FAST)
    held = [action for action in machine.actions if action.settled and action.check is None]

    assert {action.rest for action in held[:3]} == {0}  # the usual step time is learnt first
    rested = sum(action.rest for action in held)
    assert rested > 0.7 * sum(action.rest + action.steps for action in held)


def test_one_off_work_waits_until_the_run_is_long_enough() -> None:
    machine = Machine(speed={"compile": 1.5})
    compiled = candidate("compile", one_off_s=5.0)

    early = simulate([compiled], machine, budget="10%")
    assert early.plan == {}
    assert "tried once the run is long enough" in early.rows["compile"].why

    later = simulate([compiled], Machine(speed={"compile": 1.5}), budget="10%", until_settled=False, steps=5000)
    assert list(later.plan) == ["compile"]


def test_the_search_goes_on_as_soon_as_the_budget_allows() -> None:
    class Checked(Machine):
        def answer(self, action: Action) -> Result:
            result = super().answer(action)
            result.aside_s += 0.3 if action.check else 0.0
            return result

    machine = Checked(speed={"a": 1.0, "b": 1.3})
    simulate([candidate("a"), candidate("b")], machine, budget="10%", until_settled=False, steps=2000)

    began = {}
    step = 0
    for action in machine.actions:
        for name in action.check or {}:
            began.setdefault(name, step * PLAIN_S)
        step += action.rest + action.settle + action.steps
    assert began["b"] == pytest.approx(6.0, abs=1.0)  # 0.3 s each, of 10 %


def test_half_of_what_the_search_has_saved_may_be_spent() -> None:
    compiled = candidate("compile", one_off_s=5.0)
    waits = {}
    for gain in (1.0, 1.5):
        machine = Machine(speed={"free": gain, "compile": 1.2})
        candidates = [candidate("free", is_compared=False), compiled]
        simulate(candidates, machine, budget="3%", until_settled=False, steps=10_000)
        actions = itertools.takewhile(lambda action: "compile" not in action.plan, machine.actions)
        waits[gain] = sum(action.rest + action.settle + action.steps for action in actions) * PLAIN_S / gain
    assert waits[1.0] > 5.0 / 0.03
    assert waits[1.5] == pytest.approx(5.0 / (0.03 + 0.5 * 0.5), rel=0.35)


def test_one_off_work_beyond_an_absolute_budget_is_not_tried() -> None:
    controller = simulate([candidate("compile", one_off_s=30.0)], Machine(), budget="5s")

    assert controller.rows["compile"].why == "about 30 s of one-off work, more than the budget of 5s allows now"


def test_a_spent_budget_ends_the_search() -> None:
    slow = [candidate(name) for name in ("a", "b", "c", "d")]
    machine = Machine(speed=dict.fromkeys("abcd", 0.85), noise=0.02)

    controller = simulate(slow, machine, budget="0.15s")

    statuses = [controller.rows[name].status for name in "abcd"]
    assert statuses[0] == "undone"
    assert statuses[-1] == "not tried"
    assert "the budget of 0.15s" in controller.rows["d"].why


def test_the_search_pays_for_itself_and_says_when() -> None:
    machine = Machine(speed={"slow": 0.5, "good": 2.0})

    controller = simulate([candidate("slow"), candidate("good")], machine)

    assert controller.cost_s > 0
    saved_s = (controller.closing.before_ms - controller.closing.after_ms) / 1e3  # type: ignore[union-attr]
    steps = controller.break_even_step()
    assert steps is not None
    assert (steps - controller.searched_until) * saved_s == pytest.approx(controller.cost_s, abs=2 * saved_s)


def test_nothing_kept_never_pays_back() -> None:
    assert simulate([candidate("none")], Machine()).break_even_step() is None


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


def test_a_replayed_plan_does_not_wait_for_a_quiet_machine() -> None:
    machine = Machine(speed={"good": 1.5}, thread=lambda step: CROWDED)

    controller = simulate([candidate("good")], machine, replay={"good": None}, pace=FAST)

    assert list(controller.plan) == ["good"]
    assert not controller.events
    assert machine.step < FAST.recheck


def test_a_strategy_that_does_not_apply_says_why() -> None:
    broken = replace(candidate("broken"), refusal=lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    absent = replace(candidate("absent"), refusal=lambda: "it needs a CUDA device")
    barred = candidate("barred", ruled_out=("not allowed", "it is reduced; allow='reduced' tries it"))

    rows = simulate([broken, absent, barred], Machine()).rows

    assert "ZeroDivisionError" in rows["broken"].why
    assert (rows["absent"].status, rows["absent"].why) == ("not applicable", "it needs a CUDA device")
    assert (rows["barred"].status, rows["barred"].why) == ("not allowed", "it is reduced; allow='reduced' tries it")


class Moves(Machine):
    """Whenever the loop goes on to another loader, a strategy that is on then can't stay on."""

    def answer(self, action: Action) -> Result:
        before = self.regime(self.step)
        result = super().answer(action)
        result.regime = self.regime(self.step)
        if result.regime != before:
            result.trips.update({name: "the loop went on to another loader" for name in action.plan})
        return result


@pytest.mark.parametrize("first", range(40, 107, 3))
def test_a_search_that_begins_anew_has_one_counted_line_for_each_decision(first: int) -> None:
    told: list[tuple[str, str, int, int]] = []
    machine = Moves(speed={"good": 1.5}, regime=lambda step: "one" if step < first else "other")

    simulate(
        [candidate("good"), candidate("other")],
        machine,
        pace=FAST,
        announce=lambda row, done, total: told.append((row.name, row.status, done, total)),
    )

    assert [line[2:] for line in told if line[2]] in ([(1, 2), (2, 2)], [(1, 2), (1, 2), (2, 2)])
    assert "not tried" not in [status for _, status, _, _ in told]
    assert [name for name, _, done, _ in told if done][-2:] == ["good", "other"]


def test_what_does_not_apply_is_not_counted() -> None:
    told: list[tuple[str, int, int]] = []
    candidates = [
        candidate("pinned", refusal=lambda: "the model is on the CPU"),
        candidate("good"),
        candidate("barred", ruled_out=("not allowed", "it is lossy"), refusal=lambda: "it does not apply"),
        candidate("other"),
    ]

    simulate(
        candidates,
        Machine(speed={"good": 1.5}),
        announce=lambda row, done, total: told.append((row.name, done, total)),
    )

    assert sorted(told) == [("barred", 0, 2), ("good", 1, 2), ("other", 2, 2), ("pinned", 0, 2)]


def by_epoch() -> Any:
    return candidate("workers", phase="data", by_epoch=lambda: True)


def test_what_takes_effect_when_an_epoch_begins_is_tried_in_whole_epochs_and_last() -> None:
    machine = Machine(
        speed={"fast": 1.5}, noise=0.05, data_share=0.0, epoch_start_s=lambda plan: 0.01 if "workers" in plan else 0.1
    )

    controller = simulate([by_epoch(), candidate("fast")], machine)

    assert controller.plan == {"fast": None, "workers": None}
    plans = [action.plan for action in machine.actions if action.whole_epoch]
    assert all("workers" not in plan for plan in plans[:2])  # one epoch to see whether it is worth a trial, then A
    trial = [action for action in machine.actions if action.plan == {"fast": None, "workers": None}]
    assert all(action.whole_epoch for action in trial if not action.anatomy and not action.settled)


def test_what_shortens_the_beginning_of_epochs_alone_is_not_tried_a_second_time_in_the_closing_trial() -> None:
    machine = Machine(noise=0.05, data_share=0.0, epoch_start_s=lambda plan: 0.0 if "workers" in plan else 0.1)

    controller = simulate([by_epoch()], machine)

    assert controller.plan == {"workers": None}
    assert controller.closing is not None and controller.closing.verdict == "keep"
    assert sum(action.whole_epoch for action in machine.actions) == 1 + 12


def test_an_epoch_that_waits_for_little_is_no_reason_for_a_trial() -> None:
    machine = Machine(data_share=0.0, epoch_start_s=lambda plan: 0.002)

    controller = simulate([by_epoch()], machine)

    assert controller.rows["workers"].status == "not tried"
    assert controller.rows["workers"].why == "data is 1.0% of an epoch: too little to win"


def test_what_does_not_shorten_the_beginning_of_epochs_is_undone() -> None:
    machine = Machine(noise=0.02, data_share=0.0, epoch_start_s=lambda plan: 0.1)

    controller = simulate([by_epoch()], machine)

    assert controller.plan == {}
    assert controller.rows["workers"].status == "undone"


def test_what_is_tried_in_whole_epochs_is_not_tried_again_while_the_plan_is_on() -> None:
    machine = Machine(
        noise=0.02,
        data_share=0.0,
        epoch_start_s=lambda plan: 0.0 if "workers" in plan else 0.1,
        drift=lambda step: 1.0 if step < 1000 else 1.5,
    )

    controller = simulate([by_epoch()], machine, steps=4000, until_settled=False, pace=FAST)

    assert controller.plan == {"workers": None}
    assert sum(action.whole_epoch for action in machine.actions) == 1 + 12


def test_what_waits_for_the_loop_is_tried_once_it_is_ready() -> None:
    machine = Machine(speed={"cache": 1.5, "other": 1.2})
    cache = candidate("cache", waits=lambda: "it waits for two epochs" if machine.step < 1500 else "")

    early = simulate([cache, candidate("other")], machine)
    assert list(early.plan) == ["other"]
    assert (early.rows["cache"].status, early.rows["cache"].why) == ("not tried", "it waits for two epochs")

    machine = Machine(speed={"cache": 1.5, "other": 1.2})
    later = simulate([cache, candidate("other")], machine, until_settled=False, steps=5000)
    assert sorted(later.plan) == ["cache", "other"]
    assert later.closing is not None and later.closing.gain > 1.7
    assert all("cache" not in action.plan for action in machine.actions[:10])


def test_what_becomes_ready_beside_other_processes_is_tried_beside_them() -> None:
    machine = Machine(
        speed={"cache": 2.0, "loader_workers": 1.2},
        data_share=0.9,
        thread=lambda step: CROWDED if step < 400 else QUIET,
    )
    cache = candidate("cache", treats=INPUT, phase="data", waits=lambda: "it waits" if machine.step < 40 else "")
    workers = candidate("loader_workers", treats=INPUT, phase="data", host_dependent=True)
    controller = simulate([cache, workers], machine, pace=FAST)

    assert sorted(controller.plan) == ["cache", "loader_workers"]
    first = next(action for action in machine.actions if "cache" in action.plan)
    assert machine.actions.index(first) < next(n for n, action in enumerate(machine.actions) if action.rest)


def test_what_becomes_ready_during_the_search_is_tried_in_it() -> None:
    machine = Machine(speed={"cache": 1.5, "other": 1.2})
    cache = candidate("cache", waits=lambda: "it waits for two epochs" if machine.step < 60 else "")

    controller = simulate([cache, candidate("other")], machine)
    assert sorted(controller.plan) == ["cache", "other"]


def test_what_waits_begins_with_the_search_whatever_the_budget() -> None:
    machine = Machine(data_share=0.5)
    asked: dict[str, list[int]] = {"data": [], "optimizer": []}

    def waits(phase: str) -> str:
        asked[phase].append(machine.step)
        return "it waits"

    cache = candidate("cache", phase="data", waits=lambda: waits("data"))
    negligible = candidate("negligible", phase="optimizer", waits=lambda: waits("optimizer"))
    simulate([candidate("first"), cache, negligible], machine, budget="0.001%")
    assert asked["data"][0] == machine.actions[0].steps
    assert not asked["optimizer"]


def test_what_turns_out_not_to_apply_while_it_waits_is_said_and_waits_no_more() -> None:
    machine = Machine()
    cache = candidate(
        "cache",
        waits=lambda: "it waits for two epochs",
        refusal=lambda: "its samples differ" if machine.step > 1500 else "",
    )

    controller = simulate([cache], machine, until_settled=False, steps=5000)
    assert (controller.rows["cache"].status, controller.rows["cache"].why) == ("not applicable", "its samples differ")
    assert not any(action.check for action in machine.actions)


def test_a_preparation_that_fails_leaves_the_candidate_out() -> None:
    def fails() -> str:
        raise OSError("no room")

    controller = simulate([candidate("cache", waits=fails)], Machine(), until_settled=False, steps=2000)
    assert controller.rows["cache"].why == "its preparation failed: OSError: no room"
    assert not controller.plan


def test_a_short_wait_for_the_budget_belongs_to_the_search() -> None:
    controller = simulate([candidate("good")], Machine(speed={"good": 1.3}), budget="3%")
    assert controller.closing is not None
    assert controller.plan == {"good": None}


def test_blocks_of_slow_steps_have_fewer() -> None:
    for slow, steps in ((1.0, 5), (5.0, 4), (50.0, 2)):
        machine = Machine(speed={"good": 1.5}, drift=lambda step, slow=slow: slow)  # type: ignore[misc]
        controller = simulate([candidate("good")], machine)
        assert controller.plan == {"good": None}
        counted = {
            action.steps for action in machine.actions if action.plan and not action.settled and not action.anatomy
        }
        assert counted == ({steps} if steps == 2 else {2, steps - 2, steps})


# -- what outlasts its own use -----------------------------------------------------------------------------------------


class Grown(Machine):
    """Once `heap` has been on, it is as if it were on for ever."""

    has_grown = False

    def seconds(self, plan: dict[str, Any]) -> float:
        self.has_grown = self.has_grown or "heap" in plan
        return super().seconds({**plan, "heap": None} if self.has_grown else plan)


def heap() -> Candidate:
    return candidate("heap", is_compared=False, lasting=True)


def test_a_lasting_effect_is_found_by_the_steps_before_and_after() -> None:
    controller = simulate([candidate("none"), heap(), candidate("good")], Grown(speed={"heap": 1.2, "good": 1.5}))
    assert list(controller.plan) == ["heap", "good"]
    assert controller.rows["heap"].gain == pytest.approx(1.2, rel=0.02)
    assert controller.rows["heap"].why.startswith("faster than the steps before it")
    assert controller.closing is not None
    assert controller.closing.gain == pytest.approx(1.8, rel=0.02)
    assert controller.closing.before_ms / controller.closing.after_ms == pytest.approx(1.8, rel=0.02)


def test_alone_it_needs_no_closing_trial_and_nothing_switches_it_off() -> None:
    machine = Grown(speed={"heap": 1.2}, noise=0.02)
    controller = simulate([heap(), candidate("none")], machine, until_settled=False, steps=3000, pace=FAST)
    assert controller.plan == {"heap": None}
    assert controller.closing is not None and controller.closing.gain == pytest.approx(1.2, rel=0.05)
    first = next(n for n, action in enumerate(machine.actions) if action.plan)
    assert all("heap" in action.plan for action in machine.actions[first:])


@pytest.mark.parametrize("gain", [0.9, 1.0])
def test_without_a_gain_it_is_undone_and_not_tried_again(gain: float) -> None:
    machine = Grown(speed={"heap": gain}, noise=0.05)
    controller = simulate([heap()], machine, until_settled=False, steps=3000, pace=FAST)
    assert controller.plan == {}
    assert sum(bool(action.plan) for action in machine.actions) == 1


def test_noise_seldom_keeps_it() -> None:
    kept = sum(bool(simulate([heap()], Grown(noise=0.2, seed=seed)).plan) for seed in range(200))
    assert kept <= 10


def test_what_is_worse_on_top_of_it_leaves_it_on() -> None:
    machine = Grown(speed={"heap": 1.2, "later": 1.5})
    machine.drift = lambda step: 2.0 if machine.actions[-1].plan.get("later", 0) is None and step > 250 else 1.0
    controller = simulate([heap(), candidate("later")], machine, budget="10%", until_settled=False, steps=4000)
    assert "heap" in controller.plan


def test_after_another_batch_shape_its_gain_is_still_known() -> None:
    machine = Grown(speed={"heap": 1.2}, regime=lambda step: "a" if step < 500 else "b")
    controller = simulate([heap()], machine, until_settled=False, steps=3000, pace=FAST)
    assert any("searching again" in event.text for event in controller.events)
    assert controller.plan == {"heap": None}


def test_what_trips_just_after_it_was_kept_is_not_tried_again() -> None:
    machine = Machine(speed={"good": 1.5}, trips_at={"good": 60})
    controller = simulate([candidate("good")], machine, until_settled=False, steps=1000, pace=FAST)
    assert controller.rows["good"].status == "undone"
    assert "its output is not finite" in controller.rows["good"].why
    assert sum("good undone" in event.text for event in controller.events) == 1
    assert not any("good" in action.plan for action in machine.actions[-3:])


def test_settings_that_the_budget_did_not_allow_are_tried_later() -> None:
    machine = Machine(speed={("threads", 2): 0.95, ("threads", 1): 1.5})
    controller = simulate(
        [candidate("threads", settings=(2, 1))], machine, budget="1%", until_settled=False, steps=6000, pace=FAST
    )
    assert controller.plan == {"threads": 1}

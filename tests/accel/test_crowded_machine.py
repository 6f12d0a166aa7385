"""The search beside other processes: what they hide or distort waits, the rest does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.accel.simulation import CROWDED, FAST, INPUT, QUIET, Machine, candidate, simulate


@pytest.fixture
def _quiet_machine() -> None:
    """The controller sees what it is told of the machine."""


def test_the_search_waits_for_a_crowded_machine() -> None:
    machine = Machine(speed={"good": 1.5}, noise=0.02, thread=lambda step: CROWDED if step < 300 else QUIET)

    controller = simulate([candidate("good", depends_on_host=True)], machine, pace=FAST)

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
    workers = candidate("loader_workers", treats=INPUT, phase="data", settings=(1, 2), depends_on_host=True)
    controller = simulate([candidate("other", depends_on_host=True), workers], machine, pace=FAST, say=said.append)

    waited = next(number for number, action in enumerate(machine.actions) if action.rest)
    tried = [name for action in machine.actions[:waited] for name in action.plan]
    assert set(tried) == {"loader_workers"}
    assert controller.plan["loader_workers"] == 2
    assert "other" in controller.plan  # tried once the waiting was over
    assert said[1:] == ["other processes keep the machine busy: what that would hide or distort is tried later"]
    assert controller.plain_ms == pytest.approx(20, rel=0.3)


def test_what_does_not_depend_on_other_processes_is_tried_beside_them() -> None:
    machine = Machine(speed={"good": 1.5, "threads": 1.5}, noise=0.02, thread=lambda step: CROWDED)
    threads = candidate("threads", depends_on_host=True)
    controller = simulate([candidate("good"), threads, candidate("none")], machine, pace=FAST)

    waited = next(number for number, action in enumerate(machine.actions) if action.rest)
    assert {name for action in machine.actions[:waited] for name in action.plan} == {"good", "none"}
    assert machine.actions[waited].plan == {"good": None}
    assert list(controller.plan) == ["good", "threads"]
    assert controller.rows["none"].status == "undone"


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


def test_a_replayed_plan_does_not_wait_for_a_quiet_machine() -> None:
    machine = Machine(speed={"good": 1.5}, thread=lambda step: CROWDED)

    controller = simulate([candidate("good")], machine, replay={"good": None}, pace=FAST)

    assert list(controller.plan) == ["good"]
    assert not controller.events
    assert machine.step < FAST.recheck


def test_what_becomes_ready_beside_other_processes_is_tried_beside_them() -> None:
    machine = Machine(
        speed={"cache": 2.0, "loader_workers": 1.2},
        data_share=0.9,
        thread=lambda step: CROWDED if step < 400 else QUIET,
    )
    cache = candidate("cache", treats=INPUT, phase="data", prepare=lambda: "it waits" if machine.step < 40 else "")
    workers = candidate("loader_workers", treats=INPUT, phase="data", depends_on_host=True)
    controller = simulate([cache, workers], machine, pace=FAST)

    assert sorted(controller.plan) == ["cache", "loader_workers"]
    first = next(action for action in machine.actions if "cache" in action.plan)
    assert machine.actions.index(first) < next(n for n, action in enumerate(machine.actions) if action.rest)

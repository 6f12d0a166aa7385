"""What takes effect when an epoch begins is tried in whole epochs."""

from __future__ import annotations

from typing import Any

from accel.strategies.trial_design import EpochDesign
from tests.accel.simulation import FAST, Machine, candidate, simulate


def by_epoch() -> Any:
    return candidate("workers", phase="data", kind=EpochDesign)


def test_what_takes_effect_when_an_epoch_begins_is_tried_in_whole_epochs_and_last() -> None:
    machine = Machine(
        speed={"fast": 1.5}, noise=0.05, data_share=0.0, epoch_start_s=lambda plan: 0.01 if "workers" in plan else 0.1
    )

    controller = simulate([by_epoch(), candidate("fast")], machine)

    assert controller.plan == {"fast": None, "workers": None}
    plans = [action.plan for action in machine.actions if action.whole_epoch]
    assert all("workers" not in plan for plan in plans[:1])
    last = max(n for n, action in enumerate(machine.actions) if action.whole_epoch)
    trial = [action for action in machine.actions[:last] if "workers" in action.plan]
    assert trial and all(action.whole_epoch for action in trial)
    closing = [action.plan for action in machine.actions[last + 1 :] if action.steps and not action.anatomy]
    assert {"workers": None} in closing  # it stands by its own trial: the closing trial has it in both plans


def test_what_shortens_the_beginning_of_epochs_alone_is_not_tried_a_second_time_in_the_closing_trial() -> None:
    machine = Machine(noise=0.05, data_share=0.0, epoch_start_s=lambda plan: 0.0 if "workers" in plan else 0.1)

    controller = simulate([by_epoch()], machine)

    assert controller.plan == {"workers": None}
    assert controller.closing is not None and controller.closing.verdict == "keep"
    assert sum(action.whole_epoch for action in machine.actions) == 12


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
    assert sum(action.whole_epoch for action in machine.actions) == 12

"""The search beside other processes: what depends on them is tried last."""

from __future__ import annotations

import pytest

from tests.accel.simulation import CROWDED, FAST, INPUT, QUIET, Machine, candidate, simulate


@pytest.fixture
def _quiet_machine() -> None:
    """The controller sees what it is told of the machine."""


@pytest.mark.parametrize("is_crowded", [False, True])
def test_what_depends_on_other_processes_is_tried_after_what_does_not(is_crowded: bool) -> None:
    speed = {"good": 1.5, "threads": 1.5}
    machine = Machine(speed=speed, noise=0.02, thread=lambda step: CROWDED if is_crowded else QUIET)
    threads = candidate("threads", depends_on_host=True)
    controller = simulate([threads, candidate("good"), candidate("none")], machine, pace=FAST)

    assert list(controller.plan) == (["good", "threads"] if is_crowded else ["threads", "good"])
    assert controller.rows["none"].status == "undone"
    assert not any(action.rest for action in machine.actions[:-1])  # nothing waits


def test_a_large_gain_is_found_beside_other_processes() -> None:
    machine = Machine(speed={("workers", 2): 20.0, "other": 1.5}, noise=0.3, data_share=0.95, thread=lambda _: CROWDED)
    workers = candidate("workers", treats=INPUT, phase="data", settings=(1, 2), depends_on_host=True)
    said: list[str] = []
    controller = simulate([candidate("other"), workers], machine, pace=FAST, say=said.append)

    assert controller.plan["workers"] == 2
    assert said[0].endswith("trials begin now, beside other processes that keep the machine busy")

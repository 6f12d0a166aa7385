"""Ctrl-C at any line of the recorder's, with a loop that goes on after it: the steps of that loop are recorded."""

from __future__ import annotations

import contextlib

import pytest

from accel.profiler.loop.clock import StepClock
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from tests.accel.loops import PlayedClock
from tests.interruptions import Interrupter
from tests.profiler.test_recorder import parts, train


def record(at: int | None, *, deferred: bool) -> tuple[Interrupter, Recorder, list[Measurement]]:
    """Record two epochs, interrupted once, and then two epochs more."""
    interrupter, seen = Interrupter("profiler/loop", at), []
    recorder = Recorder(StepClock(PlayedClock()))
    recorder.delivery.on_step = seen.append
    recorder.delivery.deferred = deferred
    model, optimizer, loader = parts()
    recorder.start()
    try:
        with contextlib.suppress(KeyboardInterrupt), interrupter():
            for _ in range(2):
                train(model, optimizer, loader)
        for _ in range(2):
            train(model, optimizer, loader)
        recorder.delivery.catch_up()
    finally:
        recorder.stop()
    return interrupter, recorder, seen


@pytest.mark.parametrize("places", [6, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("deferred", [False, True])
def test_steps_after_ctrl_c_are_recorded(deferred: bool, places: int) -> None:
    """At so many lines, spread evenly over all that two epochs run."""
    lines = min(record(None, deferred=deferred)[0].places for _ in range(2))  # the first may look at others' modules

    for at in range(0, lines * 9 // 10, lines // places):  # how many lines run differs a little from time to time
        interrupter, recorder, seen = record(at, deferred=deferred)
        assert not recorder.delivery.failed, interrupter.place
        assert interrupter.place, at
        assert len(seen) >= 15, interrupter.place
        for measured in seen[-15:]:
            assert sum(measured.phases.values()) == pytest.approx(measured.seconds), interrupter.place
            assert all(seconds >= 0 for seconds in measured.phases.values()), interrupter.place

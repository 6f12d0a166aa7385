"""A recorder at work, for the tests of what it records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel.profiler.loop.clock import StepClock
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from tests.accel.loops import PlayedClock


@pytest.fixture
def clock() -> PlayedClock:
    """Return what `recorder` reads: what sleeps by it takes time, and what the machine does takes none."""
    return PlayedClock()


@pytest.fixture
def recorder(clock: PlayedClock) -> Iterator[Recorder]:
    made = Recorder(StepClock(clock))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def seen(recorder: Recorder) -> list[Measurement]:
    steps: list[Measurement] = []
    recorder.delivery.on_step = steps.append
    return steps

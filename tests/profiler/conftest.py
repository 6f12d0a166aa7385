"""A recorder at work, for the tests of what it records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel.profiler.clocks.recorder import Recorder
from accel.profiler.phases import Measurement


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def seen(recorder: Recorder) -> list[Measurement]:
    steps: list[Measurement] = []
    recorder.on_step = steps.append
    return steps

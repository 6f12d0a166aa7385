"""The collector's time is counted, and a signal that arrives within is not lost."""

from __future__ import annotations

import _thread
import functools
import gc
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from accel.profiler.loop.patches import Collector


class Arriving(int):
    """A signal that arrives, without Python code, where one of its attributes is read."""

    start: Any = property(_thread.interrupt_main)
    stop: Any = property(_thread.interrupt_main)


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    made.install()
    yield made
    made.remove()


def test_the_time_of_each_collection_counts() -> None:
    began = time.perf_counter()
    collector = Collector()
    collector.install()
    ring: list[Any] = []
    ring.append(ring)

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.05)

    ring.append(Slow())
    del ring
    gc.collect()
    assert collector.seconds >= 0.05
    assert collector.seconds <= time.perf_counter() - began  # young collections between the two count too
    seen = collector.seconds
    collector.remove()
    gc.collect()
    assert collector.seconds == seen


def test_a_collection_that_is_not_over_does_not_count_yet(collector: Collector) -> None:
    gc.collect()
    before, within = collector.seconds, []

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            within.append(collector.seconds)

    gc.callbacks.append(look)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(look)
    assert within and within[0] >= before
    assert before <= collector.seconds


@pytest.mark.parametrize("phase", ["start", "stop"])
def test_what_a_signal_s_handler_raises_within_a_collection_comes_out(
    collector: Collector, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Stopped

    monkeypatch.delattr(Arriving, "stop" if phase == "start" else "start")
    arrives = functools.partial(getattr, Arriving(signal.SIGTERM))
    found = signal.signal(signal.SIGTERM, handler)
    others = gc.callbacks[:]  # one of hypothesis' has a Python frame
    gc.callbacks[:] = [arrives]
    collector.install()
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    try:
        with pytest.raises(Stopped):
            gc.collect()
    finally:
        gc.callbacks[:] = others
        signal.signal(signal.SIGTERM, found)
    assert not lost

"""Beside processes that hold cores a run is measured with as many threads as are free, and gets its own back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel.profiler.gather import Exchange
from accel.profiler.session import ProfileSession
from accel.profiler.system import thread_limit
from accel.profiler.system.thread_limit import ThreadLimit
from accel.profiler.trace import roofline
from tests.sampling import examples


class Host:
    """Torch's threads, the machine's cores and a clock, played; others hold cores as listed, look by look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: Sequence[float | None], *, cores: int, threads: int):
        self.threads, self.now, self.looks = threads, 0.0, 0
        self._held: Iterator[float | None] = iter(held)
        monkeypatch.setattr(thread_limit, "usable_cores", lambda: cores)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(thread_limit, "set_number", lambda count: setattr(self, "threads", count))
        meter: Any = SimpleNamespace(cores=self._look)
        self.limit = ThreadLimit(meter, clock=lambda: self.now)

    def _look(self) -> float | None:
        self.looks += 1
        return next(self._held)

    def begin(self) -> int:
        """Begin, and return after how many steps it was clear."""
        steps = 0
        while not self.limit.begin():
            self.now += 0.1
            steps += 1
        return steps


@pytest.mark.parametrize(
    ("held", "cores", "threads", "measured", "steps"),
    [
        ([0.02], 2, 2, 2, 0),  # quiet: no step is lost
        ([0.98, 0.97], 2, 2, 1, 1),
        ([0.4, 0.95], 2, 2, 1, 1),  # they came while the script was starting
        ([0.98, 0.1], 2, 2, 2, 1),  # and these had gone by the first step
        ([0.98, None, None, 0.99], 2, 2, 1, 3),  # it takes some steps to tell
        ([], 2, 1, 1, 0),  # one thread waits for none, and nobody looks
        ([3.2, 3.2], 8, 8, 4, 1),
        ([3.2, 3.2], 8, 2, 2, 1),
        ([2.02, 2.02], 4, 4, 2, 1),  # of two that are busy, and no third
        ([0.67, 0.67], 2, 2, 1, 1),  # of a busy one that two spinning threads leave so much
        ([8.0, 8.0], 8, 8, 1, 1),  # none is free
    ],
)
def test_threads_are_no_more_than_the_free_cores(
    monkeypatch: pytest.MonkeyPatch, held: list[float | None], cores: int, threads: int, measured: int, steps: int
) -> None:
    host = Host(monkeypatch, held, cores=cores, threads=threads)
    assert host.begin() == steps
    assert host.threads == measured
    assert host.limit.own == (threads if measured < threads else None)
    assert host.limit.threads == (measured if measured < threads else None)
    host.limit.restore()
    assert host.threads == threads


def test_a_second_look_is_given_time_however_late_the_first_was(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, [0.98, None, 0.99], cores=2, threads=2)
    host.now = 5.0
    assert host.begin() == 2
    assert host.threads == 1


def test_a_system_that_does_not_tell_costs_no_more_than_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, [None] * 20, cores=2, threads=2)
    assert host.begin() == 3
    assert (host.threads, host.limit.own) == (2, None)


@pytest.mark.parametrize("threads", [2, 16])
def test_a_number_of_threads_that_the_loop_sets_itself_stays(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    host = Host(monkeypatch, [4.0, 4.0], cores=8, threads=8)
    host.begin()
    assert host.threads == 4
    host.threads = threads
    host.limit.restore()
    assert host.threads == threads


@pytest.mark.sample(100)
@settings(max_examples=examples(100), deadline=None)
@given(
    held=st.lists(st.none() | st.floats(0, 64), min_size=30, max_size=30),
    cores=st.integers(1, 64),
    threads=st.integers(1, 64),
    gaps=st.lists(st.floats(0.01, 5), min_size=10, max_size=10),
)
def test_threads_are_never_more_than_the_loops_and_always_restored(
    held: list[float | None], cores: int, threads: int, gaps: list[float]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        host = Host(monkeypatch, held, cores=cores, threads=threads)
        for gap in gaps:
            host.now += gap
            if host.limit.begin():
                break
        assert 1 <= host.threads <= threads
        host.limit.restore()
        assert host.threads == threads


def training() -> Iterator[int]:
    """Train, and yield the threads after each step."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        yield torch.get_num_threads()


@pytest.mark.parametrize(("held", "measured"), [(0.99, 1), (0.0, 2), (None, 2)])
def test_a_profiled_run_is_measured_so(monkeypatch: pytest.MonkeyPatch, held: float | None, measured: int) -> None:
    own = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(thread_limit, "usable_cores", lambda: 2)
        monkeypatch.setattr(thread_limit, "CrowdMeter", lambda: SimpleNamespace(cores=lambda: held))
        session = ProfileSession(confirm=True, trace_file=None, exchange=Exchange())
        session.start()
        threads = list(itertools.islice(training(), 20))
        session.stop()
        rated: list[int | None] = []
        monkeypatch.setattr(roofline, "measure", lambda device, dtypes, threads=None: rated.append(threads))
        evidence = session.finish()
        assert rated == [1 if measured == 1 else None]  # one format with one thread, another with two: no ratio
        assert (threads[0], threads[-1], torch.get_num_threads()) == (2, measured, 2)
        assert (evidence.threads, evidence.loop_threads) == (measured, 2 if measured == 1 else None)
        assert 0 < len(evidence.steps) <= threads.count(measured)  # none of those with two threads, if it is one
    finally:
        torch.set_num_threads(own)

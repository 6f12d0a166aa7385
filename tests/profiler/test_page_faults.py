"""Page faults are counted, and what one costs is measured, where the system keeps a count."""

from __future__ import annotations

import mmap

import pytest

from accel.profiler import page_faults
from accel.profiler.loop.clock import StepClock

pytestmark = pytest.mark.skipif(page_faults.cost_s() is None, reason="the system counts no page faults")


def touch(pages: int) -> None:
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory[:: mmap.PAGESIZE] = bytes(pages)


def test_a_fault_costs_between_a_twentieth_of_a_microsecond_and_a_millisecond() -> None:
    cost_s = page_faults.cost_s()
    assert cost_s is not None
    assert 5e-8 < cost_s < 1e-3


def test_a_step_has_the_faults_since_it_began() -> None:
    clock = StepClock()
    touch(4096)  # not the step's
    clock.restart()
    clock.request()
    touch(1024)
    clock.updated()
    first, second = clock.close(0).page_faults, clock.close(1).page_faults
    assert first is not None and second is not None
    assert 0 < first < 3000  # huge pages have fewer
    assert second < first


def test_where_the_system_counts_none_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_faults, "getrusage", None)
    assert page_faults.count() is None
    page_faults.cost_s.cache_clear()
    try:
        assert page_faults.cost_s() is None
        clock = StepClock()
        clock.restart()
        assert clock.close(0).page_faults is None
    finally:
        page_faults.cost_s.cache_clear()


def test_without_a_count_of_the_system_nothing_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_faults, "count", lambda: 0)
    page_faults.cost_s.cache_clear()
    try:
        assert page_faults.cost_s() is None
    finally:
        page_faults.cost_s.cache_clear()

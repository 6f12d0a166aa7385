"""When to save: by the interval, at little cost, on request, on SIGTERM; all ranks at the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.elastic.save_policy import SavePolicy
from accel.errors import InvalidArgument
from tests.hooked import hooked
from tests.sampling import examples


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_interval(clock: Clock) -> None:
    policy = hooked(SavePolicy, clock=clock)(60, sigterm=False)
    saved = []
    for second in range(200):
        clock.now += 1
        if policy.due():
            with policy.saving():
                saved.append(second + 1)
    assert saved == [60, 120, 180]


def test_saving_takes_no_more_than_its_share(clock: Clock) -> None:
    policy = hooked(SavePolicy, clock=clock)(10, share=0.02, sigterm=False)
    begin, saving, saves = clock.now, 0.0, 0
    for _ in range(5000):
        clock.now += 1
        if policy.due():
            with policy.saving():
                clock.now += 3
                saving += 3
                saves += 1
    # 3 s each: one in 150 s of training, but for the first, which is not known beforehand.
    assert saves == 1 + (5000 - 10) // 150
    assert (saving - 3) / (clock.now - begin) < 0.02


def test_a_save_that_fails_is_tried_again_after_the_interval(clock: Clock) -> None:
    policy = hooked(SavePolicy, clock=clock)(10, sigterm=False)
    clock.now += 11
    assert policy.due() and policy.due()
    with pytest.raises(OSError, match="full"), policy.saving():
        raise OSError("full")
    assert not policy.due()
    clock.now += 11
    assert policy.due()


def test_on_demand(clock: Clock) -> None:
    policy = hooked(SavePolicy, clock=clock)(1e6, sigterm=False)
    assert not policy.due()
    policy.request()
    assert policy.due()
    with policy.saving():
        clock.now += 100
    assert not policy.due()
    policy.request()
    assert policy.due()  # whatever the share says


def test_sigterm_saves_once_and_stops(clock: Clock) -> None:
    with hooked(SavePolicy, clock=clock)(1e6) as policy:
        assert not policy.due()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not policy.stop  # only between two steps
        assert policy.due() and policy.stop
        with policy.saving():
            pass
        assert not policy.due() and policy.stop


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"interval_s": 0}, "interval_s must be more than 0 and at most 1e"),
        ({"interval_s": float("nan")}, "interval_s must be more than 0"),
        ({"share": 0}, "share must be more than 0 and at most 1, got 0"),
        ({"share": 1.5}, "share must be more than 0 and at most 1, got 1.5"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], text: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InvalidArgument, match=text):
        SavePolicy(**options)
    assert signal.getsignal(signal.SIGTERM) is before


# Several ranks: threads that meet at a barrier


class Meeting:
    """Gives each thread what all of them passed, by rank."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size
        self.count = 0

    def of(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait(30)
            values = list(self._values)
            self.count += rank == 0
            self._barrier.wait(30)
            return values

        return gather


def run_ranks(size: int, steps: int, step_s: list[float], events: dict[tuple[int, int], str]) -> tuple[Any, Meeting]:
    """Train `size` ranks with clocks of their own; return at which steps each saved and stopped."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size

    def train(rank: int) -> None:
        clock = Clock()
        clock.now += rank * 1000  # clocks of machines agree about nothing
        policy = hooked(SavePolicy, clock=clock)(20, sigterm=False, gather=meeting.of(rank))
        saved, stopped = [], None
        for step in range(steps):
            clock.now += step_s[rank]
            event = events.get((rank, step))
            if event == "ask":
                policy.request()
            elif event == "term":
                policy._termination = type("Flag", (), {"requested": True, "close": lambda self: None})()
            if policy.due():
                with policy.saving():
                    clock.now += 0.1 * (rank + 1)
                    saved.append(step)
            if policy.stop:
                stopped = step
                break
        results[rank] = saved, stopped

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results, meeting


@settings(max_examples=examples(60))
@given(
    st.integers(1, 4),
    st.lists(st.floats(0.001, 5), min_size=4, max_size=4),
    st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 150)), st.sampled_from(["ask", "term"]), max_size=3),
)
def test_all_ranks_save_and_stop_at_the_same_step(
    size: int, step_s: list[float], events: dict[tuple[int, int], str]
) -> None:
    results, _ = run_ranks(size, 300, step_s, events)
    assert all(result == results[0] for result in results)
    saved, stopped = results[0]
    happened = {(step, event) for (rank, step), event in events.items() if rank < size}
    if happened and step_s[0] > 0.01:  # else 100 steps and more may pass until the next meeting
        assert saved and saved[-1] >= min(step for step, _ in happened)
    if any(event == "term" for _, event in happened) and step_s[0] > 0.01:
        assert stopped is not None and saved[-1] == stopped


def test_ranks_meet_about_once_a_second() -> None:
    results, meeting = run_ranks(2, 2000, [0.01, 0.01], {(1, 1000): "ask"})
    assert 20 <= meeting.count <= 40  # 20 s, and some more often at first
    assert len(results[0][0]) in (1, 2)
    asked = next(step for step in results[0][0] if step >= 1000)
    assert asked - 1000 <= 110

"""When to save: by the interval, at little cost, on request, on SIGTERM; all ranks at the same step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.elastic.save_policy import SavePolicy, Termination
from accel.errors import InvalidArgument
from tests.accel.sigterm import send
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


# SIGTERM as a flag: noted, passed on, and given back


def test_a_signal_is_noted_and_nothing_else_happens() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with Termination() as termination:
        assert termination.installed
        assert not termination.requested
        send()
        assert termination.requested
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_the_setting_before_is_put_back(before: Any) -> None:
    signal.signal(signal.SIGTERM, before)
    Termination().close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_handler_before_is_called_too() -> None:
    calls: list[int] = []

    def theirs(number: int, _: Any) -> None:
        calls.append(number)

    signal.signal(signal.SIGTERM, theirs)
    with Termination() as outer, Termination() as inner:
        send()
        assert outer.requested and inner.requested
    send()
    assert calls == [signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is theirs


def test_a_handler_that_was_set_later_stays() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    termination = Termination()
    calls: list[int] = []
    ours: Any = signal.getsignal(signal.SIGTERM)

    def later(number: int, frame: Any) -> None:
        calls.append(number)
        ours(number, frame)

    signal.signal(signal.SIGTERM, later)
    termination.close()
    assert signal.getsignal(signal.SIGTERM) is later
    send()  # was ignored before: it still is
    assert calls == [signal.SIGTERM]


def test_closed_under_a_later_handler_the_default_is_not_lost() -> None:
    pid = os.fork()
    if pid == 0:  # the child: ends by the signal, or with 3
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        termination = Termination()
        ours: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
        termination.close()
        send()
        os._exit(3)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


def sleep(running: Any) -> None:
    running.set()
    for _ in range(6000):  # a signal that comes just before a single long sleep would wait for its end
        time.sleep(0.05)


def test_forked_processes_can_be_terminated() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with Termination() as termination:
        context = multiprocessing.get_context("fork")
        running = context.Event()
        process = context.Process(target=sleep, args=(running,))
        process.start()
        assert running.wait(60)  # Python drops a signal that comes before the fork is done
        process.terminate()
        process.join(60)
        assert process.exitcode == -signal.SIGTERM
        assert not termination.requested


def test_outside_of_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    made: list[Termination] = []

    def run() -> None:
        made.append(Termination())
        made[0].close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not made[0].installed
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("before", "is_survived"), [(signal.SIG_IGN, True), (signal.SIG_DFL, False)])
def test_whether_the_process_goes_on_is_for_the_handler_before(before: Any, is_survived: bool) -> None:
    signal.signal(signal.SIGTERM, before)
    with Termination() as outer, Termination() as inner:
        assert (outer.is_survived, inner.is_survived) == (is_survived, is_survived)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    with Termination() as outer, Termination() as inner:
        assert outer.is_survived and inner.is_survived


def test_one_that_was_closed_below_another_ends_nothing() -> None:
    """The signal reached the closed one, which ended the process before the other could act on it."""
    pid = os.fork()
    if pid == 0:  # the child: exits with 0, or with 3, or ends by the signal
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        lower = Termination()
        with Termination() as upper:
            lower.close()
            send()
            noted = upper.requested and not upper.is_survived
        os._exit(0 if noted and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else 3)
    _, status = os.waitpid(pid, 0)
    assert status == 0

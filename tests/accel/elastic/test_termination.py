"""SIGTERM as a flag: noted, passed on, and given back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from accel.elastic.saving.termination import Termination
from tests.accel.sigterm import send


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    time.sleep(300)


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


def test_closing_twice_does_no_harm() -> None:
    termination = Termination()
    termination.close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    termination.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


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

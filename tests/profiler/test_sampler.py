"""Which line the loop is in, and which lines ask for batches."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel.profiler.host import ThreadTime
from accel.profiler.loop.clock import StepClock
from accel.profiler.system.instruments import Sampler, ThreadClocks
from accel.profiler.system.loop_source import batch_lines, is_users, users_frames

LOOPS = """\
def train(batches, optimizers):
    for epoch in range(3):
        for (
            x
        ) in batches:
            for optimizer in optimizers:
                optimizer.step()

def endless(source, optimizer):
    while True:
        x = next(source)
        optimizer.step()
        if x:
            break

def elsewhere():
    for y in range(3):
        pass
"""


def test_lines_that_ask_for_batches(tmp_path: Path) -> None:
    script = tmp_path / "loops.py"
    script.write_text(LOOPS)
    file = str(script)

    assert batch_lines([(file, 7)]) == {(file, line) for line in (2, 3, 4, 5, 6)}
    assert batch_lines([(file, 12)]) == {(file, 11)}
    assert batch_lines([(file, 18)]) == {(file, 17)}
    assert batch_lines([(str(tmp_path / "gone.py"), 1)]) == set()


def test_a_file_that_does_not_parse_has_no_loops(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("for x in (:\n")

    assert batch_lines([(str(script), 1)]) == set()


def test_what_is_the_user_s() -> None:
    assert is_users(__file__)
    assert not is_users(threading.__file__)
    assert not is_users(pytest.__file__)
    assert not is_users("<frozen runpy>")
    assert not is_users(sys.modules["accel.profiler.system.instruments"].__file__ or "")


def test_frames_are_the_innermost_first() -> None:
    def inner() -> list[tuple[str, int]]:
        return users_frames(sys._getframe())

    frames = inner()
    assert [file for file, _ in frames[:2]] == [__file__, __file__]
    assert frames[0][1] < frames[1][1]


class PlayedClocks:
    """Clocks of a thread, in s, that are set by hand."""

    def __init__(self) -> None:
        self.now = self.ran = self.wait = 0.0

    def read(self) -> ThreadTime:
        return ThreadTime(at=self.now, run=self.ran, wait=self.wait)

    def clocks(self) -> ThreadClocks:
        meter: Any = self
        return ThreadClocks(lambda: self.now, lambda: self.ran, meter)

    def turn(self, samples: Iterator[None], seconds: float, ran: float = 0.0, wait: float = 0.0) -> None:
        """Let some time pass, and take a sample."""
        self.now, self.ran, self.wait = self.now + seconds, self.ran + ran, self.wait + wait
        next(samples)


def sampling() -> tuple[StepClock, PlayedClocks, Sampler, Iterator[None]]:
    """Return a step clock, a thread's clocks, what samples by both, and its samples, of which the first is taken."""
    clock, played = StepClock(), PlayedClocks()
    sampler = Sampler(clock, threading.get_ident(), threading.get_native_id(), clocks=played.clocks())
    samples = sampler.samples()
    next(samples)
    return clock, played, sampler, samples


def test_time_is_told_by_phase_and_line_and_asleep_from_running() -> None:
    clock, played, sampler, samples = sampling()
    clock.enter("outside")
    for _ in range(80):
        played.turn(samples, 0.01)  # asleep
    for _ in range(20):
        played.turn(samples, 0.01, ran=0.0099)  # the line below, which also computes a little
    clock.enter("forward")
    for _ in range(60):
        played.turn(samples, 0.01, ran=0.006, wait=0.004)
    sampler.count(until=played.now)
    outside = [line for line in sampler.lines() if line.phase == "outside"]

    assert [line.source for line in sampler.lines()] == ["next(samples)"] * 2  # the innermost line that is the user's
    assert (outside[0].seconds, outside[0].share) == (pytest.approx(1.0), 1.0)
    assert outside[0].blocked == pytest.approx(0.802)
    sleeping, running = sampler.thread("outside"), sampler.thread("forward")
    assert sleeping is not None and sleeping.run == pytest.approx(0.198)
    assert running is not None and running.run == pytest.approx(0.6)
    # Waiting is known of all phases together, up to the last 16 samples: 0.24 s of 1.6 s.
    assert sleeping.wait == running.wait == pytest.approx(0.15, abs=0.01)
    assert sampler.thread("data") is None


def test_a_pause_leaves_samples_out() -> None:
    _, played, sampler, samples = sampling()
    sampler.pause(True)
    for _ in range(20):
        played.turn(samples, 0.01, wait=0.01)
    sampler.count(until=played.now)
    assert sampler.lines() == []
    sampler.pause(False)
    for _ in range(20):
        played.turn(samples, 0.01, ran=0.01)
    sampler.count(until=played.now)
    assert [line.seconds for line in sampler.lines()] == [pytest.approx(0.2)]
    share = sampler.thread()
    assert share is not None and (share.run, share.wait) == (pytest.approx(1.0), 0.0)


def test_what_follows_the_last_step_does_not_count() -> None:
    _, played, sampler, samples = sampling()
    for _ in range(32):
        played.turn(samples, 0.01, ran=0.01)
    boundary = played.now
    sampler.count(until=boundary)
    for _ in range(3):
        played.turn(samples, 0.01, ran=0.01)
    boundary = played.now  # of the last step, which nobody counted at once
    for _ in range(80):
        played.turn(samples, 0.01, wait=0.01)  # the script does something else
    sampler.count(until=boundary)

    assert [line.seconds for line in sampler.lines()] == [pytest.approx(0.35)]
    share = sampler.thread()
    assert share is not None and (share.run, share.wait) == (pytest.approx(1.0), 0.0)


def test_a_thread_of_its_own_takes_the_samples_until_it_is_stopped() -> None:
    clock = StepClock()
    sampler = Sampler(clock, threading.get_ident(), threading.get_native_id(), interval_s=0.001)
    switching = sys.getswitchinterval()
    sampler.start()
    until = time.monotonic() + 60.0
    while not sampler.lines() and time.monotonic() < until:
        time.sleep(0.001)
        sampler.count(until=time.perf_counter())
    sampler.stop()
    assert sampler.lines()
    assert sys.getswitchinterval() == switching


@pytest.mark.slow
def test_the_system_s_clocks_tell_asleep_from_running() -> None:
    clock = StepClock()
    sampler = Sampler(clock, threading.get_ident(), threading.get_native_id(), interval_s=0.002)
    sampler.start()
    clock.enter("outside")
    time.sleep(0.3)
    clock.enter("forward")
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        pass
    sampler.stop()
    sampler.count(until=time.perf_counter())
    outside = [line for line in sampler.lines() if line.phase == "outside"]
    assert outside[0].source == "time.sleep(0.3)"
    sleeping, running = sampler.thread("outside"), sampler.thread("forward")
    # Others may hold the core when it wakes up.
    assert sleeping is not None and sleeping.blocked > 0.9 * (1 - sleeping.wait) > 0.2
    assert running is not None and running.blocked < 0.3

"""Which line the loop is in, and which lines ask for batches."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from accel.profiler.phases import StepClock
from accel.profiler.system.loop_source import batch_lines, is_users, users_frames
from accel.profiler.system.sampler import Sampler

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
    assert not is_users(sys.modules["accel.profiler.system.sampler"].__file__ or "")


def test_frames_are_the_innermost_first() -> None:
    def inner() -> list[tuple[str, int]]:
        return users_frames(sys._getframe())

    frames = inner()
    assert [file for file, _ in frames[:2]] == [__file__, __file__]
    assert frames[0][1] < frames[1][1]


def sampled(work: int) -> Sampler:
    clock = StepClock()
    sampler = Sampler(clock, threading.get_ident(), threading.get_native_id(), interval_s=0.002)
    sampler.start()
    clock.enter("outside")
    time.sleep(0.3)
    clock.enter("forward")
    until = time.thread_time() + 0.1 * work
    while time.thread_time() < until:
        pass
    sampler.stop()
    return sampler


def test_time_is_told_by_phase_and_line_and_asleep_from_running() -> None:
    sampler = sampled(work=3)
    outside = [line for line in sampler.lines() if line.phase == "outside"]

    assert outside[0].source == "time.sleep(0.3)"
    assert outside[0].share > 0.9
    assert outside[0].blocked > 0.9
    sleeping, running = sampler.thread("outside"), sampler.thread("forward")
    # Others may hold the core when it wakes up.
    assert sleeping is not None and sleeping.blocked > 0.9 * (1 - sleeping.wait) > 0.2
    assert running is not None and running.blocked < 0.2
    assert sampler.thread("data") is None


def test_a_pause_leaves_samples_out() -> None:
    clock = StepClock()
    sampler = Sampler(clock, threading.get_ident(), threading.get_native_id(), interval_s=0.002)
    sampler.pause(True)
    sampler.start()
    time.sleep(0.05)
    sampler.stop()

    assert sampler.lines() == []

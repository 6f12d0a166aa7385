"""Processes that take turns: one runs at each moment, and each has only its own time."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TypedDict

import pytest

from benchmarks.turn_clock import TurnClock
from benchmarks.turns import Command, take_turns

_STEPS = """
import json, time
from benchmarks.turn_clock import TurnClock, stop_this_group

clock = TurnClock(0.1, stop_this_group)
clock.install()
began, steps = time.perf_counter(), []
while time.perf_counter() - began < 0.5:
    start = clock._real["time"]()
    time.sleep(0.02)
    steps.append((start, clock._real["time"]()))
    clock()
print(json.dumps({"steps": steps, "own_s": time.perf_counter() - began, "stopped_s": clock.stopped_s}))
"""


class Outcome(TypedDict):
    steps: list[tuple[float, float]]
    own_s: float
    stopped_s: float


def test_one_runs_at_each_moment_and_each_has_its_own_time(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(_STEPS)
    done = take_turns([Command([str(script)], {"PYTHONPATH": "."})] * 3)
    assert [each.returncode for each in done] == [0] * 3, done[0].stderr
    outcomes: list[Outcome] = [json.loads(each.stdout) for each in done]

    steps = sorted((*step, number) for number, each in enumerate(outcomes) for step in each["steps"])
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(steps))
    assert sum(one[2] != other[2] for one, other in itertools.pairwise(steps)) >= 6  # not one after the other
    for each in outcomes[:2]:
        assert each["stopped_s"] > 0.3
        assert each["own_s"] < 0.5 + each["stopped_s"] / 2


def test_a_failure_is_told_and_the_others_go_on() -> None:
    failed, ended = take_turns([Command(["-c", "import os; os.abort()"], {}), Command(["-c", "print(7)"], {})])
    assert (failed.returncode, ended.returncode, ended.stdout) == (-signal.SIGABRT, 0, "7\n")


@pytest.mark.parametrize("is_used", [True, False])
def test_a_turn_ends_when_the_device_has_done_what_it_was_asked_for(
    is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    cuda = SimpleNamespace(is_initialized=lambda: is_used, synchronize=lambda: log.append("drained"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    clock = TurnClock(0.0, lambda: log.append("stopped"))
    clock._real["perf_counter"] = time.perf_counter
    clock()
    assert log == ["drained", "stopped"][not is_used :]
    TurnClock(60.0, lambda: log.append("too early"))._began = time.perf_counter()
    assert len(log) == 1 + is_used

"""A process killed, or a machine without power, at any moment: the checkpoints before it are whole."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.elastic.checkpoint import Checkpoints
from tests.accel.elastic.crashing_disk import CountingDisk, CrashingDisk, Killed
from tests.hooked import hooked
from tests.sampling import examples


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "weights": [torch.full((40,), float(step)), torch.full((3,), step)]}


def prepared(folder: Path) -> None:
    checkpoints = hooked(Checkpoints, disk=CountingDisk())(folder, keep=2)
    for step in (1, 2):
        checkpoints.save(state_of(step))


def check(folder: Path, allowed: set[int]) -> None:
    checkpoints = hooked(Checkpoints, disk=CountingDisk())(folder, keep=2)
    state = checkpoints.load_latest()
    assert state is not None
    assert state["step"] in allowed
    assert all(bool((tensor == state["step"]).all()) for tensor in state["weights"])
    assert checkpoints.refused == []  # nothing half-written is even seen
    checkpoints.save(state_of(9))
    names = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
    assert len(names) == 2 and names[-1].endswith("-step-9"), names  # what was left over is gone


def operations(folder: Path) -> int:
    prepared(folder)
    disk = CountingDisk()
    hooked(Checkpoints, disk=disk)(folder, keep=2).save(state_of(3))
    assert disk.names[-1] == "remove"  # of the oldest
    return disk.count


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
def test_the_end_at_any_operation(tmp_path: Path, power: bool) -> None:
    count = operations(tmp_path / "count")
    assert count > 20
    draw = random.Random(3)
    for at in range(count):
        folder = tmp_path / str(at)
        prepared(folder)
        disk = CrashingDisk(at)
        with pytest.raises(Killed):
            hooked(Checkpoints, disk=disk)(folder, keep=2).save(state_of(3))
        if power:
            disk.lose_power(draw.random)
        check(folder, {2, 3})


@settings(max_examples=examples(60))
@given(st.data())
def test_several_ends_in_a_row(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("ends")
    prepared(folder)
    whole = 2
    for step in range(3, 3 + data.draw(st.integers(1, 4))):
        disk = CrashingDisk(data.draw(st.integers(0, 40)))
        try:
            hooked(Checkpoints, disk=disk)(folder, keep=2).save(state_of(step))
            whole = step
        except Killed:
            if data.draw(st.booleans()):
                disk.lose_power(lambda: data.draw(st.floats(0, 1)))
            state = hooked(Checkpoints, disk=CountingDisk())(folder).load_latest()
            assert state is not None and state["step"] in (whole, step)
            whole = state["step"]
    check(folder, {whole})


def test_a_save_without_flushing_would_be_found_out(tmp_path: Path) -> None:
    """The tests above can fail: on a disk that flushes nothing before it renames, the newest one is lost or damaged."""

    class Careless(CrashingDisk):
        def sync(self, file: Any) -> None:
            self.before("sync")
            file.flush()

    prepared(tmp_path)
    disk = Careless(operations(tmp_path / "count") - 1)
    with pytest.raises(Killed):
        hooked(Checkpoints, disk=disk)(tmp_path, keep=2).save(state_of(3))
    disk.lose_power(lambda: 0.5)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.load_latest()
    assert len(checkpoints.refused) == 1


def save_for_ever(folder: Path, ready: Any) -> None:
    checkpoints = Checkpoints(folder, keep=2)
    step = 0 if (state := checkpoints.load_latest()) is None else state["step"]
    while True:
        step += 1
        checkpoints.save({"step": step, "weights": [torch.full((20_000,), float(step)), torch.full((3,), step)]})
        ready.set()


def kill_at_random(folder: Path, times: int) -> None:
    context = multiprocessing.get_context("fork")
    draw = random.Random(5)
    last = 0
    for _ in range(times):
        ready = context.Event()
        process = context.Process(target=save_for_ever, args=(folder, ready))
        process.start()
        assert ready.wait(60)
        time.sleep(draw.uniform(0, 0.02))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        checkpoints = Checkpoints(folder, keep=2)
        state = checkpoints.load_latest()
        assert checkpoints.refused == []
        assert state is not None
        assert state["step"] > last
        assert all(bool((tensor == state["step"]).all()) for tensor in state["weights"])
        last = state["step"]
    assert len([path for path in folder.iterdir() if not path.name.startswith(".")]) <= 3


def test_processes_that_are_killed(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 6)


@pytest.mark.slow
def test_many_processes_that_are_killed(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 300)

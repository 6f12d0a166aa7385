"""Forks around worker processes: a lock held at one, the loop's process gone, a copy of the loop in a child."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.dataio.engine import processes, worker, worker_handle
from accel.dataio.engine.engine import BatchJob, WorkerDied
from accel.dataio.loader import ContinuousLoader
from tests.conftest import Once
from tests.dataio.engines import Squares, assert_made, engine_of, gone, in_child, loader_of, pids, ready, run


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are stuck, or whose loop is gone, end sooner."""
    monkeypatch.setattr(worker_handle, "_ENDS_S", 0.1)
    monkeypatch.setattr(worker, "_GRACE_S", 0.2)


# Locks held at a fork

LOCK = threading.Lock()


class Locks(Squares):
    lock = LOCK

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return super().__getitem__(index)


@pytest.fixture
def held_lock() -> Iterator[threading.Event]:
    """A thread that holds the dataset's lock while the workers are forked, until the event is set."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            taken.set()
            done.wait(100)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    yield done
    done.set()
    thread.join()


@pytest.mark.usefixtures("held_lock")
def test_a_lock_that_was_held_at_the_fork() -> None:
    with engine_of(Locks(), start_method="fork", stall_s=0.2, check=lambda method: None) as engine:
        (caught,) = run(engine, [[1]])
        assert not engine.processes

    assert type(caught) is WorkerDied
    assert re.search("it was forked, so it probably waits for a lock", str(caught))
    assert "choose start_method='forkserver'" in str(caught)


def test_start_methods_that_pickle_say_what_they_can_not() -> None:
    class Local(Squares):
        pass

    with engine_of(Local(), start_method="spawn") as engine:
        for _ in range(2):
            with pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
                engine.submit(BatchJob([1], None))
        assert not engine.pool.handles


# Processes beside the loop's


class Slow(Squares):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("seconds", "init"),
    [(0.01, None), (100, None), pytest.param(0.01, lambda _: time.sleep(100), marks=pytest.mark.slow)],
    ids=["between batches", "in a batch", "in worker_init_fn"],
)
def test_workers_end_when_the_loops_process_is_killed(seconds: float, init: Any) -> None:
    here, told = os.pipe()
    loop = os.fork()
    if not loop:
        try:
            engine = processes.ProcessEngine(loader_of(Slow(seconds), worker_init_fn=init), 2)
            for n in range(4):
                engine.submit(BatchJob([n], None))
            os.write(told, b"%d %d" % tuple(pids(engine)))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(loop, 0)
    workers = [int(pid) for pid in os.read(here, 100).split()]
    os.close(here)
    os.close(told)

    assert len(workers) == 2
    assert all(gone(pid) for pid in workers)


# Each script is a fork of one interpreter that has imported torch, and ends as an interpreter does.
_ENDS = ["engine.collect()", "raise SystemExit", "del engine", "1/0"]
_SCRIPTS = """
import gc, os, sys, time, torch
from torch.utils.data import DataLoader
from accel.dataio.engine.engine import BatchJob
from accel.dataio.engine.processes import ProcessEngine

class Slow:
    def __len__(self): return 100
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(3)

gc.freeze()  # or each looks through all of torch when it ends: 1 s
folder, then, children = sys.argv[1], "", []
for number, each in enumerate(sys.argv[2:]):
    children.append(os.fork())
    if not children[-1]:
        then = each
        os.dup2(os.open(f"{folder}/{number}.err", os.O_CREAT | os.O_WRONLY), 2)
        break
for place, child in enumerate([] if then else children):
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    open(f"{folder}/{place}.status", "w").write(str(status))
if then:
    engine = ProcessEngine(DataLoader(Slow(), batch_size=1), 2)
    for n in range(4): engine.submit(BatchJob([n], None))
    open(f"{folder}/{number}.pids", "w").write(" ".join(str(handle.process.pid) for handle in engine.pool.handles))
    exec(then)
"""


@pytest.fixture(scope="module")
def ended_scripts(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def end_all() -> Path:
        folder = tmp_path_factory.mktemp("scripts")
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        subprocess.run([sys.executable, "-c", _SCRIPTS, str(folder), *_ENDS], check=True, timeout=300, env=environment)
        return folder

    return once("ended scripts", end_all)


@pytest.mark.parametrize("then", _ENDS)
def test_a_script_that_just_ends(then: str, ended_scripts: Path) -> None:
    script = ended_scripts / str(_ENDS.index(then))
    errors, workers = script.with_suffix(".err").read_text(), script.with_suffix(".pids").read_text().split()

    assert script.with_suffix(".status").read_text() == str(int(then == "1/0"))
    assert errors.count("Traceback") == (1 if then == "1/0" else 0)
    assert len(workers) == 2
    assert all(gone(int(pid)) for pid in workers)


@pytest.mark.parametrize("mode", ["fork", "threads", "inline"])
def test_a_forked_process_goes_on_by_workers_of_its_own(mode: Any) -> None:
    data = Squares()
    with ContinuousLoader(DataLoader(data, 4), mode=mode, num_workers=2) as loader:
        wanted = [*loader]
        batches = iter(loader)
        first = [next(batches), next(batches)]
        workers = {process.pid for process in loader._core.worker_processes()}

        def work() -> bytes:
            made = [*first, *batches]
            mine = {process.pid for process in loader._core.worker_processes()}
            made += [*loader]
            loader.close()
            return repr((len(made), len(mine & workers), torch.equal(torch.cat(made), torch.cat(wanted * 2)))).encode()

        assert in_child(work) == repr((2 * len(wanted), 0, True)).encode()
        assert {process.pid for process in loader._core.worker_processes()} == workers
        assert_made([*first, *batches], wanted)


def test_a_forked_process_that_drops_the_engine_leaves_the_workers_alone() -> None:
    with engine_of(workers=2) as engine:
        ready(engine)
        workers = pids(engine)

        def work() -> bytes:
            engine.discard()
            engine.close()
            return b"%d" % len(multiprocessing.active_children())  # whom its end would terminate

        assert in_child(work) == b"0"
        assert_made(run(engine))
        assert pids(engine) == workers


class Stuck(Squares):
    """Hangs in a worker, at its first sample or at a later one, for a lock of native threads: no Python thread ran."""

    def __init__(self, at: int) -> None:
        super().__init__(at=at, act=lambda: time.sleep(1000))


def nothing(start_method: str) -> None:
    """Let all processes be started."""


@pytest.mark.parametrize(("at", "batch"), [(0, "its first"), (8, "a")])
def test_workers_that_nobody_asked_for_are_given_up_whatever_they_wait_for(
    at: int, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STALL_S", 0.5)
    with engine_of(Stuck(at), 1, start_method="fork", check=nothing) as engine:
        made = run(engine, [[at - 1], [at]] if at else [[0]])
        engine.start_method = "spawn"
        assert engine._patience_s(processes.WorkerHandle(0)) == float("inf")

    assert type(made[-1]) is WorkerDied
    assert f"has not made {batch} batch in 0.5 s" in str(made[-1])


def test_workers_that_were_asked_for_may_take_their_time() -> None:
    with engine_of(Stuck(0), 1, start_method="fork") as engine:
        assert engine._patience_s(processes.WorkerHandle(0)) == float("inf")

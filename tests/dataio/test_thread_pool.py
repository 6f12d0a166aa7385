"""Threads that make batches: they rest while a fork is made, end with their pool, and hold nothing."""

from __future__ import annotations

import decimal
import gc
import math
import os
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from accel.dataio.engine import thread_pool
from accel.dataio.engine.thread_pool import ThreadPool
from tests import warm


def test_results_and_errors_come_back() -> None:
    pool = ThreadPool(2, "tests")
    futures = [pool.submit(pow, 2, n) for n in range(20)]

    assert [future.result() for future in futures] == [2**n for n in range(20)]
    assert isinstance(pool.submit(int, "no number").exception(), ValueError)
    pool.shutdown()


def test_threads_end_with_the_pool_and_keep_nothing_alive() -> None:
    class Thing:
        pass

    pool, thing = ThreadPool(2, "accel-tests-end"), Thing()
    gone = weakref.ref(thing)
    pool.submit(id, thing).result()
    del thing
    until = time.monotonic() + 30
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.001)
    assert gone() is None
    del pool
    gc.collect()
    while any(t.name.startswith("accel-tests-end") for t in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.001)

    assert not any(t.name.startswith("accel-tests-end") for t in threading.enumerate())


def test_torch_computes_with_one_thread_in_each_and_elsewhere_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pool, both = ThreadPool(2, "tests"), threading.Barrier(2)

        def number_in_each() -> int:
            both.wait(30)
            return torch.get_num_threads()

        assert [future.result() for future in [pool.submit(number_in_each) for _ in range(2)]] == [1, 1]
        pool.shutdown()
        for thread in pool._threads:
            thread.join(30)
        elsewhere = []
        other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert elsewhere == [3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_no_thread_has_a_team_that_would_slow_the_loop_down(tmp_path: Path) -> None:
    (tmp_path / "teams.py").write_text(TEAMS)
    done = warm.run(["teams.py"], cwd=tmp_path)
    assert done.stdout.split() == ["1"], done.stderr


TEAMS = """
import os, sys
import torch
from accel.dataio.engine.thread_pool import ThreadPool

def threads():
    return len(os.listdir("/proc/self/task"))

def stack():
    torch.stack([torch.ones(300_000)] * 8).sum()

torch.set_num_threads(2)
stack()
before = threads()
pool = ThreadPool(1, "tests")
for _ in range(3):
    pool.submit(stack).result()
print(threads() - before)
"""

ENDING = """
import sys, time
import torch
from accel.dataio.engine.thread_pool import ThreadPool

def at_work(seconds):
    parts, until = [torch.zeros(64)] * 1000, time.monotonic() + seconds
    while time.monotonic() < until:
        torch.stack(parts)  # native code that gives up the interpreter's lock

pool = ThreadPool(1, "tests")
what, gone = sys.argv[1:]
pool.submit(*((at_work, 0.9) if what == "at work" else (time.sleep, 600)))
for _ in range(100):
    pool.submit(at_work, 600)
time.sleep(0.1)
if gone == "gone":
    del pool
began = time.monotonic()
import atexit
atexit._run_exitfuncs()
print(time.monotonic() - began, flush=True)
import ctypes
ctypes.pythonapi.Py_Exit(0)  # take the interpreter apart, as the end of one that is not forked does
"""


@pytest.mark.parametrize(
    ("what", "gone", "least_s", "most_s"),
    [
        ("at work", "", 0.5, 30.0),  # without it: terminate called without an active exception, in each run
        pytest.param("at work", "gone", 0.5, 30.0, marks=pytest.mark.slow),
        pytest.param("asleep", "", 4.9, 30.0, marks=pytest.mark.slow),
    ],
)
def test_at_the_end_of_the_interpreter_a_thread_at_work_is_waited_for(
    tmp_path: Path, what: str, gone: str, least_s: float, most_s: float
) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    done = warm.run(["ending.py", what, gone], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert least_s < float(done.stdout) < most_s


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_fork_of_the_loop_s_own_inherits_no_lock_of_a_thread_at_work() -> None:
    """A loader with workers, made for an evaluation, hung: its dataset shares a lock with the one fetched ahead."""
    lock, pool = threading.Lock(), ThreadPool(2, "tests")
    ends = threading.Event()

    def fetch() -> None:
        with lock:
            time.sleep(0.002)

    def keep_fetching() -> None:
        while not ends.is_set():
            pool.submit(fetch).result()

    asking = threading.Thread(target=keep_fetching)
    asking.start()
    try:
        for _ in range(20):
            child = os.fork()
            if not child:
                os._exit(0 if lock.acquire(timeout=5) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        ends.set()
        asking.join()
        pool.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_forks_one_after_the_other_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that had long batches made each worker of an evaluation wait for one of them."""
    monkeypatch.setattr(thread_pool, "_FORKS_APART_S", 60.0)  # a busy machine takes its time for six forks
    pool, rest, ends = ThreadPool(1, "tests"), thread_pool._rest, threading.Event()
    ask, waits = rest.ask, list[int]()
    monkeypatch.setattr(rest, "ask", lambda timeout_s: (waits.append(rest.running), ask(timeout_s))[1])

    def keep_fetching() -> None:
        while not ends.is_set():
            pool.submit(time.sleep, 0.2).result()

    asking = threading.Thread(target=keep_fetching)
    asking.start()
    while not rest.running:
        time.sleep(0.001)
    children = []
    for _ in range(6):
        children.append(os.fork())
        if not children[-1]:
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    ends.set()
    with rest.changed:
        rest.until = -math.inf
        rest.changed.notify_all()
    asking.join()
    pool.shutdown()
    assert waits[1:] == [0] * 5


def test_a_task_runs_in_the_context_of_the_caller() -> None:
    pool = ThreadPool(1, "tests")
    with decimal.localcontext() as context:
        context.prec = 5
        assert pool.submit(lambda: decimal.getcontext().prec).result() == 5
    assert pool.submit(lambda: decimal.getcontext().prec).result() == decimal.getcontext().prec != 5
    pool.shutdown()

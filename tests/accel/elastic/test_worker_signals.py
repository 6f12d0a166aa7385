"""SIGTERM to all of a group ends no worker of a loader before the step under way is saved; the loop's own does."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.engine.engine import BatchJob, WorkerDied, WorkerEpoch
from accel.dataio.engine.processes import ProcessEngine
from accel.elastic.batch_loader import elastic_loader
from accel.elastic.worker_signals import BlockedSpawn, outliving, outliving_context
from tests.accel.elastic import signalled_worker, worker_loop
from tests.accel.elastic.schedules import newest_step
from tests.forks import ForkServer


@functools.cache
def _server() -> ForkServer:
    return ForkServer("ranks", ("tests.comm.rank_server",))


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(process: int | None) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_signal_to_the_group_is_answered_by_a_checkpoint_and_the_workers_end_with_the_loop(tmp_path: Path) -> None:
    """The loader's workers died of it, and torch raised that in the loop, in the midst of the step."""
    loop = _server().fork(worker_loop.train, folder=tmp_path)
    wait_for((tmp_path / "workers").exists)
    workers = [int(each) for each in (tmp_path / "workers").read_text().split()]
    os.killpg(loop, signal.SIGTERM)
    in_time, status = _server().wait(loop, 60)
    assert in_time
    assert not (tmp_path / "error").exists(), (tmp_path / "error").read_text()
    assert status == -signal.SIGTERM
    assert newest_step(tmp_path / "saved") == worker_loop.STEP + 1
    assert len(workers) == 2
    wait_for(lambda: not any(map(is_running, workers)))


def is_pending(process: int | None) -> bool:
    """Whether a SIGTERM has not been taken yet: another one would be lost, and who has sent it."""
    status = Path(f"/proc/{process}/status").read_text()
    bits = int(next(line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd")), 16)
    return bool(bits >> (signal.SIGTERM - 1) & 1)


def send_term(process: int | None) -> None:
    """Send SIGTERM from a process of its own, and return once it was taken, or has ended the process."""
    subprocess.run(["kill", "-TERM", str(process)], check=True)
    wait_for(lambda: not (is_running(process) and is_pending(process)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("is_loop", [True, False], ids=["its loop", "a process that its loop was forked from"])
def test_a_worker_takes_the_signal_from_its_loop_alone(method: str, is_loop: bool) -> None:
    """By spawn libraries are imported, and start threads, before it begins; and the loop may be a forked process."""
    context: Any = outliving_context(multiprocessing.get_context(method))
    here, there = context.Pipe()
    loop = os.getpid() if is_loop else os.getppid()
    process = context.Process(target=signalled_worker.serve, args=(there, loop, method == "spawn"), daemon=True)
    process.start()
    there.close()
    assert not blocked()
    for _ in range(3):
        assert here.recv() == process.pid
        send_term(process.pid)
        here.send(None)
    assert here.recv() == process.pid
    process.terminate()  # as torch does with a worker that is stuck, and multiprocessing at the loop's end
    process.join(30)
    code = process.exitcode
    process.kill()
    assert code == 0


class Makers:
    """Samples are the processes that make them."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("outlives", [True, False], ids=["outlives", "plain"])
def test_a_worker_that_stands_in_for_a_loaders_own_does_so(method: str, outlives: bool) -> None:
    """The thread that receives its orders died of the signal, and the worker with it."""
    dataset: Any = Makers()
    init = outliving() if outlives else None
    engine = ProcessEngine(DataLoader(dataset, worker_init_fn=init), 1, start_method=method, as_torch=True)

    def maker(number: int) -> int:
        engine.submit(BatchJob([0], None, number=number, worker_epoch=WorkerEpoch(0, 1)))
        return int(engine.collect())

    try:
        process = maker(0)
        send_term(process)
        if outlives:
            assert maker(1) == process
        else:
            with pytest.raises(WorkerDied, match="was killed by SIGTERM"):
                maker(1)
    finally:
        engine.close()


def blocked() -> bool:
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_worker_that_is_a_thread_of_the_loop_leaves_the_loop_its_signals() -> None:
    called: list[int] = []
    outliving(called.append)(3)
    assert called == [3]
    assert not blocked()


class Blocked:
    """Tells of each sample whether SIGTERM is blocked where it is made, and what the user's function left there."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[bool, int]:
        info = get_worker_info()
        return blocked(), getattr(info.dataset if info is not None else self, "left", -1)


def leave(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.left = number  # type: ignore[attr-defined]


@pytest.mark.parametrize("own", [False, True], ids=["a plain loader", "a loader with an ElasticSampler"])
def test_the_elastic_loaders_workers_do_so_and_call_the_users_function(own: bool) -> None:
    dataset: Any = Blocked()
    how: dict[str, Any] = {"batch_sampler": ElasticSampler(6, batch_size=3)} if own else {"batch_size": 3}
    plain: DataLoader[Any] = DataLoader(dataset, num_workers=1, worker_init_fn=leave, **how)
    loader = elastic_loader(plain)
    assert [torch.stack(list(batch)).tolist() for batch in loader] == [[[1, 1, 1], [0, 0, 0]]] * 2
    assert plain.worker_init_fn is leave
    assert elastic_loader(loader) is loader


def test_it_can_be_sent_to_workers_that_are_not_forked() -> None:
    assert pickle.loads(pickle.dumps(outliving(leave))).init is leave


def test_without_workers_the_function_is_the_users() -> None:
    assert elastic_loader(DataLoader(range(3))).worker_init_fn is None  # type: ignore[arg-type]


def test_workers_by_spawn_are_started_with_the_signal_blocked() -> None:
    plain: DataLoader[Any] = DataLoader(range(3), num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
    before = plain.multiprocessing_context
    assert type(elastic_loader(plain).multiprocessing_context) is BlockedSpawn
    assert plain.multiprocessing_context is before
    forked: DataLoader[Any] = DataLoader(range(3), num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    assert elastic_loader(forked).multiprocessing_context is forked.multiprocessing_context


def test_the_default_start_method_counts_where_the_loader_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for method, expected in {"spawn": BlockedSpawn, "fork": type(None), None: type(None)}.items():
        monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False, method=method: method)
        assert type(outliving_context(None)) is expected

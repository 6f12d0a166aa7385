"""What the tests of the engines share: small datasets, a way to run jobs, a watch over it, a count of what is held."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from accel.dataio.engine.engine import BatchJob
from accel.dataio.engine.processes import ProcessEngine
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.dataio.passes.proxy import LoaderProxy


@contextmanager
def watched(seconds: float = 600) -> Iterator[None]:
    """End the test run with all stacks if the body hangs."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Silent:
    """A listener that only counts."""

    def __init__(self) -> None:
        self.requests = 0
        self.failures: list[str] = []

    def epoch_begins(self) -> None: ...
    def batch_requested(self) -> None:
        self.requests += 1

    def batch_delivered(self, batch: Any) -> None: ...
    def epoch_ended(self) -> None: ...
    def fetching_failed(self, error: Exception) -> None:
        self.failures.append(str(error))


@contextmanager
def proxied(loader: Any, workers: Any = 1, listener: Silent | None = None) -> Iterator[Any]:
    """Yield a loader's proxy whose batches are made by `workers`: so many processes, or what makes them."""
    proxy: Any = LoaderProxy(loader, listener or Silent())
    if isinstance(workers, int):
        workers = PrefetchAcrossEpochs(loader, ProcessEngine(loader, workers))
    proxy._accel_fetching.workers = workers
    try:
        yield proxy
    finally:
        workers.close()


def wrapped(loader: Any, mode: Any, workers: int = 2) -> contextlib.AbstractContextManager[Any]:
    """Return a context with a loader whose batches are made so: "proxy", or a mode of a `ContinuousLoader`."""
    return proxied(loader, workers) if mode == "proxy" else ContinuousLoader(loader, mode=mode, num_workers=workers)


class Squares(Dataset[Tensor]):
    """Sample i is i squared; `at` names an index at which `act` is called first, in a worker only."""

    def __init__(self, length: int = 40, at: int | None = None, act: Callable[[], Any] | None = None) -> None:
        self.length, self.at, self.act, self.offset = length, at, act, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if index == self.at and self.act is not None and multiprocessing.parent_process() is not None:
            self.act()
        return torch.tensor([index, index * index + self.offset])


class Draws(Dataset[Tensor]):
    """Samples are random numbers of all three kinds."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        import random

        return torch.tensor([float(torch.rand(1)), random.random(), float(np.random.rand())], dtype=torch.float64)


class Told(Dataset[Tensor]):
    """Samples tell which worker made them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return torch.tensor([info.id, info.num_workers, info.seed, torch.get_num_threads(), os.getpid()])


def lists(length: int = 40, size: int = 4) -> list[list[int]]:
    return [list(range(at, min(at + size, length))) for at in range(0, length, size)]


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=4, **options)


@contextmanager
def engine_of(dataset: Any = None, workers: int = 2, loader: Any = None, **options: Any) -> Iterator[ProcessEngine]:
    engine = ProcessEngine(loader or loader_of(dataset or Squares()), workers, **options)
    try:
        yield engine
    finally:
        engine.close()


def run(engine: Any, indices: list[Any] | None = None, seeds: Callable[[int], int | None] = lambda n: None) -> Any:
    """Return what the engine makes of all index lists, or the exception where it raises."""
    jobs = [BatchJob(each, seeds(number)) for number, each in enumerate(lists() if indices is None else indices)]
    made: list[Any] = []
    submitted = 0
    while len(made) < len(jobs):
        while submitted < len(jobs) and submitted - len(made) < engine.capacity:
            engine.submit(jobs[submitted])
            submitted += 1
        try:
            made.append(engine.collect())
        except Exception as error:
            made.append(error)
    return made


def expected(dataset: Any = None, indices: list[list[int]] | None = None) -> list[Tensor]:
    data = dataset or Squares()
    return [torch.stack([data[i] for i in each]) for each in indices or lists(len(data))]


def assert_made(made: list[Any], wanted: list[Tensor] | None = None) -> None:
    wanted = expected() if wanted is None else wanted
    assert len(made) == len(wanted)
    for one, other in zip(made, wanted, strict=True):
        assert isinstance(one, Tensor), repr(one)
        assert torch.equal(one, other)


def pids(engine: ProcessEngine) -> list[int]:
    engine.start()
    return [handle.process.pid for handle in engine.pool.handles]


def ready(engine: ProcessEngine) -> None:
    """Return once every worker has made a batch."""
    run(engine, [[0]] * 4 * engine.workers)
    while not all(handle.ready for handle in engine.pool.handles):
        for handle, message in engine.pool.messages(1.0):
            engine._take(handle, message)


def gone(pid: int, seconds: float = 30) -> bool:
    """Tell whether a process ends in time; a zombie has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] in "ZX":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def in_child(work: Any) -> bytes:
    """Return what `work` returns in a forked process."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(there, work())
        except BaseException as error:
            os.write(there, repr(error).encode())
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def held() -> dict[str, frozenset[object]]:
    """Return what this process holds that a loader may leak, each thing by what tells it from others."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        slots = frozenset(line.split()[4] for line in maps if "accel-batch" in line)  # the inode
    return {
        "files": frozenset(_open_files()),
        "slots": slots,
        "threads": frozenset(threading.enumerate()),
        "children": frozenset(child.pid for child in multiprocessing.active_children()),
        "shared memory": frozenset(name for name in os.listdir("/dev/shm") if not _of_another(name)),
    }


def gained(before: dict[str, frozenset[object]]) -> dict[str, int]:
    """Count what is held now and was not held `before`, by kind.

    What earlier tests left may go at any moment (a batch in a cycle, a thread that was told to end), so totals don't
    compare.
    """
    return {kind: len(things - before[kind]) for kind, things in held().items()}


def assert_nothing_gained(before: dict[str, frozenset[object]], within: float = 0.0) -> None:
    """Assert that nothing is held that was not held `before`, `within` so many seconds."""
    until = time.monotonic() + within
    while any((more := gained(before)).values()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(more.values()), more


def _open_files() -> Iterator[tuple[str, str]]:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            yield descriptor, os.readlink(f"/proc/self/fd/{descriptor}")


def _of_another(name: str) -> bool:
    """Tell whether torch's shared memory belongs to a process that runs and is neither this one nor its child."""
    parts = name.split("_")
    if parts[0] != "torch" or not parts[1].isdigit():
        return True
    try:
        with open(f"/proc/{parts[1]}/stat") as stat:
            parent = int(stat.read().rsplit(")", 1)[1].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return False
    return os.getpid() not in (int(parts[1]), parent)

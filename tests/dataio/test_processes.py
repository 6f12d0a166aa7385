"""Worker processes make the batches of the jobs, in their order, and leave nothing behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import subprocess
import time
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, StackDataset

from accel.dataio.engine.engine import BatchJob
from tests.dataio.engines import (
    Draws,
    Squares,
    Told,
    assert_made,
    assert_nothing_gained,
    engine_of,
    expected,
    gained,
    gone,
    held,
    in_child,
    lists,
    loader_of,
    pids,
    ready,
    run,
)

Pair = namedtuple("Pair", "image label")


@pytest.mark.sample(3)
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_come_in_the_order_of_their_jobs(workers: int, prefetch: int) -> None:
    with engine_of(workers=workers, prefetch=prefetch) as engine:
        assert engine.capacity == workers * prefetch
        assert_made(run(engine))
        assert_made(run(engine))
        assert not engine.deaths


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_start_methods(method: str) -> None:
    data = Squares()
    with engine_of(data, start_method=method) as engine:
        assert_made(run(engine))
        data.offset = 7
        engine.restart()
        assert_made(run(engine), expected(data))


def test_the_loaders_own_context_is_used() -> None:
    loader = loader_of(Squares(), num_workers=1, multiprocessing_context=multiprocessing.get_context("spawn"))
    with engine_of(loader=loader) as engine:
        assert engine.start_method == "spawn"


def test_an_unknown_start_method() -> None:
    with (
        pytest.raises(ValueError, match=r"start_method must be one of fork, .* got 'teleport'"),
        engine_of(start_method="teleport"),
    ):
        pass


def test_workers_know_themselves() -> None:
    with engine_of(Told(), workers=2) as engine:
        seen = torch.cat(run(engine, lists(8, 1) * 4)).tolist()
        here = set(pids(engine))

    assert {row[0] for row in seen} <= {0, 1}
    assert all(row[1:4] == [2, row[0], 1] for row in seen)
    assert {row[4] for row in seen} <= here


class Odd(Dataset[Any]):
    """Batches that are no tensors."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return Pair(np.full((2, 3), index, ">f4"), {"name": f"sample {index}", "box": torch.ones(index, 4), "no": None})


def test_batches_of_any_structure() -> None:
    with engine_of(loader=DataLoader(Odd(), batch_size=2, collate_fn=list)) as engine:
        (one, two), _ = run(engine, [[1, 2], [0]])

    assert type(one) is Pair
    assert one.image.dtype == np.dtype(">f4")
    assert two.image.tolist() == [[2.0] * 3] * 2
    assert (two.label["name"], two.label["box"].shape, two.label["no"]) == ("sample 2", (2, 4), None)


def test_all_batches_may_be_kept() -> None:
    indices = [[n % 40, (n * 7) % 40] for n in range(300)]
    before = held()
    with engine_of() as engine:
        made = run(engine, indices)
        assert_made(made, expected(indices=indices))
        more = gained(before)
    assert more["files"] < 30
    assert more["slots"] <= 2 * (64 + 6)
    assert_made(made, expected(indices=indices))  # the engine is closed
    del made
    assert_nothing_gained(before)


def test_nothing_is_left_after_many_engines() -> None:
    with engine_of() as engine:
        run(engine)
    before = held()
    for cycle in range(12):
        with engine_of(workers=1 + cycle % 2) as engine:
            for index in ([0, 1], [2]):
                engine.submit(BatchJob(index, None))
            if cycle % 3:
                engine.collect()
        del engine

    assert_nothing_gained(before)


def test_an_engine_that_is_forgotten_ends_its_workers() -> None:
    with engine_of() as engine:
        ready(engine)
        workers = pids(engine)
        engine.submit(BatchJob([1], None))
        engine.pool._finalizer()
        assert all(gone(pid) for pid in workers)


# Random numbers


def _seed_all(number: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    np.random.seed((info.seed + 5) % 2**32)


def test_a_worker_init_fn_finds_the_seeds_that_a_dataloader_gives() -> None:
    torch.manual_seed(11)
    loader = loader_of(Draws(), num_workers=1, worker_init_fn=_seed_all)
    plain = torch.cat(list(loader))
    torch.manual_seed(11)
    with engine_of(loader=loader, workers=1) as engine:
        engine.base_seed = int(torch.empty((), dtype=torch.int64).random_())
        made = torch.cat(run(engine))

    assert torch.equal(made, plain)


# The dataset changes


def test_changes_hold_from_the_next_job_on() -> None:
    data = Squares()
    with engine_of(data, workers=2) as engine:
        wanted = []
        for step in range(6):
            data.offset = step * 1000
            engine.update({("offset",): data.offset})
            for at in ([step], [step + 1]):
                engine.submit(BatchJob(at, None))
                wanted.append(expected(data, [at])[0])
            if step % 2:
                assert_made([engine.collect() for _ in range(4)], wanted[-4:])


def test_discarded_batches_never_come() -> None:
    with engine_of(workers=2, prefetch=4) as engine:
        for round_ in range(20):
            for n in range(8):
                engine.submit(BatchJob([n], None))
            for _ in range(round_ % 4):
                engine.collect()
            engine.discard()
            assert_made(run(engine, [[30 + round_ % 9]]), expected(indices=[[30 + round_ % 9]]))
        assert sum(len(handle.slots._memory) for handle in engine.pool.handles) <= 2 * (4 + 4)


def test_indices_of_any_kind() -> None:
    kinds: list[Any] = [(1, 2), range(1, 3), torch.tensor([1, 2]), np.array([1, 2]), [np.int64(1), torch.tensor(2)]]
    with engine_of() as engine:
        made = run(engine, kinds)

    assert_made(made, expected(indices=[[1, 2]]) * len(kinds))


def test_indices_that_can_not_be_sent_harm_nothing() -> None:
    with engine_of(workers=1) as engine:
        engine.submit(BatchJob([1], None))
        with pytest.raises(TypeError, match="generator"):
            engine.submit(BatchJob((n for n in range(2)), None))
        engine.submit(BatchJob([2], None))
        assert_made([engine.collect(), engine.collect()], expected(indices=[[1], [2]]))


def test_orders_longer_than_a_sockets_buffer() -> None:
    """Both sides send at once what the other one's buffer does not hold: neither may wait for the other."""

    class Long(Squares):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return [torch.tensor(indices).sum()]

    loader = DataLoader(Long(), batch_size=2, collate_fn=lambda samples: str(int(samples[0])) * 100_000)
    many = list(range(200_000))
    with engine_of(loader=loader, workers=1, prefetch=4) as engine:
        assert all(made == str(sum(many)) * 100_000 for made in run(engine, [many] * 8))


@pytest.mark.parametrize("side", ["loop", "dataset"])
def test_a_default_timeout_of_sockets_does_not_reach_the_workers(side: str) -> None:
    class Waits(Squares):
        def __getitem__(self, index: int) -> torch.Tensor:
            if side == "dataset":
                socket.setdefaulttimeout(0.05)
            time.sleep(0.1 if index == 0 else 0)
            return super().__getitem__(index)

    if side == "loop":
        socket.setdefaulttimeout(0.05)
    try:
        with engine_of(Waits(), workers=1) as engine:
            assert_made(
                run(engine, [[0], [1], [0], list(range(40))]), expected(indices=[[0], [1], [0], list(range(40))])
            )
            assert not engine.deaths
    finally:
        socket.setdefaulttimeout(None)


# Memory


def test_no_shared_memory_of_the_system_is_needed() -> None:
    """/dev/shm is a file system of one page, as in a container that was started with --shm-size 4k."""
    mount = (
        "mount --make-rprivate / && mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    )
    clone_newns = 0x00020000

    def work() -> bytes:
        if ctypes.CDLL(None).unshare(clone_newns) or subprocess.run(mount, shell=True, check=False).returncode:
            return b"not allowed"
        with engine_of(StackDataset(torch.rand(64, 20000)), workers=2) as engine:
            return b"%d" % sum(len(batch[0]) for batch in run(engine, lists(64, 16)))

    made = in_child(work)
    if made == b"not allowed":
        pytest.skip("needs root, to mount another /dev/shm")
    assert made == b"64"


@pytest.mark.parametrize("name", ["memfd_create", "posix_fallocate"])
def test_without_memory_for_slots_bytes_are_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, refused)
    before = held()
    with engine_of() as engine:
        made = run(engine)
        assert_made(made)
        assert gained(before)["slots"] == 0
        made[0].add_(1)

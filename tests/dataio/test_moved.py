"""Batches of a loader without workers, made elsewhere: to its dataset they are made in the loop's own process."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, get_worker_info

from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.fetching.fetch import Fetch
from accel.dataio.passes.moved import moved
from accel.dataio.passes.next_epoch import NextEpoch
from accel.dataio.passes.proxy import LoaderProxy
from accel.profiler.errors import AccelError
from tests.dataio.engines import Silent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the workers are forked")


class Numbers(Dataset[Tensor]):
    """Sample i is (i, whether a worker made it, a random number once `augment` is set)."""

    def __init__(self, draw: Callable[[], float] = lambda: float(torch.rand(()))) -> None:
        self.augment, self._draw = False, draw
        self.seed = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        drawn = self._draw() if self.augment and index % 5 == 3 else 0.0
        return torch.tensor([float(index), float(get_worker_info() is not None), drawn, float(self.seed)])


def init(number: int) -> None:
    get_worker_info().dataset.seed = 7  # type: ignore[union-attr]


def epochs(loader: Any, number: int, between: Callable[[int], None]) -> list[list[Any]]:
    seen = []
    for epoch in range(number):
        between(epoch)
        seen.append([batch.tolist() for batch in loader])
    return seen


def both(
    make: Callable[[], DataLoader[Any]], between: Callable[[DataLoader[Any], int], None], threads: bool = False
) -> tuple[Any, Any, Silent]:
    """Return what comes plainly and moved, with the random states in the end."""
    found: list[Any] = []
    listener = Silent()
    for elsewhere in (False, True):
        loader = make()
        proxy: Any = LoaderProxy(loader, listener)
        workers = moved(loader, 2, threads=threads) if elsewhere else None
        proxy._accel_fetching.workers = workers
        torch.manual_seed(0)
        np.random.seed(0)
        seen = epochs(proxy, 4, lambda epoch: between(loader, epoch))  # noqa: B023
        found.append((seen, torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()))  # type: ignore[index]
        if workers is not None:
            workers.close()
    return found[0], found[1], listener


def nothing(loader: DataLoader[Any], epoch: int) -> None:
    """Leave the loader as it is."""


def test_a_loader_without_workers_has_none_to_its_dataset() -> None:
    plain, elsewhere, listener = both(lambda: DataLoader(Numbers(), 4, shuffle=True, worker_init_fn=init), nothing)
    assert elsewhere == plain
    assert listener.failures == []


@pytest.mark.parametrize(
    "draw", [lambda: float(torch.rand(())), lambda: float(np.random.rand()), lambda: float(torch.randn(3).sum())]
)
def test_a_dataset_that_begins_to_draw_is_fetched_in_the_loop_s_process(draw: Callable[[], float]) -> None:
    def begin(loader: Any, epoch: int) -> None:
        loader.dataset.augment = epoch >= 2

    plain, elsewhere, listener = both(lambda: DataLoader(Numbers(draw), 4, shuffle=True), begin)
    assert elsewhere == plain
    assert len(listener.failures) == 1
    assert "draws random numbers" in listener.failures[0]


def set_batch_size(loader: Any, epoch: int) -> None:
    loader.batch_sampler.batch_size = 4 + epoch


def set_drop_last(loader: Any, epoch: int) -> None:
    loader.batch_sampler.drop_last = epoch % 2 == 1


def set_sampler(loader: Any, epoch: int) -> None:
    loader.batch_sampler.sampler = SequentialSampler(loader.dataset) if epoch == 1 else RandomSampler(loader.dataset)


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("change", [set_batch_size, set_drop_last, set_sampler])
def test_what_the_loop_sets_in_the_samplers_holds_for_the_next_epoch(change: Any, threads: bool) -> None:
    plain, elsewhere, listener = both(lambda: DataLoader(Numbers(), 5, shuffle=True), change, threads)
    assert elsewhere == plain
    assert listener.failures == []


class Shown(Dataset[Tensor]):
    """Sample i is (i, a number that all processes see)."""

    def __init__(self, level: Any) -> None:
        self.level = level

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(self.level.value)])


KINDS: dict[str, Callable[[], Any]] = {
    "value": lambda: multiprocessing.Value("i", 0),
    "raw value": lambda: multiprocessing.RawValue(ctypes.c_int, 0),
    "plain": lambda: ctypes.c_int(0),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_number_that_all_processes_see_is_read_when_an_epoch_begins(workers: int, kind: str) -> None:
    """The workers see it at once, but batches of the next epoch were made before the loop sets it."""
    found = []
    listener = Silent()
    for elsewhere in (False, True):
        torch.manual_seed(0)
        loader = DataLoader(Shown(KINDS[kind]()), 4, shuffle=True, num_workers=workers)
        proxy: Any = LoaderProxy(loader, listener)
        made: Any = None
        if elsewhere and workers:
            made = proxy._accel_fetching.next_epoch = NextEpoch(loader)
        elif elsewhere:
            made = proxy._accel_fetching.workers = moved(loader, 2, threads=True)

        def set_level(epoch: int, dataset: Any = loader.dataset) -> None:
            dataset.level.value = 10 * (epoch // 2)

        found.append(epochs(proxy, 5, set_level))
        if made is not None:
            made.close()
    assert found[0] == found[1]
    assert listener.failures == []


def test_what_processes_share_is_not_seen() -> None:
    with multiprocessing.Manager() as manager:
        for shared in (manager.Value("i", 0), multiprocessing.Event(), multiprocessing.Array("d", 3)):
            assert DatasetWatch(Fetch({"level": shared}, list, batched=True)).unseen_at_all


@pytest.mark.parametrize("threads", [False, True])
def test_batches_with_a_graph_are_left_to_the_loop(threads: bool) -> None:
    """A trained embedding in the collate function: in another process its graph was lost, and it learnt nothing."""
    table = torch.nn.Embedding(24, 3)

    def collate(samples: list[Tensor]) -> Tensor:
        return table(torch.stack(samples)[:, 0].long())  # type: ignore[no-any-return]

    with pytest.raises(AccelError, match="graph"):
        moved(DataLoader(Numbers(), 4, collate_fn=collate), 1, threads=threads)


@pytest.mark.parametrize("length", ["plain", "moved"])
def test_a_pass_has_the_length_of_torch_s(length: str) -> None:
    loader: Any = DataLoader(Numbers(), 5)
    proxy: Any = LoaderProxy(loader, Silent())
    if length == "moved":
        proxy._accel_fetching.workers = moved(loader, 1)
    for _ in range(2):
        batches = iter(proxy)
        assert len(batches) == len(iter(loader)) == 5
        assert batches
        assert sum(1 for _ in batches) == 5
        assert len(batches) == 5
    plain = iter(LoaderProxy([1, 2], Silent()))
    assert plain and list(plain) == [1, 2]
    if length == "moved":
        proxy._accel_fetching.workers.close()


def test_a_batch_of_a_worker_can_be_detached_in_place() -> None:
    """As in adversarial training: it was a view, of which torch refuses that."""
    loader = DataLoader(Numbers(), 4)
    workers = moved(loader, 1)
    proxy: Any = LoaderProxy(loader, Silent())
    proxy._accel_fetching.workers = workers
    for x in proxy:
        x.requires_grad_()
        (x * x).sum().backward()
        assert torch.equal(x.grad, 2 * x)
        x.detach_()
        assert not x._is_view()
    workers.close()


class Masks:
    """A collate function with a generator of its own: a copy of it would draw the same numbers once more."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __call__(self, samples: list[Tensor]) -> Any:
        return torch.stack(samples), self.random.random(len(samples))


def test_a_collate_function_with_a_generator_of_its_own_is_left_to_the_loop() -> None:
    with pytest.raises(ValueError, match="differ from the plain loader's"):
        moved(DataLoader(Numbers(), 4, collate_fn=Masks()), 2)


class Bank(Numbers):
    """Hands out its own memory, in which the loop keeps what it has learnt of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(24, 2)

    def __getitem__(self, index: int) -> Any:
        return self.memory[index]


def test_what_the_loop_writes_into_the_dataset_s_own_memory_stays_there() -> None:
    loader = DataLoader(Bank(), 1, collate_fn=lambda samples: samples[0])
    with pytest.raises(ValueError, match="hold the dataset's own objects"):
        moved(loader, 1)
    workers = moved(loader, 1, threads=True)
    proxy: Any = LoaderProxy(loader, Silent())
    proxy._accel_fetching.workers = workers
    for epoch in range(2):
        for row in proxy:
            assert row[0] == epoch
            row += 1
    workers.close()


class Seeded(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.initial_seed()])


def test_a_worker_has_the_seed_of_the_loop_s_process() -> None:
    torch.manual_seed(5)
    loader = DataLoader(Seeded(), 4)
    workers = moved(loader, 1)
    proxy: Any = LoaderProxy(loader, Silent())
    proxy._accel_fetching.workers = workers
    assert all((batch[:, 1] == 5).all() for batch in proxy)
    workers.close()


@pytest.mark.parametrize("threads", [True, False])
def test_a_refusal_leaves_the_random_states_alone(threads: bool) -> None:
    """The first samples draw, which the batches that were watched did not."""
    dataset = Numbers()
    dataset.augment = True
    before = torch.get_rng_state()
    with pytest.raises(AccelError, match="draws random numbers"):
        moved(DataLoader(dataset, 6, shuffle=True), 1, threads=threads)
    assert torch.equal(torch.get_rng_state(), before)

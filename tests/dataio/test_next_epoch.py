"""An epoch that was begun early must be the one that the plain loader would have begun, down to each augmentation."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.passes.movable import not_continuable
from accel.dataio.passes.next_epoch import NextEpoch
from accel.dataio.passes.proxy import LoaderProxy
from tests.dataio.engines import Silent


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch wait less long for the workers of a pass that raised: 5 s each."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.02)


class Augmented(Dataset[Any]):
    """Samples tell their index, who made them, and random numbers of all kinds."""

    def __init__(self, length: int = 23) -> None:
        self.length, self.epoch = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        drawn = [float(torch.rand(1)), random.random(), float(np.random.rand())]
        told = [info.id, info.num_workers, info.seed % 1000, torch.initial_seed() % 1000, torch.get_num_threads()]
        return torch.tensor([index, self.epoch, *told, *drawn], dtype=torch.float64)


class Counts(Augmented):
    """Each worker counts what it has made."""

    def __getitem__(self, index: int) -> Any:
        self.epoch += 1
        return super().__getitem__(index)


class Breaks(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise KeyError("no such picture: 13")
        return super().__getitem__(index)


def run(loader: Any, number: int = 3, *, stop: int | None = None, draw: bool = False, change: Any = None) -> list[Any]:
    seen: list[Any] = []
    for epoch in range(number):
        if change is not None:
            change(loader, epoch)
        try:
            for count, batch in enumerate(loader):
                if count == stop:
                    break
                seen.append(batch.clone())
                if draw:
                    seen.append(torch.rand(1))
        except Exception as error:
            seen.append((type(error), str(error)))
        seen.append((torch.get_rng_state(), random.random(), np.random.rand()))
    gc.collect()  # a pass that raised hangs on its traceback: left to a later test, it would keep that waiting
    return seen


def continued(loader: DataLoader[Any]) -> tuple[Any, NextEpoch]:
    proxy: Any = LoaderProxy(loader, Silent())
    proxy._accel_fetching.next_epoch = following = NextEpoch(loader)
    return proxy, following


def seed() -> None:
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def both(make: Any, loop: Any = run, **options: Any) -> NextEpoch:
    """Run a loop over the plain loader and over one whose epochs are begun early, and compare all that it saw."""
    seed()
    wanted = loop(make(), **options)
    seed()
    proxy, following = continued(make())
    seen = loop(proxy, **options)
    following.close()
    assert len(seen) == len(wanted)
    for place, (one, other) in enumerate(zip(seen, wanted, strict=True)):
        assert equal(one, other), (place, one, other)
    return following


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    given = {"num_workers": 1} | ({"batch_size": 4} if "batch_sampler" not in options else {}) | options
    return DataLoader(Augmented() if dataset is None else dataset, **given)


def _reseed(worker: int) -> None:
    at = torch.initial_seed() % 2**32
    np.random.seed(at)
    random.seed(at + worker)


def _change(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.epoch = torch.initial_seed() % 100  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True, "num_workers": 2},
        {"shuffle": False, "drop_last": True},
        {"shuffle": True, "worker_init_fn": _reseed, "num_workers": 2},
        {"shuffle": True, "worker_init_fn": _change},
        {"dataset": Counts(), "shuffle": True},
        {"dataset": Augmented(1), "shuffle": True},
        {"batch_sampler": BatchSampler(RandomSampler(range(23)), 5, True)},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                {"shuffle": True, "prefetch_factor": 1},
                {"shuffle": True, "prefetch_factor": 5},
                {"dataset": Augmented(9), "shuffle": True},
                {"shuffle": True, "multiprocessing_context": "spawn"},
                {"shuffle": True, "multiprocessing_context": "forkserver"},
            )
        ),
    ],
)
def test_all_epochs_but_the_first_are_begun_early_with_the_same_bits(options: dict[str, Any]) -> None:
    assert both(lambda: loader(**options)).used == 2


@pytest.mark.parametrize("stop", [None, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_generator_of_its_own(stop: int | None) -> None:
    both(lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(3)), stop=stop)


class Eager:
    """A batch sampler that draws when its iterator is made, which torch does twice."""

    def __iter__(self) -> Iterator[list[int]]:
        order: list[int] = torch.randperm(20).tolist()
        return iter([order[at : at + 3] for at in range(0, 20, 3)])

    def __len__(self) -> int:
        return 7


class Lazy(Sampler[int]):
    """A sampler that draws from the global states as it goes."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(21):
            yield int(torch.randint(21, ())) if random.random() < 0.5 else int(np.random.randint(21))


class SamplerBreaks(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(18)
        raise LookupError("no more of these")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: loader(batch_sampler=Eager()), id="eager"),
        pytest.param(lambda: loader(sampler=Lazy()), id="lazy"),
        pytest.param(lambda: loader(sampler=SamplerBreaks()), id="breaks"),
        pytest.param(lambda: loader(sampler=RandomSampler(Augmented(), replacement=True)), id="replacement"),
    ],
)
def test_what_a_sampler_of_another_kind_yields_is_not_known_ahead(make: Any) -> None:
    assert both(make).used == 0


@pytest.mark.parametrize("loop", [{"stop": 0}, {"stop": 3}, {"draw": True}, {"stop": 4, "draw": True}], ids=str)
def test_early_breaks_and_a_loop_that_draws(loop: dict[str, Any]) -> None:
    both(lambda: loader(shuffle=True), **loop)


def test_a_sample_that_can_not_be_made() -> None:
    both(lambda: loader(Breaks(), shuffle=True))


def test_a_distributed_sampler_follows_set_epoch() -> None:
    def change(loader: Any, epoch: int) -> None:
        loader.sampler.set_epoch(epoch + 3 * (epoch > 2))

    def make() -> DataLoader[Any]:
        return loader(sampler=DistributedSampler(Augmented(), num_replicas=2, rank=1, seed=5))

    following = both(make, number=5, change=change)
    assert (following.used, following.guesses.failed) == (2, 2)  # after the jump the next one is taken for another


def _in_dataset(loader: Any, epoch: int) -> None:
    loader.dataset.epoch += epoch == 2


def _in_options(loader: Any, epoch: int) -> None:
    if epoch == 2:
        loader.worker_init_fn = _reseed


def _in_random_state(loader: Any, epoch: int) -> None:
    if epoch == 2:
        torch.rand(1)


def _in_modes(loader: Any, epoch: int) -> None:
    torch.set_default_dtype(torch.float64 if epoch == 2 else torch.float32)


@pytest.mark.parametrize("change", [_in_dataset, _in_options, _in_random_state, _in_modes])
def test_what_the_loop_changes_between_two_epochs_counts(change: Any) -> None:
    try:
        following = both(lambda: loader(shuffle=True), number=3, change=change)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (following.used, following.guesses.failed) == (1, 1)


def test_what_the_loop_changes_within_an_epoch_is_not_seen_by_its_workers() -> None:
    def loop(it: Any) -> list[Any]:
        seen = []
        for _ in range(3):
            for count, batch in enumerate(it):
                seen.append(batch.clone())
                it.dataset.epoch += 100 * (count == 2)
        return seen

    both(lambda: loader(shuffle=True), loop)


def _nested(it: Any) -> list[Any]:
    return [(a.clone(), [b.clone() for b, _ in zip(it, range(3), strict=False)]) for a in it]


def _beside(it: Any) -> list[Any]:
    return [(a.clone(), b.clone()) for a, b in zip(it, it, strict=True)]


def _left_alive(it: Any) -> list[Any]:
    seen, passing = [], iter(it)
    for _ in range(3):
        seen += [next(passing).clone() for _ in range(2)]
        passing = iter(it)
    return seen


@pytest.mark.parametrize("loop", [_nested, _beside, _left_alive])
def test_passes_in_one_another_and_beside_one_another(loop: Any) -> None:
    both(lambda: loader(Augmented(9), shuffle=True), lambda it: [*loop(it), torch.get_rng_state()])


def test_workers_that_can_not_be_started_early_are_started_when_the_epoch_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = loader(shuffle=True)
    proxy, following = continued(made)
    monkeypatch.setattr(type(made), "_get_iterator", _raising(made))
    seed()
    seen = run(proxy, 2)
    monkeypatch.undo()
    seed()
    assert equal(seen, run(loader(shuffle=True), 2))
    assert not following.used


def _raising(plain: DataLoader[Any]) -> Any:
    get = DataLoader._get_iterator

    def get_iterator(self: DataLoader[Any]) -> Any:
        if self is not plain:
            raise OSError("no memory")
        return get(self)

    return get_iterator


def test_a_dataset_without_a_length_is_left_to_torch() -> None:
    class Lengthless(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    plain: DataLoader[int] = DataLoader(Lengthless(), 4, sampler=RandomSampler(range(8)), num_workers=1)
    early = NextEpoch(plain)
    for _ in range(2):
        batches, seen = early.begin(), []
        for _ in range(2):
            early.look_ahead(batches)
            seen += next(batches).tolist()
        assert sorted(seen) == list(range(8))
    early.close()


def test_what_is_left_alone() -> None:
    assert not_continuable(loader()) == ""
    assert "persistent_workers=True" in not_continuable(loader(persistent_workers=True))
    assert "in_order=False" in not_continuable(loader(in_order=False))
    with pytest.raises(ValueError, match="in_order=False"):
        NextEpoch(loader(in_order=False))

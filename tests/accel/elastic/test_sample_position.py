"""An elastic loader whose fetching is switched between any two batches has each sample once an epoch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.engine.engine import ThreadEngine
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.dataio.passes.proxy import LoaderProxy
from accel.elastic.sample_position import SamplePosition
from tests.dataio.engines import Silent


class Follows(Silent):
    """Passes what the loop does on to what counts it."""

    def __init__(self, position: SamplePosition) -> None:
        super().__init__()
        self._position = position
        self.proxy: Any = None

    def epoch_begins(self) -> None:
        self._position.epoch_begins(self.proxy)

    def batch_requested(self) -> None:
        self._position.batch_requested()

    def batch_delivered(self, batch: Any) -> None:
        self._position.batch_delivered(batch, self.proxy)

    def epoch_ended(self) -> None:
        self._position.epoch_ended(self.proxy)


def followed(sampler: ElasticSampler, loader: DataLoader[Any]) -> Any:
    """Return a loader's proxy whose batches are counted; `follower` has what counts them."""
    follows = Follows(SamplePosition(sampler))
    proxy = LoaderProxy(loader, follows)
    follows.proxy = proxy
    return proxy


def train(proxy: Any, updates: bool = True) -> None:
    """Make the backward pass of a step and its update, as far as they are heard of."""
    position = proxy._accel_listener._position
    position.backward_begins([])
    if updates:
        position.updated()


@pytest.mark.sample(3, every_value=False)
@pytest.mark.parametrize("seed", range(20))
def test_switches_of_workers_and_of_the_batch_size_at_random_lose_no_sample(seed: int) -> None:
    """Workers that had begun an epoch ahead were switched off within it: its end was an error in the user's loop."""
    draws = random.Random(seed)
    sampler = ElasticSampler(97, batch_size=4, seed=seed)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(97)), batch_sampler=sampler)
    proxy = followed(sampler, loader)
    pools = [None, *(PrefetchAcrossEpochs(loader, ThreadEngine(loader, n)) for n in (1, 2))]
    proxy._accel_fetching.workers = draws.choice(pools)
    for _ in range(6):
        seen = []
        for (batch,) in proxy:
            train(proxy)
            seen += batch.tolist()
            if draws.random() < 0.1:
                proxy._accel_fetching.workers = draws.choice(pools)
            if draws.random() < 0.1:
                sampler.set_batch_size(draws.choice([2, 4, 7, 16]))
        assert sorted(seen) == list(range(97))
    for pool in pools:
        if pool is not None:
            pool.close()


class Loop:
    """A loop over 40 samples in batches of four, each followed by an update."""

    def __init__(self, workers: int = 0, batch_size: int = 4) -> None:
        self.seen = list[int]()
        self.sampler = ElasticSampler(40, batch_size=batch_size, seed=1)
        self.loader: DataLoader[Any] = DataLoader(
            TensorDataset(torch.arange(40)), batch_sampler=self.sampler, num_workers=workers
        )
        self.proxy = followed(self.sampler, self.loader)

    def take(self, batch: torch.Tensor) -> None:
        self.seen += batch.tolist()
        train(self.proxy)

    def epoch(self, between: Callable[[int], None] = lambda step: None) -> None:
        """Train for an epoch, and check that each sample came once."""
        number, before = self.sampler.epoch, len(self.seen)
        for step, (batch,) in enumerate(self.proxy):
            between(step)
            self.take(batch)
        assert sorted(self.seen[before:]) == list(range(40))
        assert (self.sampler.epoch, self.sampler.position) == (number + 1, 0)


@pytest.mark.parametrize(
    ("looks", "workers"),
    [("a batch", 0), ("two batches", 2), ("all that is left", 0), ("a picture that is kept", 0)],
)
def test_a_look_within_an_epoch_takes_nothing_from_it(looks: str, workers: int) -> None:
    loop, kept = Loop(workers), []

    def look(step: int) -> None:
        if step not in (0, 4, 9):
            return
        inner = iter(loop.proxy)
        if looks == "all that is left":
            list(inner)
        else:
            next(inner)
            if looks == "two batches" and step < 9:
                next(inner)
        kept.extend([inner] if looks == "a picture that is kept" else [])

    loop.epoch(look)
    loop.epoch()
    kept.clear()
    loop.epoch()


def test_a_loop_without_gradients_around_it_trains() -> None:
    """Such as one that switches them on for its forward pass alone."""
    loop = Loop()
    with torch.no_grad():
        for _ in range(3):
            loop.epoch()
    assert loop.sampler.epoch == 3


def test_of_two_iterators_begun_together_the_one_that_trains_counts() -> None:
    loop = Loop()
    first, second = iter(loop.proxy), iter(loop.proxy)
    next(second)
    for (batch,) in first:
        loop.take(batch)
    assert sorted(loop.seen) == list(range(40))
    assert loop.sampler.epoch == 1


@pytest.mark.parametrize("looks", [1, 3])
def test_a_look_with_gradients_between_two_epochs_takes_nothing_from_the_next(looks: int) -> None:
    """`next(iter(loader))` for a picture, or for the shape of an input, before the training and between epochs."""
    loop = Loop()
    for _ in range(3):
        for _ in range(looks):
            next(iter(loop.proxy))
        loop.epoch()


def test_a_pass_that_is_left_within_a_step_has_been_trained_on() -> None:
    """Gradients are accumulated, or a GradScaler leaves the only step out: nothing is updated."""
    loop = Loop()
    for (batch,) in loop.proxy:
        train(loop.proxy, updates=False)
        loop.seen += batch.tolist()
        if len(loop.seen) == 12:
            break
    for (batch,) in loop.proxy:
        loop.take(batch)
    assert sorted(loop.seen) == list(range(40))


def test_a_pass_in_which_nothing_is_trained_counts_nothing() -> None:
    loop = Loop()
    orders = [[index for (batch,) in loop.proxy for index in batch.tolist()] for _ in range(2)]
    assert (loop.sampler.epoch, loop.sampler.position) == (0, 0)
    assert orders[0] == orders[1]
    loop.epoch()


@pytest.mark.parametrize("batch_size", [5, 2])
def test_batches_that_are_kept_and_trained_on_after_their_pass_are_an_epoch(batch_size: int) -> None:
    loop = Loop(batch_size=batch_size)
    for epoch in range(2):
        for number, (batch,) in enumerate(list(loop.proxy), start=1):
            loop.take(batch)
            assert number * batch_size == 40 or loop.sampler.position == number * batch_size
        assert (loop.sampler.epoch, loop.sampler.position) == (epoch + 1, 0)
    assert sorted(loop.seen[:40]) == sorted(loop.seen[40:]) == list(range(40))


def test_two_backward_passes_with_the_last_of_the_batches_that_are_held() -> None:
    loop = Loop()
    for _ in range(2):
        batches = iter(loop.proxy)
        following = next(batches)
        for _ in range(10):
            (batch,), following = following, next(batches, None)
            train(loop.proxy, updates=False)
            loop.take(batch)
    assert (loop.sampler.epoch, loop.sampler.position) == (2, 0)

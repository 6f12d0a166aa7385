"""Samplers of the user's own, drawn early: their generators, the program's, and what is left when workers change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from accel.dataio.engine.engine import ThreadEngine
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes.continuous import Continuous
from accel.dataio.passes.held_generators import held_generators, read_state, same_state, write_state
from accel.dataio.passes.moved import moved
from accel.dataio.passes.proxy import LoaderProxy
from tests.dataio.numbers import Numbers, indices
from tests.dataio.test_continuous import Silent

GENERATORS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.random.default_rng(3),
    "numpy's old one": lambda: np.random.RandomState(3),
    "python": lambda: random.Random(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}


def draw(generator: Any) -> int:
    """Draw a number below 40."""
    if isinstance(generator, torch.Generator):
        return int(torch.randint(40, (), generator=generator))
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(40))
    return int(generator.randint(0, 39) if isinstance(generator, random.Random) else generator.randint(40))


class Drawing(Sampler[int]):
    """Draws index by index, from a generator that it keeps, for ever."""

    def __init__(self, generator: Any) -> None:
        self.kept = {"own": generator}

    def __iter__(self) -> Iterator[int]:
        while True:
            yield draw(self.kept["own"])


def passes(loader: Any, switch: Callable[[int], None] = lambda number: None) -> list[list[int]]:
    """Return what comes of passes that are left early, and a number that the program draws after each batch."""
    torch.manual_seed(0)
    seen = []
    for length in (3, 5, 1, 4):
        for number, batch in enumerate(loader):
            switch(number)
            seen.append([*indices(batch), int(torch.randint(1000, ()))])
            if number + 1 == length:
                break
    return seen


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("how", ["threads", "proxy", "switched"])
def test_a_generator_that_a_sampler_keeps_is_where_an_early_end_would_leave_it(how: str, kind: str) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(), 4, sampler=Drawing(GENERATORS[kind]()))

    wanted = passes(make())
    if how == "threads":
        with ContinuousLoader(make(), mode="threads", workers=2) as continuous:
            assert passes(continuous) == wanted
        return
    loader = make()
    proxy: Any = LoaderProxy(loader, Silent())
    workers = proxy._accel_fetching.workers = Continuous(loader, ThreadEngine(loader, 2), strict=True)

    def switch(number: int) -> None:
        proxy._accel_fetching.workers = workers if how == "proxy" or number % 3 == 0 else None

    assert passes(proxy, switch) == wanted
    workers.close()


def test_a_sampler_with_replacement_goes_on_where_workers_have_left_it() -> None:
    """It draws 32 at a time from its generator, which had been put back for the lists that were not served."""

    def make() -> DataLoader[Any]:
        data = Numbers()
        generator = torch.Generator().manual_seed(2)
        sampler = RandomSampler(data, replacement=True, num_samples=400, generator=generator)
        return DataLoader(data, 4, sampler=sampler)

    wanted = [indices(batch) for batch in make()]
    loader = make()
    proxy: Any = LoaderProxy(loader, Silent())
    workers = proxy._accel_fetching.workers = Continuous(loader, ThreadEngine(loader, 4))
    seen = []
    for number, batch in enumerate(proxy):
        seen.append(indices(batch))
        if number % 7 == 5:
            proxy._accel_fetching.newest.detach()
    assert seen == wanted
    workers.close()


@pytest.mark.parametrize("kind", GENERATORS)
def test_states_are_read_compared_and_written(kind: str) -> None:
    generator = GENERATORS[kind]()
    before = read_state(generator)
    drawn = [draw(generator) for _ in range(3)]
    assert not same_state(before, read_state(generator))
    write_state(generator, before)
    assert same_state(before, read_state(generator))
    assert [draw(generator) for _ in range(3)] == drawn


def test_the_dataset_s_generators_are_not_the_sampler_s() -> None:
    class Augmented(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.random = random.Random(0)

    sampler: Any = RandomSampler(Augmented())
    sampler.also = [Drawing(random.Random(1)), random.SystemRandom()]
    assert held_generators(sampler) == [sampler.also[0].kept["own"]]


class Program(Sampler[int]):
    """Draws each index from the program's own generator."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(24):
            yield int(torch.randint(40, ()))


def test_a_sampler_that_draws_from_the_program_s_generator_is_left_to_the_loop() -> None:
    """The loop draws from it too, after each batch: drawn early, both would get other numbers."""

    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(), 4, sampler=Program())

    wanted = passes(make())
    loader, listener = make(), Silent()
    proxy: Any = LoaderProxy(loader, listener)
    workers = proxy._accel_fetching.workers = moved(loader, 2, threads=True)
    assert passes(proxy) == wanted
    assert "the sampler draws each index list from the program's own random generators" in listener.failures[0]
    workers.close()


def test_a_sampler_that_draws_nothing_more_is_drawn_early() -> None:
    class Permuted(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(50).tolist())

    loader = DataLoader(Numbers(), 2, sampler=Permuted())
    workers = moved(loader, 2, threads=True)
    proxy: Any = LoaderProxy(loader, Silent())
    proxy._accel_fetching.workers = workers
    under_way = []
    for _ in proxy:
        under_way.append(len(workers._record))
    assert under_way[:3] == [0, 0, 4] and max(under_way) == 4
    workers.close()


def test_workers_may_be_switched_on_and_off_a_thousand_times_within_a_pass() -> None:
    """Each time wrapped the index lists once more, until Python's stack was full."""
    loader = DataLoader(Numbers(1500), 1)
    proxy: Any = LoaderProxy(loader, Silent())
    workers = Continuous(loader, ThreadEngine(loader, 1))
    seen = []
    for batch in proxy:
        seen += indices(batch)
        proxy._accel_fetching.workers = workers
        if len(seen) % 2:
            proxy._accel_fetching.newest.detach()
    assert seen == list(range(1500))
    workers.close()

"""Samplers of the user's own, drawn early: their generators, the program's, and what is left when workers change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from accel.dataio.engine.engine import ThreadEngine
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.dataio.passes.proxy import LoaderProxy
from tests.dataio.engines import Silent
from tests.dataio.numbers import Numbers, indices


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
    workers = proxy._accel_fetching.workers = PrefetchAcrossEpochs(loader, ThreadEngine(loader, 4))
    seen = []
    for number, batch in enumerate(proxy):
        seen.append(indices(batch))
        if number % 7 == 5:
            proxy._accel_fetching.newest.detach()
    assert seen == wanted
    workers.close()


def test_workers_may_be_switched_on_and_off_a_thousand_times_within_a_pass() -> None:
    """Each time wrapped the index lists once more, until Python's stack was full."""
    loader = DataLoader(Numbers(1500), 1)
    proxy: Any = LoaderProxy(loader, Silent())
    workers = PrefetchAcrossEpochs(loader, ThreadEngine(loader, 1))
    seen = []
    for batch in proxy:
        seen += indices(batch)
        proxy._accel_fetching.workers = workers
        if len(seen) % 2:
            proxy._accel_fetching.newest.detach()
    assert seen == list(range(1500))
    workers.close()

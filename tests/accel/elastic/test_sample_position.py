"""An elastic loader whose fetching is switched between any two batches has each sample once an epoch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.engine.engine import ThreadEngine
from accel.dataio.passes.continuous import Continuous
from accel.dataio.passes.proxy import LoaderProxy
from accel.elastic.sample_position import SamplePosition
from tests.dataio.test_continuous import Silent


class Follows(Silent):
    """Passes what the loop does on to what counts it."""

    def __init__(self, position: SamplePosition) -> None:
        super().__init__()
        self._position = position

    def batch_delivered(self, batch: Any) -> None:
        self._position.batch_delivered(batch, None)  # type: ignore[arg-type]

    def epoch_ended(self) -> None:
        self._position.epoch_ended(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_switches_of_workers_and_of_the_batch_size_at_random_lose_no_sample(seed: int) -> None:
    """Workers that had begun an epoch ahead were switched off within it: its end was an error in the user's loop."""
    draws = random.Random(seed)
    sampler = ElasticSampler(97, batch_size=4, seed=seed)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(97)), batch_sampler=sampler)
    proxy: Any = LoaderProxy(loader, Follows(SamplePosition(sampler)))
    pools = [None, *(Continuous(loader, ThreadEngine(loader, n)) for n in (1, 2))]
    proxy._accel_fetching.workers = draws.choice(pools)
    for _ in range(6):
        seen = []
        for (batch,) in proxy:
            seen += batch.tolist()
            if draws.random() < 0.1:
                proxy._accel_fetching.workers = draws.choice(pools)
            if draws.random() < 0.1:
                sampler.set_batch_size(draws.choice([2, 4, 7, 16]))
        assert sorted(seen) == list(range(97))
    for pool in pools:
        if pool is not None:
            pool.close()

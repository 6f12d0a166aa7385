"""The profiler sees a continuous loader as the loader it is: its batches, its epochs, its worker processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes.loader_core import LoaderPass
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """A sample takes 1 ms."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.001)
        return torch.full((8,), float(index)), torch.tensor(0)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder(loaders=((ContinuousLoader, LoaderPass),))
    made.start()
    yield made
    made.stop()


def train(loader: Any, epochs: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("mode", ["inline", "threads", "fork"])
def test_batches_epochs_and_workers_are_seen(recorder: Recorder, mode: Any) -> None:
    seen: list[Measurement] = []
    recorder.delivery.on_step = seen.append
    with ContinuousLoader(DataLoader(Slow(), 4), mode=mode, num_workers=2) as loader:
        train(loader, 3)
        pids, facts = recorder.worker_pids(), recorder.loader_facts()

    assert recorder.delivery.steps == len(seen) == 30
    assert [m.first for m in seen] == [n % 10 == 0 for n in range(30)]
    assert {m.samples for m in seen} == {4}
    assert recorder.loaders.loader is loader
    assert len(pids) == facts.workers == (2 if mode == "fork" else 0)
    assert facts.persistent
    waited = sum(m.phases["data"] for m in seen) / len(seen)
    assert waited > (0.003 if mode == "inline" else 0.0)


def test_with_an_elastic_sampler_too(recorder: Recorder) -> None:
    sampler = ElasticSampler(40, batch_size=4)
    with ContinuousLoader(DataLoader(Slow(), batch_sampler=sampler), mode="inline") as loader:
        train(loader, 2)

    assert recorder.delivery.steps == 20
    assert recorder.loaders.loader is loader


def test_a_loader_that_is_passed_through_is_seen_as_what_it_wraps(recorder: Recorder) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([Slow()[index] for index in range(12)])

    with ContinuousLoader(DataLoader(Stream(), 4)) as loader:
        train(loader, 2)

    assert recorder.delivery.steps == 6


def test_everything_is_put_back() -> None:
    before = ContinuousLoader.__iter__, LoaderPass.__next__
    recorder = Recorder(loaders=((ContinuousLoader, LoaderPass),))
    recorder.start()
    assert (ContinuousLoader.__iter__, LoaderPass.__next__) != before
    recorder.stop()

    assert (ContinuousLoader.__iter__, LoaderPass.__next__) == before
    assert "__next__" not in vars(LoaderPass)

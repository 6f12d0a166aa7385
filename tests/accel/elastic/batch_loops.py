"""Loops whose batch size accel chooses, on a clock and with a noise of the test's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import accel
from accel import entry
from accel.dataio import elastic_sampler
from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic.batch_size import loader as batch_loader
from accel.elastic.batch_size.driver import BatchRun
from accel.goodput.efficiency import NoiseInterval
from accel.profiler.loop.optimizers import Optimizers
from accel.run import Run
from accel.session.session import Session

PLAIN = {"cache": False, "budget": "0.001s"}


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples with their number, which `seen` counts."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Clock:
    """Counts what is done: 1 ms for a step, and a bit for each sample."""

    def __init__(self) -> None:
        self.now, self.sample_s = 0.0, 1e-6

    def __call__(self) -> float:
        return self.now


def time_by(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time the batch run's steps by a clock of the test's own, and skip the search for strategies."""
    plain = BatchRun.__init__

    def init(self: BatchRun, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "clock": clock})

    monkeypatch.setattr(BatchRun, "__init__", init)
    monkeypatch.setattr("accel.session.session.Session.searching", property(lambda self: False))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    time_by(clock, monkeypatch)
    return clock


@contextlib.contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Take this process for one of several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_loader, "world", lambda: (ranks, rank))
        patch.setattr(elastic_sampler, "world", lambda *given: (ranks, rank))
        yield


def known_noise(monkeypatch: pytest.MonkeyPatch, phi: float) -> None:
    noise = NoiseInterval(phi, 0.8 * phi, 1.2 * phi)
    monkeypatch.setattr("accel.elastic.batch_size.run_noise.interval_of", lambda estimate: noise)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a noise scale be known that lets a batch of 8 grow to 256."""
    known_noise(monkeypatch, 5000.0)


def growing(job: Any, most: int, **elastic: Any) -> Any:
    """Call `optimize` with a job, whose batch may grow up to so many samples."""
    return accel.optimize(*job, elastic=accel.Elastic(max_batch_size=most, **elastic), **PLAIN)


def batch_run(model: nn.Module) -> BatchRun:
    optimized = entry.optimized(model)
    assert optimized is not None
    assert optimized.elastic is not None
    assert optimized.elastic.batch is not None
    return optimized.elastic.batch


def train(
    model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer, clock: Clock, each: Callable[[int], None] = print
) -> list[list[int]]:
    """Train for one epoch, and return the samples of each batch."""
    taken = []
    for step, (x, y, index) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        clock.now += 1e-3 + len(x) * clock.sample_s
        optimizer.step()
        taken.append(index.tolist())
        each(step)
    return taken


def nothing(step: int) -> None:
    pass


@pytest.fixture
def job() -> Iterator[tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    yield model, DataLoader(Numbered(3000), batch_size=8, shuffle=True), torch.optim.SGD(model.parameters(), 0.01)
    accel.undo(model)


def batch_run_of(replicas: int, local: int, most: int) -> BatchRun:
    sampler = ElasticSampler(1000, batch_size=local, num_replicas=replicas, rank=0)
    loader = DataLoader(range(1000), batch_sampler=sampler)  # type: ignore[arg-type]
    users = create_autospec(Run, instance=True, model=nn.Linear(8, 1), loader=loader, optimizers=Optimizers())
    run = BatchRun(create_autospec(Session, instance=True, run=users), most)
    run.close()  # it listens to nothing
    return run

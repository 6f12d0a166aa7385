"""A loop over numbered samples under `optimize(checkpoint=)`, which a test steps through in a style of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry
from accel.elastic.options import Checkpointing
from accel.elastic.saving.run import CheckpointRun
from tests.accel.elastic.batch_loops import PLAIN


class Ended(Exception):
    """In place of the process's end."""


def raise_ended() -> None:
    raise Ended


class NumberedLoop:
    """A loop over numbered samples.

    Args:
        folder: of its checkpoints.
        samples: of an epoch.
        batch: samples of a batch.
    """

    def __init__(self, folder: Path, samples: int = 40, batch: int = 4) -> None:
        torch.manual_seed(3)
        model: nn.Module = nn.Linear(1, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), 1e-4)
        loader = DataLoader(TensorDataset(torch.arange(float(samples))[:, None]), batch_size=batch, shuffle=True)
        checkpoint = Checkpointing(folder=folder, interval_s=1e6)
        self.model, self.loader, self.optimizer = accel.optimize(
            model, loader, optimizer, elastic=accel.Elastic(checkpoint=checkpoint), **PLAIN
        )
        self.taken: list[list[int]] = []
        """Samples of each update."""
        self.checkpoint._terminate = raise_ended

    @property
    def checkpoint(self) -> CheckpointRun:
        optimized = entry.optimized(self.model)
        assert optimized is not None and optimized.elastic is not None and optimized.elastic.checkpoint is not None
        return optimized.elastic.checkpoint

    @property
    def seen(self) -> list[int]:
        return [index for step in self.taken for index in step]

    def take(self, batch: Any, between: Callable[[], None] = lambda: None) -> None:
        """Make a step; what is given is called between its backward pass and its update."""
        (x,) = batch
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        between()
        self.optimizer.step()
        self.taken.append(x.flatten().int().tolist())

    def end(self) -> None:
        accel.undo(self.model)


def fetched_ahead(loader: Any, ahead: int) -> Iterator[Any]:
    """Yield batches, with so many in hand, as scripts do to copy the next to the GPU meanwhile."""
    batches = iter(loader)
    queue = list(itertools.islice(batches, ahead))
    while queue:
        queue += itertools.islice(batches, 1)
        yield queue.pop(0)

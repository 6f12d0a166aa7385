"""Whether the loss falls: its slope over the second half of the run, against its scatter.

    t = slope / deviation of the slope, by least squares

The gradient of a small batch is mostly noise: its mean may be far too short to be told from 0 within hundreds of
measurements, and then nothing in the gradients tells a job that learns from one whose labels are random. The loss does,
as soon as it falls. The value that each backward pass begins at is taken for the loss.

The first half is left out: at first any model loses what its initial weights were wrong by. Later a fall is slow: a
loss that goes from 0.5 to 0.4 in 1,000 steps, with a scatter of 0.12, shows it in 512 with a t of 2.7 and in 1,000 with
one of 7.6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

_WAITING = 512
"""Losses that may wait to be read from a GPU."""
_BLOCKS = 256
"""Means of losses that are kept, at first of a single one: beyond, two become one."""
_LEAST = 24
"""Means in the second half of the run, from which on its slope is looked at."""
_STEEP = 4.0
"""t of a fall: it is asked for at each decision, hundreds of times in a run."""


class LossTrend:
    """Collects the losses of a run.

    Example:
        >>> trend = LossTrend()
        >>> for step in range(60):
        ...     trend.add(torch.tensor(2.0 - 0.02 * step + 0.1 * (-1) ** step))
        >>> trend.falls()
        True
    """

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._seen = 0
        self._means: list[float] = []
        """Of blocks of losses, over the whole run."""
        self._block: list[float] = []
        self._length = 1
        self._fell_at = 0
        """Losses seen when the fall was last sure."""

    def add(self, loss: Tensor) -> None:
        """Take in the loss of a backward pass, a number without its graph; it is not waited for."""
        self._waiting.append(loss)
        self._seen += 1
        if len(self._waiting) > _WAITING:
            self._read()

    def _read(self) -> None:
        """Read the losses, which waits for a GPU."""
        values = torch.stack([loss.reshape(()).float() for loss in self._waiting]).tolist() if self._waiting else []
        self._waiting = []
        for loss in filter(math.isfinite, values):
            self._block.append(loss)
            if len(self._block) == self._length:
                self._means.append(math.fsum(self._block) / self._length)
                self._block = []
            if len(self._means) == _BLOCKS:
                self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
                self._length *= 2

    def falls(self) -> bool:
        """Return whether the loss surely falls.

        Once it was sure, it holds until as many passes again have shown no further fall.
        """
        self._read()
        if _t(self._means[len(self._means) // 2 :]) < -_STEEP:
            self._fell_at = self._seen
        return self._seen <= 2 * self._fell_at and self._seen > 0


def loss_of(roots: Iterable[Tensor]) -> Tensor | None:
    """Return what a backward pass begins at, if it is a loss: the first single number, without its graph."""
    for root in roots:
        if root.numel() == 1 and root.is_floating_point():
            return root.detach()
    return None


def _t(losses: list[float]) -> float:
    """Return the slope's t; 0 while there are too few."""
    count = len(losses)
    if count < _LEAST:
        return 0.0
    times, values = np.arange(count) - (count - 1) / 2, np.array(losses) - np.mean(losses)
    slope = float(times @ values / (times @ times))
    scatter = float(np.sum((values - slope * times) ** 2)) / (count - 2)
    deviation = math.sqrt(scatter / float(times @ times))
    return slope / deviation if deviation > 0 else math.copysign(math.inf, slope) if slope else 0.0

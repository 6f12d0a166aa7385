"""Whether the loss falls: the slope of its last values, against their scatter.

    t = slope / deviation of the slope, by least squares over the last values

The gradient of a small batch is mostly noise: its mean may be far too short to be told from 0 within hundreds of
measurements, and then nothing in the gradients tells a job that learns from one whose labels are random. The loss does,
as soon as it falls. The value that each backward pass begins at is taken for the loss.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

_SHORT, _LONG = 128, 512
"""Losses that are looked at: for a steep fall, and for a slow one."""
_LEAST = 24
_STEEP = 4.0
"""t of a fall: it is asked for at each decision, hundreds of times in a run."""


class LossTrend:
    """Collects the losses of a run.

    Example:
        >>> trend = LossTrend()
        >>> for step in range(60):
        ...     trend.add([torch.tensor(2.0 - 0.02 * step + 0.1 * (-1) ** step)])
        >>> trend.falls()
        True
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_LONG)
        self._waiting: list[Tensor] = []
        self._seen = 0

    def add(self, roots: Iterable[Tensor]) -> None:
        """Take in a backward pass by what it began at; it is not waited for.

        Args:
            roots: of the pass; the loss is a single number among them.
        """
        for root in roots:
            if root.numel() == 1 and root.is_floating_point():
                self._waiting.append(root.detach())
                self._seen += 1
                break
        if len(self._waiting) > _LONG:
            self._read()

    def _read(self) -> None:
        """Read the losses, which waits for a GPU."""
        values = torch.stack([loss.reshape(()).float() for loss in self._waiting]).tolist() if self._waiting else []
        self._losses.extend(value for value in values if math.isfinite(value))
        self._waiting = []

    def falls(self) -> bool:
        """Return whether the loss surely falls, over the last 128 passes or the last 512.

        The first 128 are left out of the long look: at first any model loses what its initial weights were wrong by.
        """
        self._read()
        losses = list(self._losses)
        is_long = self._seen >= _SHORT + _LONG
        return _t(losses[-_SHORT:]) < -_STEEP or (is_long and _t(losses) < -_STEEP)


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

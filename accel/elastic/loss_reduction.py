"""Whether the loop's loss is a mean over the samples of a batch, or their sum.

    ratio = mean loss of the larger batch ÷ that of the one before        1 for a mean, the batches' ratio for a sum

The gradient of a sum grows with the batch, beside the learning rate: a step on twice the samples would move the weights
twice as far, and by the rate's rule farther still. Nothing in one batch tells the two apart, so the losses before and
after a batch has become larger are compared: the first of them are there before the optimizer's next step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

_MOST, _LEAST = 64, 8
"""Losses of a batch that are looked at, and of the one before at least."""
_GROWTH = 1.4
"""Times the batch before, from which on the two are compared."""
_SURE = 4.0
"""Deviations of the ratio's logarithm by which it must lie off what it is not: it is asked for at each loss."""


class LossReduction:
    """Compare losses of batches of different sizes.

    Attributes:
        is_sum: the loss is a sum over the batch; False while that is not known.

    Example:
        >>> reduction = LossReduction()
        >>> for samples in [32] * 8 + [64]:
        ...     reduction.add(samples, torch.tensor(0.5 * samples))
        >>> reduction.is_sum
        True
    """

    def __init__(self) -> None:
        self.is_sum = False
        self._is_known = False
        self._samples, self._seen = 0, 0
        """Of the batches that the last losses are of, and how many there were."""
        self._losses: deque[Tensor] = deque(maxlen=_MOST)
        self._before: tuple[int, list[float]] | None = None
        """Samples of the batch before, and its last losses."""

    def add(self, samples: int, loss: Tensor) -> None:
        """Take in a backward pass; it is waited for only in the first ones of a larger batch.

        Args:
            samples: of the batch, on this rank. Smaller ones than before, as an epoch's last, are left out.
            loss: that the pass began at, a single number without its graph.
        """
        if self._is_known or samples < self._samples:
            return
        if samples > self._samples:
            # A batch that has stood for long has other losses by now than the one before it.
            if len(self._losses) >= _LEAST and (self._before is None or self._seen > _MOST):
                self._before = self._samples, _read(self._losses)
            self._samples, self._seen = samples, 0
            self._losses.clear()
        self._losses.append(loss)
        self._seen += 1
        if self._before is not None and self._seen <= _MOST:
            self._compare(*self._before)

    def _compare(self, samples: int, losses: list[float]) -> None:
        now, growth = _read(self._losses), self._samples / samples
        before = losses[-max(_LEAST, len(now)) :]  # as few as suffice: the loss falls meanwhile
        mean, mean_now = statistics.fmean(before), statistics.fmean(now)
        if not (growth >= _GROWTH and mean > 0 and mean_now > 0 and math.isfinite(mean + mean_now)):
            return
        off_mean, off_sum = abs(math.log(mean_now / mean)), abs(math.log(mean_now / mean / growth))
        error = statistics.pstdev(before) / mean * math.sqrt(1 / len(before) + 1 / len(now))
        if max(off_mean, off_sum) > _SURE * error:
            self._is_known, self.is_sum = True, off_sum < off_mean


def _read(losses: Iterable[Tensor]) -> list[float]:
    return torch.stack([loss.reshape(()).double() for loss in losses]).tolist()

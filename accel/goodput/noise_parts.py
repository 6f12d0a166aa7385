"""The parts of a step that are there already: gradients of micro-batches, on one rank or several.

Each micro-batch is taken for a mean over its samples that counts as much as every other one: so do loops that divide
the loss by the number of micro-batches, and so does DistributedDataParallel with its ranks. The gradients that arrive
are g_k = w_k S_k with w_k = 1 / (micro-batches of a rank), and G is their sum, averaged over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accel.goodput.gradient_sketch import GradientSketch
from accel.goodput.noise_scale import NoiseSums


class PartSums:
    """Sums over the micro-batches of this rank.

    Args:
        sketch: shortens the vectors that ranks exchange; None keeps them whole, for one rank.

    Example:
        >>> parts = PartSums(None)
        >>> parts.add(torch.tensor([3.0, 0.0]), 8)
        >>> parts.add(torch.tensor([1.0, 0.0]), 8)
        >>> parts.sums()  # half the loss each: S_1 = 6, S_2 = 2, G = 4
        NoiseSums(part_square=20.0, mean_square=16.0, part_samples=8.0, samples=16.0)
    """

    def __init__(self, sketch: GradientSketch | None) -> None:
        self._sketch = sketch
        self.total: Tensor | None = None
        """The sum of the parts' gradients, or its sketch."""
        self.square: Tensor | float = 0.0
        """The sum of the parts' squared norms."""
        self.count = 0
        self.inverse_sizes = 0.0
        """Σ 1 / samples."""

    def add(self, vector: Tensor, samples: float) -> None:
        """Add the gradient of a micro-batch.

        Args:
            vector: its gradient.
            samples: in it, > 0.
        """
        vector = vector if self._sketch is None else self._sketch.of(vector)
        self.total = vector if self.total is None else self.total + vector
        self.square = self.square + vector.square().sum()
        self.count += 1
        self.inverse_sizes += 1 / samples

    def sums(self) -> NoiseSums | None:
        """Return what the parts of this rank say by themselves; None if there is only one."""
        if self.total is None or self.count < 2:
            return None
        square, total_square = torch.stack([torch.as_tensor(self.square), self.total.square().sum()]).tolist()
        return _sums(square, total_square, self.count, self.inverse_sizes, ranks=1)


class Exchanged(NamedTuple):
    """What all ranks agree on."""

    sums: NoiseSums | None
    """None if a rank can't measure."""
    cost_s: float
    usual_s: float


Gather = Callable[[Any], list[Any]]
"""Gives each rank what all of them passed, by rank."""


def exchange(
    parts: PartSums | None,
    length: int,
    like: Tensor,
    cost_s: float,
    usual_s: float,
    group: dist.ProcessGroup | None = None,
    gather: Gather | None = None,
) -> Exchanged:
    """Sum the parts over all ranks: one all-reduce, or one gathering, to which each rank must come.

    Args:
        parts: of this rank; None if it can't measure. Without any part the step was left out by a GradScaler, and its
            sums are not finite on all ranks.
        length: of the vectors' sketches.
        like: a tensor on the device of the group's collectives.
        cost_s: what the measurement took on this rank.
        usual_s: a step's usual time on this rank.
        group: of the ranks; None for torch's own.
        gather: exchanges tensors on the CPU in place of a collective of the group.
    """
    packed = torch.zeros(length + 6, device=like.device)
    if parts is not None and parts.total is not None:
        packed[:length] = parts.total
        packed[length] = parts.square
        packed[length + 1 : length + 3] = torch.tensor([float(parts.count), parts.inverse_sizes])
    elif parts is not None:
        packed[length : length + 3] = torch.tensor([math.nan, 1.0, 1.0])
    packed[length + 3 :] = torch.tensor([float(parts is None), cost_s, usual_s])
    packed, ranks = _summed(packed, group, gather)
    total_square = float(packed[:length].square().sum())
    square, count, inverse, silent, cost, usual = packed[length:].tolist()
    sums = None if silent or count < 2 else _sums(square, total_square, count, inverse, ranks)
    return Exchanged(sums, cost / ranks, usual / ranks)


def _summed(packed: Tensor, group: dist.ProcessGroup | None, gather: Gather | None) -> tuple[Tensor, int]:
    """Return the sum over all ranks, and how many they are."""
    if gather is None:
        dist.all_reduce(packed, group=group)
        return packed, dist.get_world_size(group)
    gathered = gather(packed.cpu())
    return torch.stack(gathered).sum(0), len(gathered)


def _sums(square: float, total_square: float, count: float, inverse_sizes: float, ranks: int) -> NoiseSums:
    part_samples = count / inverse_sizes
    return NoiseSums(count * square / ranks**2, total_square / ranks**2, part_samples, count * part_samples)

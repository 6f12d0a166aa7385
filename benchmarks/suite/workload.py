"""What a model of the suite is: all that a training loop needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer


class Workload(NamedTuple):
    """A model with its data and optimizer, before the first step."""

    model: nn.Module
    loader: Any
    """Yields (input, target)."""
    optimizer: Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]

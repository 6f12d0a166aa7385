"""What a model of the suite is: all that a training loop needs, at one of two sizes, and one step of that loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Size = Literal["tiny", "full"]
"""For two CPU cores, or as published, for one GPU."""


class Workload(NamedTuple):
    """A model with its data and optimizer, before the first step."""

    model: nn.Module
    loader: Any
    """Yields (input, target)."""
    optimizer: Optimizer
    loss: Callable[[Any, Any], Tensor]
    """Takes the model's output and the target."""
    clip: float | None = None
    """Norm that gradients are clipped to."""
    beside: Callable[[Any], None] | None = None
    """What a step does after the update, given its target: a GAN trains its discriminator."""
    backward: Callable[[Tensor], Any] = torch.Tensor.backward
    """Runs the backward pass of a loss; frameworks have their own."""
    non_blocking: bool = False
    """Whether the loop copies its batches without waiting for them."""


def train_step(workload: Workload, x: Any, target: Any) -> Tensor:
    """Train on one batch and return its loss."""
    workload.optimizer.zero_grad()
    loss = workload.loss(workload.model(x), target)
    workload.backward(loss)
    if workload.clip is not None:
        torch.nn.utils.clip_grad_norm_(workload.model.parameters(), workload.clip)
    workload.optimizer.step()
    if workload.beside is not None:
        workload.beside(target)
    return loss.detach()

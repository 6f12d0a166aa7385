"""The losses of all steps, kept without a place in the heap for each."""

from __future__ import annotations

import torch
from torch import Tensor


class Losses:
    """The losses of all steps, in one tensor, without a wait for the device.

    A tensor kept of each step would lie between the blocks that the step frees, so that the heap grew by some of them
    at each: to 12.9 GB in 90 s of the language model, which needs 0.6.

    Args:
        device: of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._values = torch.empty(1 << 14, device=device)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, loss: Tensor) -> None:
        """Take in the loss of a step."""
        if self._count == len(self._values):
            self._values = torch.cat([self._values, torch.empty_like(self._values)])
        self._values[self._count] = loss.detach()
        self._count += 1

    def numbers(self) -> list[float]:
        """Return them."""
        values: list[float] = self._values[: self._count].tolist()
        return values

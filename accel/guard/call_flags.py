"""What a loop switches between the calls of a model: whether its modules train, which parameters get a gradient.

A GAN's loop freezes the discriminator for the generator's step, and one that reports accuracy in each batch leaves the
model in evaluation mode. At the step boundary, where calls are replayed, the flags are then not those of the call.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

from torch import nn


class CallFlags:
    """The flags of a model's modules and parameters, as they are now.

    Args:
        model: whose flags these are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._training = [(module, module.training) for module in model.modules()]
        self._requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def evaluating(self) -> CallFlags:
        """Return the same with all modules in evaluation mode."""
        flags = copy.copy(self)
        flags._training = [(module, False) for module, _ in self._training]
        return flags

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Set them for the block, past `train()` and `eval()`: a user's own may change weights, as loralib's do."""
        modules = [(module, module.training) for module, flag in self._training if module.training != flag]
        parameters = [p for p, flag in self._requires_grad if p.requires_grad != flag]
        try:
            for module, flag in modules:
                module.training = not flag
            _flip(parameters)
            yield
        finally:
            for module, flag in modules:
                module.training = flag
            _flip(parameters)


def _flip(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad = not parameter.requires_grad

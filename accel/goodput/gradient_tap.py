"""Collect the gradients that arrive at parameters, before anything is done with them.

A tensor hook on a leaf is called once in each backward pass, with the sum over all uses of the parameter, before the
gradient is added to `.grad` and before DistributedDataParallel gets it. So a replica's own gradient is seen whatever
hook then compresses it, a micro-batch's own gradient beside those of others, and all that before clipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from accel.goodput.noise_refusal import Unmeasurable


class GradientTap:
    """Hooks on parameters, while it is installed.

    Args:
        parameters: leaves that require gradients, each once.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> tap = GradientTap([weight])
        >>> tap.install()
        >>> (3 * weight).sum().backward()
        >>> tap.take()
        [tensor([3., 3.])]
        >>> tap.remove()
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._handles: list[Any] = []
        self._arrived: dict[int, Tensor] = {}

    @property
    def holds(self) -> bool:
        """True if gradients have arrived since they were last taken."""
        return bool(self._arrived)

    def install(self) -> None:
        """Put the hooks on."""
        self.remove()
        self._handles = [p.register_hook(partial(self._arrive, i)) for i, p in enumerate(self._parameters)]  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks off, and let go of what has arrived."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            for parameter in self._parameters:
                if not parameter._backward_hooks:
                    # Else every backward pass goes on asking each parameter's empty table: 0.5 µs apiece.
                    parameter._backward_hooks = None
        self._handles = []
        self._arrived.clear()

    def take(self) -> list[Tensor | None]:
        """Return the sum of what has arrived at each parameter since the last call; None where nothing did."""
        arrived = [self._arrived.get(number) for number in range(len(self._parameters))]
        self._arrived.clear()
        return [None if gradient is None else gradient.detach() for gradient in arrived]

    def _arrive(self, number: int, gradient: Tensor | None) -> None:
        if gradient is None:  # a function of the user's has returned none
            return
        # This very tensor is kept: autograd then copies it into `.grad` instead of moving it, and clipping leaves it.
        if number in self._arrived:  # a second pass over the same batch
            gradient = self._arrived[number] + gradient
        self._arrived[number] = gradient


def trained_parameters(model: Any) -> list[Tensor]:
    """Return the parameters of a model that require gradients, each once, in the order of `named_parameters`.

    Raises:
        Unmeasurable: if they are spread over processes or devices.
    """
    parameters: list[Tensor] = [p for _, p in model.named_parameters() if p.requires_grad]
    if any(hasattr(p, "to_local") for p in parameters):
        raise Unmeasurable("the parameters are spread over processes (DTensor), so no rank has a whole gradient")
    if len({p.device for p in parameters}) > 1:
        raise Unmeasurable("the parameters lie on several devices")
    if not parameters:
        raise Unmeasurable("no parameter of the model requires a gradient")
    return parameters

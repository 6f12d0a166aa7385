"""What an update takes: the kind of optimizer, a row of numbers for each parameter group, and the tensors of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["sgd", "adam", "lamb", "lars"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Of parameters and gradients."""

# Columns of a group's row of numbers. Kernels read them from the device, in float64: 1 - 0.999 has an error of 1e-5 in
# float32. What can be on or off is 1 or 0, and -1 in SIGN goes up instead of down.
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, MAX_NORM, TRUST, SIGN = range(8)
DECOUPLED, BIAS_CORRECTION, GRAD_AVERAGING, ALWAYS_ADAPT, TRUST_CLIP, LR_IN_MOMENTUM = range(8, 14)
MOMENTUM, DAMPENING = BETA1, BETA2
"""The same columns, as SGD and LARS call them."""
COLUMNS = 16
"""Numbers in a row; two are not used."""


class Numbers(NamedTuple):
    """A row as plain numbers."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_norm: float
    trust: float
    sign: float
    decoupled: float
    bias_correction: float
    grad_averaging: float
    always_adapt: float
    trust_clip: float
    lr_in_momentum: float


class Hypers(NamedTuple):
    """The numbers of a parameter group, in the order of the columns above; a tensor is read from the device."""

    lr: float | Tensor
    beta1: float | Tensor = 0.0
    beta2: float | Tensor = 0.0
    eps: float | Tensor = 0.0
    weight_decay: float | Tensor = 0.0
    max_norm: float | Tensor = math.inf
    trust: float | Tensor = 1.0
    sign: float = 1.0
    decoupled: float = 0.0
    bias_correction: float = 1.0
    grad_averaging: float = 1.0
    always_adapt: float = 0.0
    trust_clip: float = 0.0
    lr_in_momentum: float = 0.0

    def numbers(self) -> Numbers:
        """Return plain numbers; a tensor on a device is waited for."""
        return Numbers(*map(float, self))


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a parameter is updated and its state is kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Batch:
    """The parameters of one group that have a gradient, with what is updated beside them.

    Attributes:
        row: the group's numbers.
        params: of any of `DTYPES`.
        grads: one for each, of any of `DTYPES`.
        states: lists of one tensor for each parameter: moments, or the momentum buffer; float32, or float64 for a
            float64 parameter.
        masters: float32 weights that the 16-bit parameters are rounded from; None for a parameter without, () for none.
        steps: float32 [] on the parameters' device: updates done; [] where the rule counts none.
        nesterov, amsgrad: what the group's kernel is compiled with.
    """

    row: Hypers
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    masters: Sequence[Tensor | None] = ()
    steps: list[Tensor] = field(default_factory=list)
    nesterov: bool = False
    amsgrad: bool = False

    @property
    def columns(self) -> list[list[Tensor]]:
        """All tensors that an update walks through together, element by element: a list for each kind.

        A parameter without master weights stands for them.
        """
        masters = (
            [p if m is None else m for p, m in zip(self.params, self.masters, strict=True)] if self.masters else []
        )
        return [self.params, self.grads, *self.states, *([masters] if masters else [])]


@dataclass
class Scaling:
    """What mixed precision asks of a step.

    Attributes:
        grad_scale: float32 of one element that the gradients were multiplied by; None for 1.
        found_inf: float32 of one element: not 0 if the step is to be skipped; None to find out.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @property
    def checks(self) -> bool:
        """Whether the step itself looks for infinity and NaN: gradients are scaled, and nobody has looked."""
        return self.grad_scale is not None and self.found_inf is None


class UpdateOutcome(NamedTuple):
    """What a step leaves on the device.

    Attributes:
        norm: float32 []: norm of all gradients, before clipping; None where no norm was asked for.
        overflow: float32 []: 1 if the step was skipped because of infinity or NaN; None where nobody looked.
    """

    norm: Tensor | None
    overflow: Tensor | None


def needs_norm(batches: Sequence[Batch], scaling: Scaling) -> bool:
    """Return whether a pass over the gradients comes before the update."""
    return scaling.checks or any(_clips(batch.row.max_norm) for batch in batches)


def _clips(max_norm: float | Tensor) -> bool:
    return isinstance(max_norm, Tensor) or math.isfinite(max_norm)

"""What an update takes: the kind of optimizer, a row of numbers for each parameter group, and the tensors of a step.

g is the gradient over the loss scale, times c = min(1, max_norm / (‖all g‖ + 1e-6)) where a norm is given, and negative
where an objective is maximised; w the weight, η the learning rate, λ the weight decay, t the step from 1.

    SGD     g += λ w        b ← μ b + (1 - d) g, at first b = g       w -= η b          Nesterov: w -= η (g + μ b)
    Adam    g += λ w        m ← β₁ m + (1 - β₁) g                     v ← β₂ v + (1 - β₂) g²
            w -= η m̂ / (√v̂ + ε)         m̂ = m / (1 - β₁ᵗ)         v̂ = v / (1 - β₂ᵗ), or its largest yet (AMSGrad)
    AdamW   w -= η λ w, then Adam with λ = 0
    LAMB    u = m̂ / (√v̂ + ε) + λ w              w -= η (‖w‖ / ‖u‖) u
    LARS    r = τ ‖w‖ / (‖g‖ + λ ‖w‖ + ε)        b ← μ b + η r (g + λ w)            w -= b

LAMB is Algorithm 2 of the published version (ICLR 2020, arXiv v5), with bias correction and φ(x) = x. The ratio is 1
where a norm is 0, and, unless `always_adapt`, where λ = 0. Without `grad_averaging` m takes g instead of (1 - β₁) g;
coupled, g += λ w comes before the moments and u has no λ w. LARS is Algorithm 1; without `lr_in_momentum` η multiplies
b when the weight is updated, as in most code, which is not the same while η changes. `trust_clip` takes min(r / η, 1)
for r (LARC).

SGD: Sutskever et al. 2013. Adam: https://arxiv.org/abs/1412.6980. AMSGrad: https://arxiv.org/abs/1904.09237. AdamW:
https://arxiv.org/abs/1711.05101. LAMB: https://arxiv.org/abs/1904.00962. LARS: https://arxiv.org/abs/1708.03888.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["sgd", "adam", "lamb", "lars"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Of parameters and gradients."""

COLUMNS = 16
"""Numbers of a group as kernels read them: those of `Hypers` in order; two are not used."""

Number = Any
"""A float, or a tensor of one element, which is read from the device."""


class Hypers(NamedTuple):
    """The numbers of a parameter group. What can be on or off is 1 or 0.

    Kernels read them from the device, in float64: 1 - 0.999 has an error of 1e-5 in float32.
    """

    lr: Number
    beta1: Number = 0.0
    """The momentum of SGD and LARS."""
    beta2: Number = 0.0
    """Their dampening."""
    eps: Number = 0.0
    weight_decay: Number = 0.0
    max_norm: Number = math.inf
    trust: Number = 1.0
    sign: float = 1.0
    """-1 goes up instead of down."""
    decoupled: float = 0.0
    bias_correction: float = 1.0
    grad_averaging: float = 1.0
    always_adapt: float = 0.0
    trust_clip: float = 0.0
    lr_in_momentum: float = 0.0

    def numbers(self) -> Hypers:
        """Return plain numbers; a tensor on a device is waited for."""
        return Hypers(*map(float, self))


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
    limits = [batch.row.max_norm for batch in batches]
    return scaling.checks or any(isinstance(limit, Tensor) or math.isfinite(limit) for limit in limits)

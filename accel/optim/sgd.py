"""SGD with momentum, and LARS, which is SGD with a rate for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from accel.optim.base import MultiTensorOptimizer, given


class FusedSGD(MultiTensorOptimizer):
    """Update by stochastic gradient descent, as `torch.optim.SGD` does.

        g += λ w        b ← μ b + (1 - d) g, at first b = g        w -= η b        (Nesterov: w -= η (g + μ b))

    Args:
        params: parameters or groups, as torch.optim takes them.
        lr: learning rate η, default 0.001; a tensor is read from the device, so that a captured step follows it.
        momentum: μ, default 0.
        dampening: d, default 0.
        weight_decay: λ, default 0.
        nesterov: default False.
        maximize: go up instead of down, default False.
        max_grad_norm: clip the norm of all gradients to it, as `clip_grad_norm_` does; None (default) for no clipping.
        master_weights: keep float32 weights of float16 and bfloat16 parameters, in the state. Default True.
        backend: "accel" (default), or "apex" for NVIDIA's kernels.

    Raises:
        InvalidArgument: if an argument is out of range, or a parameter can't be updated.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedSGD([weight], lr=0.1, momentum=0.9)
        >>> weight.sum().backward(); optimizer.step()

    Source: Sutskever et al. 2013, https://proceedings.mlr.press/v28/sutskever13.html, in torch's form.
    """

    kind = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float | Tensor = 0.0,
        dampening: float | Tensor = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | Tensor | None = None,
        master_weights: bool = True,
        backend: str = "accel",
    ) -> None:
        super().__init__(params, given(locals()), backend)


class FusedLARS(MultiTensorOptimizer):
    """Update by LARS, for large batches: SGD whose step is a small part of the norm of each tensor's weights.

        r = τ ‖w‖ / (‖g‖ + λ ‖w‖ + ε)        b ← μ b + η r (g + λ w)        w -= b

    Algorithm 1 of the paper; ε is not in it. The ratio r is 1 where a norm is 0.

    Args:
        params: parameters or groups, as torch.optim takes them.
        lr: learning rate η, default 1; a tensor is read from the device, so that a captured step follows it.
        momentum: μ, default 0.9.
        weight_decay: λ, default 0. Where it is 0 (biases and normalisation, usually) r is 1.
        trust_coefficient: τ, default 0.001.
        eps: ε, default 1e-8.
        dampening: the buffer takes 1 - d of the new, default 0.
        nesterov: default False.
        lr_in_momentum: η is part of the buffer, as published (default True). False multiplies it in when the weight
            is updated, as torch's SGD and most code of LARS do; they differ while η changes.
        trust_clip: take min(r / η, 1) for r, as apex's LARC does by default. Default False.
        always_adapt: compute r where λ is 0 too, default False.
        maximize: go up instead of down, default False.
        max_grad_norm: clip the norm of all gradients to it; None (default) for no clipping.
        master_weights: keep float32 weights of float16 and bfloat16 parameters, in the state. Default True.

    Raises:
        InvalidArgument: if an argument is out of range, or a parameter can't be updated.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedLARS([weight], lr=1.0, weight_decay=1e-4)
        >>> weight.sum().backward(); optimizer.step()

    Source: You et al. 2017, https://arxiv.org/abs/1708.03888.
    """

    kind = "lars"
    switches: ClassVar[dict[str, str]] = {
        "always_adapt": "always_adapt",
        "trust_clip": "trust_clip",
        "lr_in_momentum": "lr_in_momentum",
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        momentum: float | Tensor = 0.9,
        weight_decay: float | Tensor = 0.0,
        trust_coefficient: float | Tensor = 0.001,
        eps: float = 1e-8,
        *,
        dampening: float | Tensor = 0.0,
        nesterov: bool = False,
        lr_in_momentum: bool = True,
        trust_clip: bool = False,
        always_adapt: bool = False,
        maximize: bool = False,
        max_grad_norm: float | Tensor | None = None,
        master_weights: bool = True,
    ) -> None:
        super().__init__(params, given(locals()))

"""SGD, Adam and AdamW, and those with a rate for each layer: LARS is such an SGD, LAMB such an Adam."""

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


class FusedAdam(MultiTensorOptimizer):
    """Update by Adam, as `torch.optim.Adam` does.

        g += λ w        m ← β₁ m + (1 - β₁) g        v ← β₂ v + (1 - β₂) g²        w -= η m̂ / (√v̂ + ε)

    Args:
        params: parameters or groups, as torch.optim takes them.
        lr: learning rate η, default 0.001; a tensor is read from the device, so that a captured step follows it.
        betas: β₁ and β₂, default 0.9 and 0.999; numbers or tensors.
        eps: ε, default 1e-8.
        weight_decay: λ, default 0.
        amsgrad: divide by the largest v̂ so far, default False.
        maximize: go up instead of down, default False.
        decoupled_weight_decay: take η λ w from the weight instead, as AdamW does. Default False.
        max_grad_norm: clip the norm of all gradients to it, as `clip_grad_norm_` does; None (default) for no clipping.
        master_weights: keep float32 weights of float16 and bfloat16 parameters, in the state. Default True.
        backend: "accel" (default), or "apex" for NVIDIA's kernels.

    Raises:
        InvalidArgument: if an argument is out of range, or a parameter can't be updated.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdam([weight], lr=1e-3)
        >>> weight.sum().backward(); optimizer.step()

    Source: Kingma and Ba 2015, https://arxiv.org/abs/1412.6980.
    """

    kind = "adam"
    switches: ClassVar[dict[str, str]] = {"decoupled_weight_decay": "decoupled"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Tensor = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | Tensor | None = None,
        master_weights: bool = True,
        backend: str = "accel",
    ) -> None:
        # torch.optim reads `capturable` from a checkpoint; nothing here does.
        super().__init__(params, {**given(locals()), "capturable": False}, backend)


class FusedAdamW(FusedAdam):
    """Update by Adam with decoupled weight decay, as `torch.optim.AdamW` does.

        w -= η λ w        m ← β₁ m + (1 - β₁) g        v ← β₂ v + (1 - β₂) g²        w -= η m̂ / (√v̂ + ε)

    Args:
        params: parameters or groups, as torch.optim takes them.
        weight_decay: λ, default 0.01.
        options: those of `FusedAdam`, with its defaults, but for `decoupled_weight_decay`.

    Raises:
        InvalidArgument: if an argument is out of range, or a parameter can't be updated.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdamW([weight], lr=1e-3, max_grad_norm=1.0)
        >>> weight.sum().backward(); optimizer.step()

    Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Tensor = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=True, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True  # checkpoints of older torch don't say so


class FusedLAMB(MultiTensorOptimizer):
    """Update by LAMB, for large batches: Adam's update of each tensor, scaled to the norm of its weights.

        u = m̂ / (√v̂ + ε) + λ w        w -= η (‖w‖ / ‖u‖) u

    Algorithm 2 as published at ICLR 2020 (version 5 on arXiv), with φ(x) = x. The ratio is 1 where a norm is 0.
    Options are those of apex's FusedLAMB, and their defaults.

    Args:
        params: parameters or groups, as torch.optim takes them.
        lr: learning rate η, default 0.001; a tensor is read from the device, so that a captured step follows it.
        bias_correction: default True.
        betas: β₁ and β₂, default 0.9 and 0.999; numbers or tensors.
        eps: ε, default 1e-6.
        weight_decay: λ, default 0.01. Where it is 0 (biases and normalisation, usually) the ratio is 1.
        adam_w_mode: λ w is part of the update, as published (default True), and not of the gradient.
        grad_averaging: the first moment takes (1 - β₁) g (default True), and not g.
        max_grad_norm: clip the norm of all gradients to it, default 1; None for no clipping.
        use_nvlamb: take the ratio where λ is 0 too, default False.
        maximize: go up instead of down, default False.
        master_weights: keep float32 weights of float16 and bfloat16 parameters, in the state. Default True.
        backend: "accel" (default), or "apex" for NVIDIA's kernels.

    Raises:
        InvalidArgument: if an argument is out of range, or a parameter can't be updated.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedLAMB([weight], lr=1e-2)
        >>> weight.sum().backward(); optimizer.step()

    Source: You et al. 2020, https://arxiv.org/abs/1904.00962.
    """

    kind = "lamb"
    switches: ClassVar[dict[str, str]] = {
        "adam_w_mode": "decoupled",
        "bias_correction": "bias_correction",
        "grad_averaging": "grad_averaging",
        "use_nvlamb": "always_adapt",
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float | Tensor = 0.01,
        *,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | Tensor | None = 1.0,
        use_nvlamb: bool = False,
        maximize: bool = False,
        master_weights: bool = True,
        backend: str = "accel",
    ) -> None:
        super().__init__(params, given(locals()), backend)

"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from accel.kernels.optimizers import Hypers
from accel.optim import checks
from accel.optim.base import MultiTensorOptimizer


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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "capturable": False,  # torch's word: read by torch.optim from a checkpoint, and by nothing here
            "decoupled_weight_decay": decoupled_weight_decay,
            "max_grad_norm": max_grad_norm,
            "master_weights": master_weights,
        }
        super().__init__(params, defaults, backend)

    def _check(self, group: dict[str, Any]) -> None:
        owner = type(self).__name__
        checks.number(owner, "lr", group["lr"])
        checks.number(owner, "eps", group["eps"])
        checks.number(owner, "weight_decay", group["weight_decay"])
        checks.betas(owner, group["betas"])
        checks.clip_norm(owner, group["max_grad_norm"])

    def _row(self, group: dict[str, Any]) -> Hypers:
        beta1, beta2 = group["betas"]
        return Hypers(
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            float("inf") if group["max_grad_norm"] is None else group["max_grad_norm"],
            sign=-1.0 if group["maximize"] else 1.0,
            decoupled=float(group["decoupled_weight_decay"]),
        )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


class FusedAdamW(FusedAdam):
    """Update by Adam with decoupled weight decay, as `torch.optim.AdamW` does.

        w -= η λ w        m ← β₁ m + (1 - β₁) g        v ← β₂ v + (1 - β₂) g²        w -= η m̂ / (√v̂ + ε)

    Args:
        params: parameters or groups, as torch.optim takes them.
        lr: learning rate η, default 0.001; a tensor is read from the device, so that a captured step follows it.
        betas: β₁ and β₂, default 0.9 and 0.999; numbers or tensors.
        eps: ε, default 1e-8.
        weight_decay: λ, default 0.01.
        amsgrad: divide by the largest v̂ so far, default False.
        maximize: go up instead of down, default False.
        max_grad_norm: clip the norm of all gradients to it, as `clip_grad_norm_` does; None (default) for no clipping.
        master_weights: keep float32 weights of float16 and bfloat16 parameters, in the state. Default True.
        backend: "accel" (default), or "apex" for NVIDIA's kernels.

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
        *,
        maximize: bool = False,
        max_grad_norm: float | Tensor | None = None,
        master_weights: bool = True,
        backend: str = "accel",
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            max_grad_norm=max_grad_norm,
            master_weights=master_weights,
            backend=backend,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True  # checkpoints of older torch don't say so

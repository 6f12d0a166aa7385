"""LAMB: Adam with a rate for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from accel.kernels.optimizers import Hypers
from accel.optim import checks
from accel.optim.base import MultiTensorOptimizer


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
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
            "maximize": maximize,
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
            decoupled=float(group["adam_w_mode"]),
            bias_correction=float(group["bias_correction"]),
            grad_averaging=float(group["grad_averaging"]),
            always_adapt=float(group["use_nvlamb"]),
        )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

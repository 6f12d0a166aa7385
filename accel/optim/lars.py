"""LARS: SGD with a rate for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from accel.kernels.optimizers import Hypers
from accel.optim import checks
from accel.optim.base import MultiTensorOptimizer
from accel.optim.sgd import has_momentum


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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "dampening": dampening,
            "nesterov": nesterov,
            "lr_in_momentum": lr_in_momentum,
            "trust_clip": trust_clip,
            "always_adapt": always_adapt,
            "maximize": maximize,
            "max_grad_norm": max_grad_norm,
            "master_weights": master_weights,
        }
        super().__init__(params, defaults)

    def _check(self, group: dict[str, Any]) -> None:
        owner = type(self).__name__
        checks.number(owner, "lr", group["lr"])
        checks.number(owner, "weight_decay", group["weight_decay"])
        checks.number(owner, "trust_coefficient", group["trust_coefficient"], above=True)
        checks.number(owner, "eps", group["eps"])
        checks.momentum(owner, group)
        checks.clip_norm(owner, group["max_grad_norm"])

    def _row(self, group: dict[str, Any]) -> Hypers:
        return Hypers(
            group["lr"],
            group["momentum"],
            group["dampening"],
            group["eps"],
            group["weight_decay"],
            float("inf") if group["max_grad_norm"] is None else group["max_grad_norm"],
            group["trust_coefficient"],
            sign=-1.0 if group["maximize"] else 1.0,
            always_adapt=float(group["always_adapt"]),
            trust_clip=float(group["trust_clip"]),
            lr_in_momentum=float(group["lr_in_momentum"]),
        )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if has_momentum(group) else ()

    def _counts_steps(self, group: dict[str, Any]) -> bool:
        return has_momentum(group) and (isinstance(group["dampening"], Tensor) or group["dampening"] != 0)

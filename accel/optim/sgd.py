"""SGD with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from accel.kernels.optimizers import Hypers
from accel.optim import checks
from accel.optim.base import MultiTensorOptimizer


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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "max_grad_norm": max_grad_norm,
            "master_weights": master_weights,
        }
        super().__init__(params, defaults, backend)

    def _check(self, group: dict[str, Any]) -> None:
        owner = type(self).__name__
        checks.number(owner, "lr", group["lr"])
        checks.number(owner, "weight_decay", group["weight_decay"])
        checks.momentum(owner, group)
        checks.clip_norm(owner, group["max_grad_norm"])

    def _row(self, group: dict[str, Any]) -> Hypers:
        return Hypers(
            group["lr"],
            group["momentum"],
            group["dampening"],
            weight_decay=group["weight_decay"],
            max_norm=float("inf") if group["max_grad_norm"] is None else group["max_grad_norm"],
            sign=-1.0 if group["maximize"] else 1.0,
        )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if has_momentum(group) else ()

    def _counts_steps(self, group: dict[str, Any]) -> bool:
        # Dampening spares the first step. Without it nothing depends on the step, and torch keeps no counter.
        return has_momentum(group) and (isinstance(group["dampening"], Tensor) or group["dampening"] != 0)


def has_momentum(group: dict[str, Any]) -> bool:
    """Return whether a buffer is kept."""
    return isinstance(group["momentum"], Tensor) or group["momentum"] != 0

"""Muon for the weights of hidden layers, and AdamW for the other parameters, in one optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.errors import InvalidArgument
from accel.kernels.optimizers import muon_update
from accel.optim import checks
from accel.optim.base import MultiTensorOptimizer, column_of, sealed

_ADAMW: dict[str, Any] = {
    **{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "nesterov": False, "maximize": False},
    **{"decoupled_weight_decay": True, "max_grad_norm": None, "master_weights": False},
}
_OPTIONS = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "ns_dtype")
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_NS_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class Muon(MultiTensorOptimizer):
    """Update matrices by Muon, as `torch.optim.Muon` does, all of one shape at once, and other parameters by AdamW.

        b ← μ b + (1 - μ) g        u = (1 - μ) g + μ b        w -= η λ w        w -= η s NS(u)

    NS draws the singular values of u towards 1 in k Newton-Schulz steps; s follows from the shape of w.

    Args:
        params: matrices, or groups. A group with `use_muon=False` takes parameters of any shape; AdamW updates it,
            with options `lr`, `betas`, `eps` and `weight_decay` and the defaults of `torch.optim.AdamW`.
        lr: learning rate η, default 0.001; a tensor on the parameters' device is not waited for.
        weight_decay: λ, default 0.1.
        momentum: μ, default 0.95.
        nesterov: default True; False takes b for u.
        ns_coefficients: of the quintic polynomial, default (3.4445, -4.775, 2.0315).
        eps: least norm that u is divided by, default 1e-7.
        ns_steps: k, default 5.
        adjust_lr_fn: "original" (s = √max(1, rows / columns); None, the default, is the same), or "match_rms_adamw"
            (s = 0.2 √max(rows, columns)).
        ns_dtype: to which the products of NS are rounded, default bfloat16, as torch does for parameters of any dtype;
            float32 and float64 are finer. A CPU that can't multiply bfloat16 does so in float32 and rounds.

    Raises:
        InvalidArgument: if an argument is out of range, or a parameter can't be updated.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = Muon([{"params": [model.weight]}, {"params": [model.bias], "use_muon": False}], lr=0.02)
        >>> model(torch.ones(2, 4)).sum().backward(); optimizer.step()

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025,
    https://arxiv.org/abs/2502.16982.
    """

    kind = "adam"
    switches: ClassVar[dict[str, str]] = {"decoupled_weight_decay": "decoupled"}
    _step_supports_amp_scaling = False  # GradScaler unscales, and skips the step itself

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        values = (weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn, ns_dtype)
        super().__init__(params, {"lr": lr, **dict(zip(_OPTIONS, values, strict=True)), "use_muon": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: `params`, and options other than the optimizer's; `use_muon=False` for AdamW.

        Raises:
            InvalidArgument: if a parameter can't be updated here, or an option does not fit.
        """
        if not param_group.get("use_muon", True):
            param_group = {**_ADAMW, **param_group}
        super().add_param_group(param_group)

    def _check_options(self, group: dict[str, Any], params: list[Any]) -> None:
        owner = type(self).__name__
        if not group["use_muon"]:
            checks.options(owner, group)
            return
        _check_options(owner, group)
        if others := [p for p in params if isinstance(p, Tensor) and p.dim() != 2]:
            raise InvalidArgument(
                f"{owner}: parameters must be matrices. Found: {list(others[0].shape)}. Put it in a group with "
                "use_muon=False, which AdamW updates."
            )

    def _multi_tensor_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["use_muon"]]

    @torch._disable_dynamo  # type: ignore[attr-defined]  # as in the other optimizers
    def _update(self) -> None:
        groups = [group for group in self.param_groups if group["use_muon"]]
        chosen = [[p for p in group["params"] if p.grad is not None] for group in groups]
        checks.gradients(
            type(self).__name__, [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        )
        super()._update()
        for group, params in zip(groups, chosen, strict=True):
            grads = [p.grad for p in params if p.grad is not None]
            buffers = column_of(params, [self.state[p] for p in params], "momentum_buffer")
            for i, (p, buffer, grad) in enumerate(zip(params, buffers, grads, strict=True)):
                if buffer.dtype != grad.dtype:
                    buffers[i] = self.state[p]["momentum_buffer"] = buffer.to(grad.dtype)
            muon_update(params, grads, buffers, lr=group["lr"], **{name: group[name] for name in _OPTIONS})

    def frozen_options(self, group: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return what a captured step of a group does not read from the device: None, for all options."""
        return None

    def _checked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state with AdamW's part sealed; torch.optim.Muon has Muon's groups alone."""
        state = dict(state_dict["state"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):  # torch counts them
            mark = "ns_coefficients" if group["use_muon"] else "betas"
            if mark not in saved or saved.get("use_muon", True) != group["use_muon"]:
                raise InvalidArgument(
                    f"{type(self).__name__}: the state is of another optimizer, or of groups with another use_muon. "
                    f"Found: a group with {', '.join(sorted(set(saved) - {'params'}))}."
                )
            if not group["use_muon"]:
                state.update((key, sealed(state[key])) for key in saved["params"] if key in state)
        return {**state_dict, "state": state}


def _check_options(owner: str, group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        checks.number(owner, name, group[name])
    checks.number(owner, "momentum", group["momentum"])
    checks.number(owner, "ns_steps", group["ns_steps"], below=100)
    if len(group["ns_coefficients"]) != 3:
        raise InvalidArgument(f"{owner}: ns_coefficients must be three numbers. Found: {group['ns_coefficients']!r}.")
    for name, allowed in (("adjust_lr_fn", _ADJUSTMENTS), ("ns_dtype", _NS_DTYPES)):
        if group[name] not in allowed:
            known = ", ".join(map(str, allowed))
            raise InvalidArgument(f"{owner}: {name} must be one of {known}. Found: {group[name]!r}.")

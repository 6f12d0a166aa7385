"""Options of every optimizer, parameters of every shape, and a run beside the published formula in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accel.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, MultiTensorOptimizer
from tests.kernels.optimizer_oracle import update_ref

OPTIONS: list[tuple[type[MultiTensorOptimizer], dict[str, Any]]] = [
    (FusedSGD, {"lr": 0.05}),
    (FusedSGD, {"lr": 0.05, "weight_decay": 0.1, "maximize": True}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "max_grad_norm": 1.0}),
    (FusedAdam, {"lr": 0.01}),
    (FusedAdam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (FusedAdam, {"lr": 0.01, "betas": (0.0, 0.9), "eps": 1e-3, "maximize": True, "weight_decay": 0.1}),
    (FusedAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (FusedAdamW, {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 2.0}),
    (FusedAdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    (FusedLAMB, {"lr": 0.01}),
    (FusedLAMB, {"lr": 0.01, "max_grad_norm": None, "bias_correction": False, "maximize": True}),
    (FusedLAMB, {"lr": 0.01, "adam_w_mode": False, "grad_averaging": False}),
    (FusedLAMB, {"lr": 0.01, "weight_decay": 0.0, "use_nvlamb": True}),
    (FusedLARS, {"lr": 0.5, "weight_decay": 0.01, "trust_coefficient": 0.02}),
    (FusedLARS, {"lr": 0.5, "weight_decay": 0.01, "trust_coefficient": 0.02, "nesterov": True, "max_grad_norm": 3.0}),
    (FusedLARS, {"lr": 0.5, "weight_decay": 0.01, "trust_coefficient": 0.02, "lr_in_momentum": False}),
    (FusedLARS, {"lr": 0.01, "trust_clip": True, "always_adapt": True, "trust_coefficient": 0.02, "maximize": True}),
    (FusedLARS, {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.01}),
    (FusedLARS, {"lr": 0.05, "dampening": 0.5, "weight_decay": 0.01, "trust_coefficient": 0.2}),
]


def name_of(case: tuple[type[MultiTensorOptimizer], dict[str, Any]]) -> str:
    kind, options = case
    words = " ".join(f"{name}={value}" for name, value in options.items() if name != "lr")
    return f"{kind.__name__} {words}".strip()


# A matrix with an odd number of elements; a number; nothing; more than a block of 1,024, and than a chunk of 8,192.
SHAPES = [(3, 5), (), (0, 4), (1030,), (8200,)]


def tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


@dataclass
class Pair:
    """One optimizer on parameters of some dtypes, and the formula on the same numbers in float64.

    The parameters stand in two groups: the second has another rate, and no weight decay.
    """

    kind: type[MultiTensorOptimizer]
    options: dict[str, Any]
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    shapes: Sequence[tuple[int, ...]] = tuple(SHAPES)
    device: str = "cpu"
    params: list[nn.Parameter] = field(init=False)
    exact: list[nn.Parameter] = field(init=False)
    largest: float = 0.0
    """Of all weights so far."""

    def __post_init__(self) -> None:
        values = [x for i, dtype in enumerate(self.dtypes) for x in tensors(self.shapes, dtype, i)]
        self.params = [nn.Parameter(x.to(self.device)) for x in values]
        self.exact = [nn.Parameter(x.to(torch.float64, copy=True)) for x in values]
        self.ours = self._make(self.params)
        self.formula = self._make(self.exact)
        self.formula._updater = lambda batches, scaling: update_ref(self.kind.kind, batches, scaling)  # type: ignore[assignment]
        self._draw = torch.Generator().manual_seed(77)

    def _make(self, params: list[nn.Parameter]) -> MultiTensorOptimizer:
        second = {"params": params[1::2], "lr": self.options["lr"] / 2, "weight_decay": 0.0}
        return self.kind([{"params": params[::2]}, second], **self.options)

    def step(self, number: int, scale: float | None = None) -> None:
        """Run one step; every third parameter has no gradient in every third step."""
        for i, (param, exact) in enumerate(zip(self.params, self.exact, strict=True)):
            grad = torch.randn(param.shape, generator=self._draw).add_(0.1) * (scale or 1.0)
            grad = grad.to(param.dtype)
            left_out = (i + number) % 9 == 0
            param.grad = None if left_out else grad.to(self.device)
            exact.grad = None if left_out else grad.to(torch.float64, copy=True)
        for optimizer, device in ((self.ours, self.device), (self.formula, "cpu")):
            if scale is not None:
                optimizer.grad_scale = torch.full((1,), scale, device=device)  # type: ignore[attr-defined]
            optimizer.step()
        self.largest = max([self.largest, *(float(p.detach().abs().max()) for p in self.exact if p.numel())])

    def check(self, steps: int, k: float = 1.0) -> None:
        """Compare weights: each step rounds them, and what is added to them, a few times."""
        # Of the norm of all gradients, those that are not float64 give a sum in float32.
        clips, kinds = self.ours.defaults["max_grad_norm"] is not None, {*self.dtypes} - {torch.float64}
        shared = torch.finfo(torch.float32).eps if clips and kinds else 0.0
        for param, exact in zip(self.params, self.exact, strict=True):
            weight = self.ours.state[param].get("master", param) if param in self.ours.state else param
            eps = max(torch.finfo(weight.dtype).eps, shared)
            apart = (weight.detach().double().cpu() - exact.detach()).abs()
            assert not apart.isnan().any()
            assert float(apart.max() if apart.numel() else 0.0) <= k * steps * eps * max(self.largest, 1.0)
            if weight.dtype != param.dtype:
                assert torch.equal(weight.to(param.dtype), param)
        for param, exact in zip(self.params, self.exact, strict=True):
            ours, formula = (o.state.get(p, {}) for o, p in ((self.ours, param), (self.formula, exact)))
            assert {name for name in ours if name != "master"} == {name for name in formula if name != "master"}
            if "step" in ours:
                assert float(ours["step"]) == float(formula["step"])

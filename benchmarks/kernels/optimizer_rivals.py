"""What optimizers are raced against: torch's, and loops over parameters for those that torch has not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD

Step = Callable[[], Any]

OURS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (FusedSGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}),
    "adamw": (FusedAdamW, {"lr": 1e-3}),
    "lamb": (FusedLAMB, {"lr": 1e-3, "max_grad_norm": None}),
    "lars": (FusedLARS, {"lr": 1e-1, "weight_decay": 1e-4}),
}
_TORCHS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def shapes(numel: int) -> list[tuple[int, ...]]:
    """Return the shapes of a transformer's layers, as many as make about `numel` parameters, the last ones cut off.

    Each layer has two weights of 768 x 3,072 and four of 768 x 768, and ten vectors: that of BERT's base model.
    """
    layer: list[tuple[int, ...]] = [*[(768, 3072)] * 2, *[(768, 768)] * 4, *[(768,)] * 9, (3072,)]
    chosen: list[tuple[int, ...]] = []
    left = numel
    while left > 0:
        shape = layer[len(chosen) % len(layer)]
        size = int(torch.Size(shape).numel())
        chosen.append(shape if size <= left else (left,))
        left -= size
    return chosen


def params_of(own_shapes: Sequence[tuple[int, ...]], device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return parameters with gradients, the same numbers each time."""
    draw = torch.Generator(device).manual_seed(0)
    params = [
        nn.Parameter(torch.randn(shape, device=device, generator=draw).mul_(0.02).to(dtype)) for shape in own_shapes
    ]
    for p in params:
        p.grad = torch.randn(p.shape, device=device, generator=draw).mul_(1e-3).to(dtype)
    return params


def torchs(name: str, params: list[nn.Parameter], **paths: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer with the options of ours."""
    options = {**OURS[name][1], **paths}
    if name == "sgd":
        options.pop("capturable", None)
    optimizer: torch.optim.Optimizer = _TORCHS[name](params, **options)
    return optimizer


def loop(name: str, params: list[nn.Parameter]) -> Step:
    """Return a step of LAMB or LARS that goes from parameter to parameter, waiting for none."""
    options = OURS[name][1]
    states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    count = torch.zeros((), device=params[0].device)

    @torch.no_grad()
    def lamb() -> None:
        count.add_(1)
        for p, (m, v) in zip(params, states, strict=True):
            assert p.grad is not None
            m.lerp_(p.grad, 0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            update = (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)).sqrt() + 1e-6)
            update.add_(p, alpha=0.01)
            p.sub_(update * (options["lr"] * _ratio(p.norm(), update.norm())))

    @torch.no_grad()
    def lars() -> None:
        for p, (buffer, _) in zip(params, states, strict=True):
            assert p.grad is not None
            weight, grad = p.norm(), p.grad.norm()
            decay = options["weight_decay"]
            ratio = _ratio(0.001 * weight, grad + decay * weight + 1e-8)
            buffer.mul_(0.9).add_(p.grad.add(p, alpha=decay) * (options["lr"] * ratio))
            p.sub_(buffer)

    return lamb if name == "lamb" else lars


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where((above > 0) & (below > 0), above / below, 1.0)


def unscale_clip_step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, scale: Tensor) -> Step:
    """Return what GradScaler, clip_grad_norm_ and torch's fused step launch for one step."""
    found_inf = torch.zeros((), device=scale.device)
    grads = [p.grad for p in params if p.grad is not None]

    def step() -> None:
        found_inf.zero_()
        inverse = scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
        nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.found_inf, optimizer.grad_scale = found_inf, None  # type: ignore[attr-defined]
        optimizer.step()

    return step

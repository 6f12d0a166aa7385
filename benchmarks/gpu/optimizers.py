"""Optimizers on a GPU: 100 M parameters of a transformer, ours against torch's fused ones and loops.

Times are of the device alone: replays of a graph with eight steps in it. 1.6 GB and more are read and written, so that
no cache holds anything. Nothing is timed whose weights differ from the rival's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from accel.kernels.optimizers import cost
from accel.kernels.support import Cost
from benchmarks.gpu.device_times import launched, replayed
from benchmarks.gpu.rows import Figures, bytes_per_s, growing, tried
from benchmarks.kernels.optimizer_rivals import OURS, Step, loop, params_of, shapes, torchs, unscale_clip_step
from benchmarks.render import Row

NUMEL = 100_000_000
SCALE = 1024.0


@dataclass(frozen=True)
class Race:
    """A step of ours, the least work of it, and rivals, each on parameters of its own."""

    name: str
    ours: Step
    cost: Cost
    params: list[nn.Parameter]
    rivals: dict[str, tuple[Step, list[nn.Parameter]]] = field(default_factory=dict)

    def apart(self) -> float:
        """Return how far the weights are apart after a step of each, over the largest weight."""
        self.ours()
        distances = []
        for step, others in self.rivals.values():
            step()
            pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(self.params, others, strict=True)]
            distances.append(max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs))
        return max(distances, default=0.0)


def races(device: str, numel: int = NUMEL) -> Iterator[tuple[str, Callable[[], Race]]]:
    """Yield each race's name, and what makes it."""
    for name in ("adamw", "sgd"):
        yield name, partial(_against_torch, name, device, numel)
    yield "unscale, clip, adamw", partial(_scaled, device, numel)
    yield "adamw bf16 master", partial(_masters, device, numel)
    for name in ("lamb", "lars"):
        yield name, partial(_against_a_loop, name, device, numel)


def _against_torch(name: str, device: str, numel: int) -> Race:
    params, others = (params_of(shapes(numel), device, torch.float32) for _ in range(2))
    kind, options = OURS[name]
    captured = {"capturable": True} if device == "cuda" else {}
    theirs = torchs(name, others, fused=True, **captured)
    least = cost("adam" if name == "adamw" else "sgd", numel)
    return Race(name, kind(params, **options).step, least, params, {"torch fused": (theirs.step, others)})


def _scaled(device: str, numel: int) -> Race:
    params, others = (params_of(shapes(numel), device, torch.float32) for _ in range(2))
    kind, options = OURS["adamw"]
    optimizer = kind(params, **options, max_grad_norm=1.0)
    optimizer.grad_scale = torch.full((1,), SCALE, device=device)
    captured = {"capturable": True} if device == "cuda" else {}
    # The rival changes its gradients in place: after a few steps they are tiny, which takes the same time.
    theirs = unscale_clip_step(others, torchs("adamw", others, fused=True, **captured), optimizer.grad_scale)
    least = cost("adam", numel, norm=True)
    return Race("unscale, clip, adamw", optimizer.step, least, params, {"torch in three": (theirs, others)})


def _masters(device: str, numel: int) -> Race:
    params = params_of(shapes(numel), device, torch.bfloat16)
    kind, options = OURS["adamw"]
    return Race("adamw bf16 master", kind(params, **options).step, cost("adam", numel, torch.bfloat16), params)


def _against_a_loop(name: str, device: str, numel: int) -> Race:
    params, others = (params_of(shapes(numel), device, torch.float32) for _ in range(2))
    kind, options = OURS[name]
    least = cost("lamb" if name == "lamb" else "lars", numel)
    return Race(name, kind(params, **options).step, least, params, {"loop": (loop(name, others), others)})


def rows(bandwidth: float) -> Iterator[Row]:
    """Yield a row for each race."""
    for name, make in races("cuda"):
        yield tried({"op": name, "elements": NUMEL}, partial(measured, make, bandwidth))
        torch.cuda.empty_cache()


def measured(make: Callable[[], Race], bandwidth: float) -> Row:
    """Time ours and its rivals."""
    race = make()
    apart = race.apart()
    if apart > 1e-4:
        return {"failed": f"weights are {apart:.1e} apart: nothing is timed"}
    ours = replayed([race.ours])
    rivals = {name: replayed([step]) for name, (step, _) in race.rivals.items()}
    # A loop's launches are what it costs: a caller waits for them.
    waited = {name: launched(step) for name, (step, _) in race.rivals.items() if name == "loop"}
    called = launched(race.ours)
    floor_ms = race.cost.seconds(math.inf, bandwidth) * 1e3
    return {
        "ms": called._asdict(),
        "device_ms": ours._asdict(),
        "gb_per_s": race.cost.bytes / ours.median / 1e6,
        "roofline": floor_ms / ours.median,
        "rivals_device_ms": {name: timing._asdict() for name, timing in rivals.items()},
        "speedup": {name: timing.median / ours.median for name, timing in rivals.items()},
        "speedup_called": {name: timing.median / called.median for name, timing in waited.items()},
    }


def everything() -> Figures:
    """Measure; yield the rows so far."""
    yield from growing("rows", rows(bytes_per_s()))

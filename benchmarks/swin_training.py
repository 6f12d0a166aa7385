"""Swin-T of timm trained on a GPU in mixed precision: plain, on the fused op, compiled, and both.

    python -m benchmarks.gpu.sections training FILE

Batch 128, AdamW, bf16. Losses over 200 steps of eager, of eager again and of fused; then step times in turns. "Eager
again" starts from weights that are one rounding off: on a device that repeats its bits it would tell nothing otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import spread
from benchmarks.gpu.rows import Figures
from benchmarks.spread import extremes

BATCH, STEPS, LAST = 128, 200, 20
TURNS, TURN_STEPS = 8, 4


def fused(model: nn.Module) -> nn.Module:
    """Switch every attention of timm's Swin to the fused op.

    Raises:
        RuntimeError: if one was left alone; the row would be eager in part.
    """
    from accel.kernels.window_dropins import fuse_window_attention

    kinds = ("WindowAttention", "SwinTransformerBlock")
    wanted = [name for name, module in model.named_modules() if type(module).__name__ in kinds]
    found = fuse_window_attention(model)
    left = [name for name in wanted if name not in found.names]
    if left or not wanted:
        why = "; ".join(f"{name}: {reason}" for name, reason in found.refused.items()) or "they were not recognised"
        raise RuntimeError(f"{len(left)} of {len(wanted)} blocks and attentions are not on the fused op: {why}")
    return model


class Trainer:
    """One model and what trains it, from the same weights and on the same batches as every other."""

    def __init__(self, model: nn.Module, batch: int, size: int, device: str = "cuda") -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        draw = torch.Generator(device).manual_seed(1)
        self.images = [torch.randn(batch, 3, size, size, device=device, generator=draw) for _ in range(4)]
        self.labels = [torch.randint(1000, (batch,), device=device, generator=draw) for _ in range(4)]
        self.device, self.done = device, 0
        self.train: Callable[[Tensor, Tensor], Tensor] = self.train_on

    def step(self) -> Tensor:
        """Train one step, and return its loss, which is not waited for."""
        turn = self.done % len(self.images)
        self.done += 1
        return self.train(self.images[turn], self.labels[turn])

    def train_on(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train on a batch, and return its loss."""
        with torch.autocast(self.device, torch.bfloat16):
            loss = F.cross_entropy(self.model(images).float(), labels)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def losses(self, steps: int) -> list[float]:
        """Train, and return the losses."""
        return [float(loss) for loss in torch.stack([self.step() for _ in range(steps)]).tolist()]

    def turn_ms(self, steps: int) -> float:
        """Return the ms of a step."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps * 1e3


def model(kind: str) -> nn.Module:
    """Return timm's Swin-T with seeded weights: "eager", "eager again", "fused", "compile" or "both"."""
    import timm

    torch.manual_seed(0)
    made: nn.Module = timm.create_model("swin_tiny_patch4_window7_224", drop_path_rate=0.0).cuda()
    if kind == "eager again":
        nudge(made)
    if kind in ("fused", "both"):
        fused(made)
    if kind in ("compile", "both"):
        made.compile(dynamic=False, fullgraph=True)  # what would run uncompiled is an error
    return made


def nudge(model: nn.Module) -> None:
    """Move every weight by one rounding of fp32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps)


def everything() -> Figures:
    """Train; yield each figure as it is found."""
    trainers: dict[str, Trainer] = {}
    losses: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for kind in ("eager", "fused", "eager again", "compile", "both"):
        try:
            trainers[kind] = Trainer(model(kind), BATCH, 224)
            curve = trainers[kind].losses(3 if kind in ("compile", "both") else STEPS)
        except Exception as error:  # one way that fails is a result, the others are timed
            trainers.pop(kind, None)
            failed[kind] = f"{type(error).__name__}: {str(error)[:300]}"
            yield "failed", failed
            continue
        if len(curve) == STEPS:
            losses[kind] = curve
            yield "losses", {name: values[:: STEPS // LAST] for name, values in losses.items()}
            yield "last_loss", {name: sum(values[-LAST:]) / LAST for name, values in losses.items()}
        if kind == "eager again":
            del trainers[kind]
        elif kind != "eager":
            yield from step_times(trainers)


def step_times(trainers: dict[str, Trainer]) -> Figures:
    """Time all in turns; yield the times, and how many times as fast as eager each is: median, least, most."""
    times = in_turns(trainers)
    yield "step_ms", {name: sorted(values) for name, values in times.items()}
    timed = [(before, after) for before, after in PAIRS if before in times and after in times]
    yield "speedup", {f"{after} over {before}": ratios(times, before, after) for before, after in timed}


def in_turns(trainers: dict[str, Trainer]) -> dict[str, list[float]]:
    """Return the ms of a step of each turn, by trainer."""
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(TURNS):
        for name, trainer in trainers.items():
            times[name].append(trainer.turn_ms(TURN_STEPS))
    return times


PAIRS = (("eager", "fused"), ("eager", "compile"), ("eager", "both"), ("compile", "fused"), ("compile", "both"))
"""(before, after)."""


def ratios(times: dict[str, list[float]], before: str, after: str) -> list[float]:
    """Return how many times as fast, turn by turn: median, least, most."""
    return list(extremes(spread.ratios(times[before], times[after])))

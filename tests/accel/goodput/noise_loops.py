"""Training loops with a noise meter, and problems whose noise scale is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel.goodput.noise_meter import NoiseMeter
from accel.goodput.noise_scale import NoiseScale, NoiseSums

Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Callable[[int], tuple[Tensor, Tensor]]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 3e-4),
    "momentum": lambda p: torch.optim.SGD(p, 3e-4, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-4, betas=(0.9, 0.95), amsgrad=True),
}


class Kept(NoiseScale):
    """Statistics that keep all sums."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[NoiseSums] = []

    def update(self, sums: NoiseSums, samples: float | None = None) -> bool:
        self.all.append(sums)
        return super().update(sums, samples)


def averaged(steps: Iterable[NoiseSums], confidence: float = 0.95) -> NoiseScale:
    """Return statistics of all these steps: none is so old that it is dropped."""
    noise = NoiseScale(confidence)
    for sums in steps:
        noise.update(sums, samples=0 if noise.measured else 1)
    return noise


class StepClock:
    """A clock that goes on by a second in each step and stands still while the meter works: every other step is due."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def with_meter(model: nn.Module) -> tuple[Optimizer, Kept, NoiseMeter]:
    """Return an optimizer under which the weights stay, and what measures the model and keeps the measurements."""
    optimizer, noise = torch.optim.SGD(model.parameters(), 0.0), Kept()
    return optimizer, noise, meter_for(model, optimizer, noise=noise)


def meter_for(model: nn.Module, *optimizers: Optimizer, **options: Any) -> NoiseMeter:
    """Return a meter that measures every other step of `train`."""
    meter = NoiseMeter(model, list(optimizers), **options)
    meter.clock = StepClock()
    return meter


def train(
    meter: NoiseMeter,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    loss: Loss,
    *,
    steps: int,
    accumulation: int = 1,
    between: Callable[[], None] = lambda: None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    update: Callable[[], Any] | None = None,
) -> Iterator[int]:
    """Train, and yield after each step.

    Args:
        between: runs between backward and update.
        around: is entered for the model's call.
        backward: takes the loss.
        update: in place of the optimizer's step; it passes the meter each optimizer that is about to step.
    """

    def plain_update() -> None:
        meter.before_update(optimizer)
        optimizer.step()

    for step in range(steps):
        meter.begin_step()
        optimizer.zero_grad()
        for micro in range(accumulation):
            x, y = batches(step * accumulation + micro)
            meter.begin_batch(len(x))
            with around():
                output = meter.call(model, (x,), {}) if meter.wants_call else model(x)
            backward(loss(output, y) / accumulation)
        between()
        if isinstance(meter.clock, StepClock):
            meter.clock.now += 1
        (update or plain_update)()
        meter.end_step()
        yield step


def finish(steps: Iterator[int]) -> None:
    for _ in steps:
        pass


class Regression:
    """y = x · 0 + normal noise, x normal, the loss (x · w - y)² / 2 of one sample.

    With e = w - w*: g_i = x_i (x_i · e - noise), so
        μ = e,   E‖g‖² = (d + 2) ‖e‖² + d s²,   tr(Σ) = (d + 1) ‖e‖² + d s²
        with weights P:  ‖P μ‖² = ‖P e‖²,  E‖P g‖² = tr(P²) (‖e‖² + s²) + 2 ‖P e‖²
    """

    def __init__(self, dimensions: int, noise: float, seed: int = 0) -> None:
        self.dimensions, self.noise = dimensions, noise
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, self.dimensions, generator=self.generator)
        return x, self.noise * torch.randn(size, generator=self.generator)

    def model(self, length: float) -> nn.Linear:
        """Return one whose weights are so far from the optimum."""
        model = nn.Linear(self.dimensions, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(length / math.sqrt(self.dimensions))
        return model

    def truth(self, error: Tensor, denominators: Tensor | None = None) -> tuple[float, float]:
        """Return ‖P μ‖² and tr(P Σ P) at an error e."""
        p = torch.ones_like(error) if denominators is None else 1 / denominators
        error, p = error.double(), p.double()
        mean = float((p * error).square().sum())
        square = float(p.square().sum() * (error.square().sum() + self.noise**2)) + 2 * mean
        return mean, square - mean


def half_square(output: Tensor, y: Tensor) -> Tensor:
    return (output.squeeze(1) - y).square().mean() / 2


def per_sample_truth(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return ‖ḡ‖² and tr of the samples' covariance (1/n), from each sample's own gradient, in float64."""
    functional = torch.func.functional_call
    wide = {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}

    def one(parameters: dict[str, Tensor], x_one: Tensor, y_one: Tensor) -> Tensor:
        return loss(functional(model, parameters, (x_one[None],)), y_one[None])

    gradients = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(wide, x.double(), y)
    flat = torch.cat([each.flatten(1) for each in gradients.values()], dim=1)
    mean = flat.mean(0)
    return float(mean.square().sum()), float((flat - mean).square().sum(1).mean())


def sums_of_parts(
    squares: Sequence[float], mean_square: float, sizes: Sequence[float], weights: Sequence[float] | None = None
) -> NoiseSums:
    """Return the sums of a step of weighted parts, by definition: ‖S_k‖² of each, ‖G‖², samples, and w_k."""
    weights = [size / math.fsum(sizes) for size in sizes] if weights is None else weights
    small = math.fsum(w / b for w, b in zip(weights, sizes, strict=True))
    big = math.fsum(w * w / b for w, b in zip(weights, sizes, strict=True))
    part_square = math.fsum(w * square for w, square in zip(weights, squares, strict=True))
    return NoiseSums(part_square, mean_square, 1 / small, 1 / big)

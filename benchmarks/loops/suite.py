"""What a loop of the suite is, and how one is run and compared."""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Wrap = Callable[..., tuple[Any, ...]]
"""`wrap(model, loader)` or `wrap(model, loader, optimizer)`: gives back the same things, in the same order."""

Steps = Generator[tuple[Any, Any], None, None]
"""One `(loss, batch)` per training step."""


def plain(*args: Any) -> tuple[Any, ...]:
    """The wrap that does nothing."""
    return args


@dataclass(frozen=True)
class Outcome:
    """What a run gave: everything that must not depend on `wrap`."""

    losses: list[float]
    """Loss of each training step."""
    state: dict[str, Tensor]
    """Copy of the state dict of every model trained, each key after the model's name: `model.0.weight`."""
    optimizer_state: list[dict[str, Any]]
    """Copy of the state dict of every optimizer (and gradient scaler) of the loop."""
    rng: Tensor
    """State of torch's CPU random generator right after the last step."""
    training: bool
    """Whether all models that are trained were in training mode right after the last step."""
    seen: list[int]
    """Checksum of the bytes of each step's batch, in the order in which the loop got them."""
    notes: dict[str, list[float]]
    """What else the loop wrote down, such as validation losses; empty for most."""


@dataclass
class Job:
    """What a loop is given, and where it leaves what `run` reads at the end."""

    steps: int
    seed: int
    wrap: Wrap
    models: dict[str, Any] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    notes: dict[str, list[float]] = field(default_factory=dict)

    @property
    def epochs(self) -> range:
        """Epochs enough for `steps`; bounded, so that a loader that gives nothing cannot make a loop hang."""
        return range(self.steps)

    def keep(self, *optimizers: Any, **models: Any) -> None:
        """Name what the loop trains."""
        self.optimizers.extend(optimizers)
        self.models.update(models)

    def classify(self, model: Any, loader: Any, optimizer: Any) -> Steps:
        """Train a classifier: the plainest of all loops."""
        self.keep(optimizer, model=model)
        for _ in self.epochs:
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                yield loss, (x, y)


@dataclass(frozen=True)
class Loop:
    """A training loop of the suite."""

    name: str
    make: Callable[[Job], Steps]
    """Starts the loop; each `next` on what it gives does one training step."""
    summary: str
    """What is particular about it, in one line."""


LOOPS: dict[str, Loop] = {}


def loop(summary: str) -> Callable[[Callable[[Job], Steps]], Callable[[Job], Steps]]:
    """Add a loop to `LOOPS` under the name of its function."""

    def add(make: Callable[[Job], Steps]) -> Callable[[Job], Steps]:
        LOOPS[make.__name__] = Loop(make.__name__, make, summary)
        return make

    return add


def run(
    name: str, *, steps: int, seed: int = 0, wrap: Wrap = plain, on_step: Callable[[int], None] | None = None
) -> Outcome:
    """Train loop `name` for `steps` training steps; `on_step(i)` is called after each."""
    random.seed(seed)
    torch.manual_seed(seed)
    job = Job(steps=steps, seed=seed, wrap=wrap)
    losses: list[float] = []
    seen: list[int] = []
    with closing(LOOPS[name].make(job)) as training:
        for i, (loss, batch) in zip(range(steps), training, strict=False):
            losses.append(loss.item() if isinstance(loss, Tensor) else loss)
            seen.append(checksum(batch))
            if on_step is not None:
                on_step(i)
        if len(losses) < steps:
            raise RuntimeError(f"loop {name!r} ended after {len(losses)} of {steps} steps")
        return _outcome(job, losses, seen)


def _outcome(job: Job, losses: list[float], seen: list[int]) -> Outcome:
    states = {name: model.state_dict() for name, model in job.models.items()}
    return Outcome(
        losses=losses,
        state={f"{name}.{key}": value.clone() for name, state in states.items() for key, value in state.items()},
        optimizer_state=[copy.deepcopy(optimizer.state_dict()) for optimizer in job.optimizers],
        rng=torch.get_rng_state(),
        training=all(model.training for model in job.models.values()),
        seen=seen,
        notes=job.notes,
    )


def checksum(batch: Any, start: int = 0) -> int:
    """CRC of all tensors of a batch, of any nesting; depends on values, order, type and shape, not on strides."""
    if isinstance(batch, Tensor):
        start = zlib.crc32(f"{batch.dtype}{tuple(batch.shape)}".encode(), start)
        return zlib.crc32(batch.detach().cpu().reshape(-1).view(torch.uint8).numpy().data, start)
    for part in batch.values() if isinstance(batch, dict) else batch:
        start = checksum(part, start)
    return start

"""Loops over a model that is captured on the stand-in, compared with the eager one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from accel.graphs import CapturedStep, ModelCalls, capture
from accel.profiler.loop import callslot
from tests.accel.graphs.tape import TapeRecorder


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


class Tied(nn.Module):
    """Has a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh())
        return out


def batch(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def taped(model: Any, **options: Any) -> ModelCalls:
    """Capture a model's calls on a tape."""
    calls = ModelCalls(model, recorder=lambda device: TapeRecorder(), **options)
    callslot.fill(model, callslot.SlotCall(calls.wrap(model._call_impl)))
    return calls


Loop = Callable[[Any, torch.optim.Optimizer], list[Any]]


def both(loop: Loop, make: Callable[[], Any] = network, **options: Any) -> ModelCalls:
    """Run a loop with the eager and with the captured model, and compare all bits."""

    def new() -> Any:
        torch.manual_seed(0)
        return make()

    def outcome(model: Any) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False, momentum=0.9)
        torch.manual_seed(1)
        results = loop(model, optimizer)
        gradients = [p.grad for p in model.parameters()]
        return tree_leaves([results, gradients, list(model.state_dict().values()), torch.get_rng_state()])

    expected = outcome(new())
    model = new()
    calls = taped(model, **options)
    found = outcome(model)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    return calls


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int, rows: int = 8) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(batch(rows, seed)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def loop_of(*parts: int | Callable[[Any], object]) -> Loop:
    """Return a loop of so many steps, with changes of the model between them."""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = list[Any]()
        for part in parts:
            if isinstance(part, int):
                results += [step(model, optimizer, len(results) + number) for number in range(part)]
            else:
                part(model)
        return results

    return loop


def taped_step(step: Any, **options: Any) -> CapturedStep:
    """Capture a step on a tape."""
    captured = capture(step, **options)
    captured._recorder = TapeRecorder()
    return captured


def both_steps(
    make: Callable[[], Any],
    optimizer_of: Callable[[Any], torch.optim.Optimizer] | None = None,
    change: Callable[[Any, int], object] = lambda model, number: None,
    **options: Any,
) -> CapturedStep:
    """Run a step of a model eagerly and captured, compare all bits, and return the captured one.

    Args:
        make: makes the model.
        optimizer_of: makes an optimizer for its parameters, which steps on the mean square; default a call alone.
        change: is given the model and the number of the step that follows.
    """

    def outcome(captured: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = make()
        optimizers = [] if optimizer_of is None else [optimizer_of(model.parameters())]
        run: Any = squares_step(model, *optimizers) if optimizers else lambda x: model(x)
        run = taped_step(run, modules=[model], optimizers=optimizers, **options) if captured else run
        results = []
        for number in range(10):
            change(model, number)
            results.append(run(batch(8, number)).detach())
        own = [value for value in vars(model).values() if isinstance(value, Tensor | int)]
        return tree_leaves([results, own, list(model.state_dict().values())]), run

    (expected, _), (found, run) = outcome(captured=False), outcome(captured=True)
    assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(found, expected, strict=True))
    return run  # type: ignore[no-any-return]


def squares_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """Return a training step whose loss is the mean square of the outputs."""

    def whole(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return whole

"""Replays of a recorded call, plainly and otherwise, calls under a watch, and a strategy that acts as it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accel.guard import guard
from accel.guard.guard import Comparison, Recording
from accel.guard.watch import Watch
from accel.run import Run
from accel.run.gate import Call, Gate
from accel.strategies.base import Exactness, Strategy

CPU = torch.device("cpu")
Wrap = Callable[[Any], Any]


def replayed_both_ways(
    model: nn.Module, wrap: Wrap, recording: Recording, exactness: Exactness = Exactness.REORDERED
) -> Comparison:
    """Replay a call plainly and as `wrap` makes it, each from the state that was recorded, and compare the two."""
    with guard.untouched(model, CPU):
        recording.before.restore()
        plain = guard.replay(model, model, recording)
        recording.before.restore()
        candidate = guard.replay(model, wrap(model), recording)
    return guard.compare(plain, candidate, exactness)


def recorded(model: nn.Module, *given: Any, loss: Callable[[Any], Tensor] | None = None) -> Recording:
    """Record one step of a loop, with a backward pass if there is a loss of the outputs."""
    recording = guard.record(model, CPU, given, {})
    outputs = model(*given)
    if loss is not None:
        recording.listen(outputs)
        loss(outputs).backward()
    return recording


def mean_square(outputs: Tensor) -> Tensor:
    return outputs.abs().square().mean()


def broken(model: nn.Module, wrap: Callable[[Call], Call]) -> tuple[Gate, Watch, list[str]]:
    """A model under a strategy that acts as `wrap` says, its watch, and the reasons why it was switched off."""
    gate, trips = Gate(model, ["broken"]), list[str]()

    def trip(why: str) -> None:
        trips.append(why)
        gate.remove("broken")

    gate.add("broken", wrap)
    return gate, Watch(gate, CPU, trip), trips


def same(call: Call) -> Call:
    """Change nothing."""
    return lambda *args, **kwargs: call(*args, **kwargs)


def gives_nan(call: Call) -> Call:
    """Spoil the input, so that all that the model computes from it is spoiled, too."""
    return lambda x: call(x * float("nan"))


class Acting(Strategy):
    """Makes calls as its class says; as they are, if that says nothing."""

    name = "acting"
    summary = "nothing"
    treats = frozenset()
    exactness = Exactness.REORDERED
    act: Callable[[Call], Call] = staticmethod(lambda call: call)

    def refusal(self, run: Run) -> str:
        return ""

    def enable(self, run: Run, setting: Any) -> None:
        run.gate.add(self.name, self.act)

    def disable(self, run: Run) -> None:
        run.gate.remove(self.name)

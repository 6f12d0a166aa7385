"""What the watch looks at lies anywhere and is of any kind: what can't be judged is passed over, and nothing raises."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accel
from accel.guard import watch as watching
from accel.guard.watch import Watch
from accel.run.gate import Call, Gate
from tests.accel.loops import make_loader

CPU = torch.device("cpu")


class WithPlaceholder(nn.Module):
    """Returns a tensor of another device beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), torch.zeros((), device="meta")


def broken(model: nn.Module, wrap: Callable[[Call], Call]) -> tuple[Gate, Watch, list[str]]:
    """A model under a strategy that acts as `wrap` says, its watch, and the reasons why it was switched off."""
    gate, trips = Gate(model, ["broken"]), list[str]()

    def trip(why: str) -> None:
        trips.append(why)
        gate.remove("broken")

    gate.add("broken", wrap)
    return gate, Watch(gate, CPU, trip), trips


def test_a_model_with_outputs_on_two_devices_trains(only_quick: None) -> None:
    model: Any = WithPlaceholder()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model, loader, optimizer = accel.optimize(model, make_loader(), optimizer, allow="exact", budget=60)
    for x, target in loader:
        optimizer.zero_grad()
        outputs, _ = model(x)
        nn.functional.cross_entropy(outputs, target % 3).backward()
        optimizer.step()
    accel.undo(model)


def test_norms_are_brought_to_one_device_before_they_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU; with one, the sum is taken there, so that the host needn't wait."""
    stacked: list[list[torch.device]] = []
    stack = torch.stack

    def noting(norms: list[Tensor]) -> Tensor:
        stacked.append([norm.device for norm in norms])
        return stack(norms)

    monkeypatch.setattr(torch, "stack", noting)
    watching._total([torch.ones(()), torch.ones((), device="meta"), torch.ones((), dtype=torch.float64)])
    assert stacked == [[torch.device("meta")] * 3]


class Unreadable(Tensor):
    """Has no norm to ask for."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.linalg.vector_norm or getattr(function, "__name__", "") == "_foreach_norm":
            raise RuntimeError("no norm")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_outputs_that_cannot_be_judged_are_handed_on(device: str) -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).as_subclass(Unreadable)

    model = Odd(2, 2)
    gate, _, trips = broken(model, lambda call: lambda *args: call(*args))
    watch = Watch(gate, torch.device(device), trips.append)
    watch.learn(model(torch.ones(1, 2)))
    for _ in range(watching._LATE + 2):
        assert type(watch.call(gate.call, (torch.ones(1, 2),), {})) is Unreadable
    assert trips == []


def test_gradients_that_cannot_be_judged_are_taken() -> None:
    gate, watch, _ = broken(nn.Linear(2, 2), lambda call: call)
    optimizer = torch.optim.SGD(gate.model.parameters(), 0.1)
    gate.model.weight.grad = torch.ones(2, 2).as_subclass(Unreadable)  # type: ignore[assignment]
    assert watch.gradients_are_finite(optimizer)


@pytest.mark.parametrize("part", ["real", "imag"])
def test_complex_outputs_are_judged_by_both_parts_without_a_warning(part: str) -> None:
    class Spectral(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return torch.complex(super().forward(x), torch.ones(1, 2))

    def spoils(call: Call) -> Call:
        def run_call(*args: Any) -> Any:
            outputs = call(*args).clone()
            getattr(outputs, part).fill_(float("nan"))
            return outputs

        return run_call

    gate, watch, trips = broken(Spectral(2, 2), spoils)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.learn(gate.plain(torch.ones(1, 2)))
        outputs = watch.call(gate.call, (torch.ones(1, 2),), {})
    assert trips == ["its output is not finite"]
    assert torch.view_as_real(outputs).isfinite().all()

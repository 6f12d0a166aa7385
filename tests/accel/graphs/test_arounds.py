"""What lies between a model and its graphs: it changes in trials of other strategies, and may compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from accel.graphs import ModelCalls
from tests.accel.graphs.model_loops import batch
from tests.accel.graphs.tape import TapeRecorder


def calls_of(model: nn.Module, warmup: int = 2) -> ModelCalls:
    return ModelCalls(model, warmup=warmup, say=lambda reason: None, recorder=lambda device: TapeRecorder())


def train(run: Any, times: int = 1) -> None:
    for seed in range(times):
        run(batch(8, seed)).square().mean().backward()


class Compiled:
    """A call that sets itself up in its first forward and its first backward pass, which no capture bears."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.is_forward_done, self.is_backward_done = model, False, False

    def __call__(self, x: Tensor) -> Any:
        """Compile at first."""
        if not self.is_forward_done and is_in_torch_dispatch_mode():
            raise RuntimeError("the generator can't be read in a capture")
        self.is_forward_done = True
        out = self.model._call_impl(x)
        out.register_hook(self._set_up)
        return out

    def _set_up(self, gradient: Tensor) -> None:
        if not self.is_backward_done and is_in_torch_dispatch_mode():
            raise RuntimeError("the generator can't be read in a capture")
        self.is_backward_done = True


def test_a_call_that_is_new_compiles_before_its_capture() -> None:
    model = nn.Linear(6, 3)
    calls = calls_of(model)
    train(calls.wrap(model._call_impl), 4)
    assert (calls.captures, calls.replays) == (1, 2)
    compiled = calls.wrap(Compiled(model), "compiled")
    compiled(batch(8, 0))  # without a backward pass: half of it is not compiled
    train(compiled)
    assert calls.captures == 1
    train(compiled, 3)
    assert calls.why_eager == []
    assert (calls.captures, calls.replays) == (2, 5)
    assert calls.seen.is_warm


def test_graphs_of_two_wrappings_are_kept() -> None:
    """A trial of what lies inside has both in turns; what an earlier one has left is dropped."""
    model = nn.Linear(6, 3)
    calls = calls_of(model, warmup=1)
    runs = {around: calls.wrap(model._call_impl, around) for around in ("plain", "lost", "tried")}
    for around in ("plain", "lost", "plain", "lost", "plain"):
        train(runs[around], 3)
    assert calls.captures == 2
    lost = next(graph for key, graph in calls._graphs.items() if key[0] == "lost")
    for around in ("tried", "plain", "tried", "plain"):
        train(runs[around], 3)
    assert calls.captures == 3
    assert {key[0] for key in calls._graphs} == {"plain", "tried"}
    assert lost._forward.resets == 1  # type: ignore[attr-defined]


def test_a_graph_whose_backward_pass_is_to_come_is_kept() -> None:
    model = nn.Linear(6, 3)
    calls = calls_of(model, warmup=1)
    runs = {around: calls.wrap(model._call_impl, around) for around in ("first", "second", "third")}
    train(runs["first"], 2)
    loss = runs["first"](batch(8, 0)).square().mean()
    for around in ("second", "third"):
        train(runs[around], 3)
    assert calls.captures == 3
    loss.backward()


class _Donating(torch.autograd.Function):
    """Squares; its backward pass writes to what was saved, as one that torch has compiled does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Save."""
        ctx.save_for_backward(x.clone())
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Refuse to leave the activations as they are."""
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise RuntimeError("This backward function was compiled with non-empty donated buffers which requires ...")
        (saved,) = ctx.saved_tensors
        out: Tensor = 2 * saved * gradient
        return out


class Donating(nn.Linear):
    """Has such a backward pass."""

    def forward(self, x: Tensor) -> Any:
        """Square."""
        return _Donating.apply(super().forward(x))  # type: ignore[no-untyped-call]


def test_a_backward_pass_that_writes_to_its_activations_is_captured() -> None:
    model = Donating(6, 3)
    calls = calls_of(model)
    run = calls.wrap(model._call_impl)
    train(run, 4)
    assert calls.why_eager == []
    assert calls.replays == 2
    model.zero_grad()
    run(batch(8, 9)).sum().backward()
    captured = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(batch(8, 9)).sum().backward()
    assert all(
        torch.equal(one, p.grad) for one, p in zip(captured, model.parameters(), strict=True) if p.grad is not None
    )
    with pytest.raises(RuntimeError, match=r"must come once.* Found: retain_graph=True"):
        run(batch(8, 9)).sum().backward(retain_graph=True)


def test_activations_stay_where_the_loop_may_go_backward_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tape keeps what it has recorded; a GPU's graph would write over activations that autograd has freed."""
    kept: list[bool] = []

    class Noting(_Donating):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            kept.append(torch._C._autograd._get_current_graph_task_keep_graph())
            return gradient

    model = nn.Linear(6, 3)
    calls = calls_of(model, warmup=1)
    train(calls.wrap(lambda x: Noting.apply(model._call_impl(x))), 2)  # type: ignore[no-untyped-call]
    assert calls.captures == 1
    assert kept == [False, True]

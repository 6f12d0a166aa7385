"""Captured graphs are compared with the eager calls that they stand for, without the mode that notes draws."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import accel
from accel import strategies
from accel.guard import guard
from accel.guard.guard import Comparison, Replayed
from accel.run.gate import Call
from tests.accel.test_guard_no_room import BY_GRAPHS, Large, Loop

Act = Callable[[Call], Call]


@pytest.fixture(autouse=True)
def _no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch for CPUs has no answer."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Path(nn.Module):
    """Drops out; while a stream is captured it draws once more before that, and may do more."""

    also: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    """What else it does then."""
    trains = True
    """The last one that was called did."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            if self.training:
                torch.rand(())
            Path.trains = self.training
            x = type(self).also(x)
        return functional.dropout(x, 0.5, self.training)


def captures(call: Call) -> Call:
    """Call as a graph does: captured, but where a mode notes draws."""

    def run_call(*args: Any) -> Any:
        if is_in_torch_dispatch_mode():
            return call(*args)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            return call(*args)

    return run_call


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(strategies, "REGISTRY", [Large])
    monkeypatch.setattr(Large, "trial_design", lambda self, run: BY_GRAPHS)
    torch.manual_seed(0)
    loop = Loop(nn.Linear(8, 32), Path(), nn.Linear(32, 8), Path())
    yield loop
    accel.undo(loop.model)


def checked(loop: Loop, monkeypatch: pytest.MonkeyPatch, act: Act) -> Comparison:
    monkeypatch.setattr(Large, "act", staticmethod(act))
    finding = loop.checked()
    assert finding is not None
    return finding


def test_graphs_that_draw_other_numbers_are_refused(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a path that a library takes while a stream is captured."""
    assert checked(loop, monkeypatch, captures).problem.startswith("its output is off by")


def test_equal_masks_are_compared_as_they_are(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = checked(loop, monkeypatch, lambda call: call)
    assert (finding.problem, finding.other_draws) == ("", False)


def test_a_path_on_which_the_models_own_code_fails_proves_nothing(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "also", staticmethod(lambda x: 1 / 0))
    finding = checked(loop, monkeypatch, captures)
    assert (finding.problem, finding.unsure) == ("", "ZeroDivisionError: division by zero")


def in_graphs(fault: Callable[[Call, Any], Any]) -> Act:
    """Return a graph with a fault, which a mode that notes draws does not see."""

    def act(call: Call) -> Call:
        graph = captures(call)
        return lambda *args: call(*args) if is_in_torch_dispatch_mode() else fault(graph, args)

    return act


def frozen(graph: Call, args: Any) -> Any:
    torch.manual_seed(7)
    return graph(*args)


def later(graph: Call, args: Any) -> Any:
    """Draw the numbers of another step."""
    torch.rand(4)
    return graph(*args)


class OtherGradient(torch.autograd.Function):
    """Returns its input, and a gradient that is 1.05 times as long, or no number."""

    factor = 1.05

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * OtherGradient.factor


def wrong_gradients(graph: Call, args: Any) -> Any:
    return OtherGradient.apply(graph(*args))  # type: ignore[no-untyped-call]


FAULTS = [frozen, later, lambda graph, args: 1.01 * graph(*args), wrong_gradients, lambda graph, args: graph(-args[0])]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_else_differs_is_wrong(
    fault: Callable[[Call, Any], Any], loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = checked(loop, monkeypatch, in_graphs(fault))
    assert finding.problem and not finding.unsure


def test_gradients_that_are_no_numbers_are_wrong(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherGradient, "factor", float("nan"))
    assert checked(loop, monkeypatch, in_graphs(wrong_gradients)).problem


def test_another_mask_in_the_backward_pass_is_wrong(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a backward graph would have that draws anew."""

    class OtherMask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * (torch.rand_like(x) < 0.5) * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * (torch.rand_like(gradients[0]) < 0.5) * 2

    def dropped(x: Tensor, p: float, training: bool) -> Tensor:
        return OtherMask.apply(x) if training else x  # type: ignore[no-any-return, no-untyped-call]

    def fault(graph: Call, args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(functional, "dropout", dropped)
            return graph(*args)

    assert checked(loop, monkeypatch, in_graphs(fault)).problem


def test_a_model_that_draws_nothing_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Large])
    monkeypatch.setattr(Large, "trial_design", lambda self, run: BY_GRAPHS)
    loop, replays, replay = Loop(), list[object](), guard.replay

    def counted(*args: Any, **kwargs: Any) -> Replayed:
        replays.append(args)
        return replay(*args, **kwargs)

    monkeypatch.setattr(guard, "replay", counted)
    finding = checked(loop, monkeypatch, in_graphs(lambda graph, args: 2 * graph(*args)))
    assert finding.problem.startswith("its output is off by")
    assert len(replays) == 4  # plain, under the mode that notes draws, eager, captured
    accel.undo(loop.model)


def test_two_replays_at_most_are_alive(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Replayed]] = []
    alive: list[int] = []

    def noting(replay: Callable[..., Replayed]) -> Callable[..., Replayed]:
        def noted(*args: Any, **kwargs: Any) -> Replayed:
            result = replay(*args, **kwargs)
            made.append(weakref.ref(result))
            alive.append(sum(each() is not None for each in made))
            return result

        return noted

    monkeypatch.setattr(guard, "replay", noting(guard.replay))
    assert checked(loop, monkeypatch, lambda call: call).problem == ""
    assert len(made) > 4 and max(alive) == 2

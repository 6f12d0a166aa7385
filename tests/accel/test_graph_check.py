"""Captured graphs that draw other numbers than eager calls are not wrong; whatever else differs is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import accel
from accel import strategies
from accel.guard import guard
from accel.guard.guard import Comparison
from accel.run.gate import Call
from tests.accel.test_guard_no_room import Large, Loop

Act = Callable[[Call], Call]


def draws_more(call: Call) -> Call:
    """Draw once more than the eager call, as a library does that takes another path while a stream is captured."""

    def run_call(*args: Tensor) -> Tensor:
        if not is_in_torch_dispatch_mode():  # in which a graph runs eagerly
            torch.rand(())
        return call(*args)  # type: ignore[no-any-return]

    return run_call


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(strategies, "REGISTRY", [Large])
    monkeypatch.setattr(Large, "captures", True)
    torch.manual_seed(0)
    loop = Loop(nn.Linear(8, 256), nn.Dropout(0.5), nn.Linear(256, 8))
    yield loop
    accel.undo(loop.model)


def checked(loop: Loop, monkeypatch: pytest.MonkeyPatch, act: Act) -> Comparison:
    monkeypatch.setattr(Large, "act", staticmethod(act))
    finding = loop.checked()
    assert finding is not None
    return finding


def test_other_masks_are_those_of_another_seed(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A BERT was undone as wrong on a GPU, since attention went by another kernel in the captured call."""
    for _ in range(8):  # the distances of random states vary
        finding = checked(loop, monkeypatch, draws_more)
        assert (finding.problem, finding.unsure, finding.other_draws) == ("", "", True)
        assert finding.output_error == 0.0


def test_equal_masks_are_compared_as_they_are(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = checked(loop, monkeypatch, lambda call: call)
    assert (finding.problem, finding.other_draws) == ("", False)


def frozen(call: Call) -> Call:
    """Draw the same numbers in each call."""

    def run_call(*args: Tensor) -> Tensor:
        if not is_in_torch_dispatch_mode():
            torch.manual_seed(7)
        return call(*args)  # type: ignore[no-any-return]

    return run_call


def wrong_too(call: Call) -> Call:
    return lambda *args: 1.01 * draws_more(call)(*args) if not is_in_torch_dispatch_mode() else call(*args)


def wrong_gradient_too(call: Call) -> Call:
    def run_call(*args: Tensor) -> Tensor:
        out: Tensor = draws_more(call)(*args)
        return out if is_in_torch_dispatch_mode() else 2 * out - out.detach()

    return run_call


def drops(p: float, call: Call) -> Call:
    """Drop with another probability than the eager call."""

    def run_call(*args: Tensor) -> Tensor:
        if is_in_torch_dispatch_mode():
            return call(*args)  # type: ignore[no-any-return]
        for dropout in dropouts:
            dropout.p = p
        try:
            return call(*args)  # type: ignore[no-any-return]
        finally:
            for dropout in dropouts:
                dropout.p = 0.5

    return run_call


dropouts: list[nn.Dropout] = []
"""Of the model."""


@pytest.mark.parametrize("fault", [frozen, wrong_too, wrong_gradient_too, partial(drops, 0.7), partial(drops, 0.0)])
def test_what_else_differs_is_wrong(fault: Act, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    dropouts[:] = [module for module in loop.model.modules() if isinstance(module, nn.Dropout)]
    finding = checked(loop, monkeypatch, fault)
    assert finding.problem
    assert not finding.unsure


def test_a_model_that_draws_nothing_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Large])
    monkeypatch.setattr(Large, "captures", True)
    loop, replays, replay = Loop(), list[object](), guard.replay

    def counted(*args: object, **kwargs: object) -> object:
        replays.append(args)
        return replay(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(guard, "replay", counted)
    finding = checked(loop, monkeypatch, wrong_too)
    assert finding.problem.startswith("its output is off by")
    assert len(replays) == 4  # plain, under the mode that notes draws, eager, captured
    accel.undo(loop.model)


def test_a_model_that_can_not_be_evaluated_stays_wrong(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def trains_only(call: Call) -> Call:
        def run_call(*args: Tensor) -> Tensor:
            if not loop.model.training:
                raise RuntimeError("needs its targets")
            return draws_more(call)(*args)  # type: ignore[no-any-return]

        return run_call

    assert checked(loop, monkeypatch, trains_only).problem.startswith("its output is off by")

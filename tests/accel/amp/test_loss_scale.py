"""The loss scale by itself: when it falls, grows and stops, against the rule written out in numbers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel.amp import DynamicLossScale, decorate
from accel.comm.periodic.local_checks import check_scale
from accel.errors import InvalidArgument
from tests.accel.graphs.tape import TapeRecorder


class ByRule:
    """The rule, step by step, in Python's numbers."""

    def __init__(self, scale: float, interval: int, hysteresis: int, least: float, most: float) -> None:
        self.scale, self.interval, self.hysteresis, self.least, self.most = scale, interval, hysteresis, least, most
        self.good, self.left = 0, hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, self.least)
            return
        self.left = self.hysteresis
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = min(self.scale * 2, self.most), 0


@given(
    steps=st.lists(st.booleans(), max_size=60),
    interval=st.integers(1, 5),
    hysteresis=st.integers(1, 3),
    exponent=st.integers(0, 6),
)
def test_it_follows_the_rule(steps: list[bool], interval: int, hysteresis: int, exponent: int) -> None:
    rule = ByRule(2.0**exponent, interval, hysteresis, 1.0, 64.0)
    scale = DynamicLossScale(initial=2.0**exponent, interval=interval, hysteresis=hysteresis, least=1.0, most=64.0)
    value = scale.value
    for overflow in steps:
        scale.update(torch.tensor(float(overflow)))
        rule.update(overflow)
        assert float(scale.value) == rule.scale
    assert scale.value is value  # an optimizer, or a captured graph, holds it

    twin = DynamicLossScale(interval=interval, hysteresis=hysteresis, least=1.0, most=2.0**24)
    twin.load_state_dict(scale.state_dict())
    assert twin.state_dict() == scale.state_dict()


def test_steps_of_several_optimizers_count_once() -> None:
    scale = DynamicLossScale(initial=8.0, interval=100)
    for overflow in (0.0, 1.0, 0.0):
        scale.note(torch.tensor(overflow))
    scale.settle()
    assert scale.state_dict() == {"scale": 4.0, "good_steps": 0, "overflows_left": 0}


def test_it_tells_the_scale_of_the_gradients_of_this_pass() -> None:
    """As communication hooks ask for it, within the backward pass; what a step has noted counts from the next on."""
    scale, told = DynamicLossScale(initial=8.0, interval=1), []
    for overflow in (1.0, 0.0, 0.0):
        weight = torch.ones(3, requires_grad=True)
        weight.register_hook(lambda grad: told.append((scale.get_scale(), float(grad[0]))))
        scale.multiply(weight.sum()).backward()
        scale.note(torch.tensor(overflow))
        assert scale.get_scale() == told[-1][0]
    assert told == [(8.0, 8.0), (4.0, 4.0), (8.0, 8.0)]


def test_it_stays_while_scaled_gradients_wait() -> None:
    scale, waiting = DynamicLossScale(initial=8.0), [True]
    scale.holds.append(lambda: waiting[0])
    scale.note(torch.tensor(1.0))
    scale.settle()
    assert float(scale.value) == 8.0
    waiting[0] = False
    scale.settle()
    assert float(scale.value) == 4.0


def test_saving_in_the_middle_of_a_step_changes_nothing() -> None:
    """Of two optimizers, one has stepped; the other unscales by what its gradients were scaled by."""
    scale, waiting = DynamicLossScale(initial=8.0, hysteresis=2), [True]
    scale.holds.append(lambda: waiting[0])
    scale.note(torch.tensor(float("nan")))
    saved = scale.state_dict()
    assert saved == {"scale": 8.0, "good_steps": 0, "overflows_left": 1}
    scale.note(torch.tensor(0.0))
    waiting[0] = False
    scale.settle()
    scale.settle()  # counts once
    assert scale.state_dict() == saved


def test_a_captured_step_goes_on_noting() -> None:
    """No Python runs in a replay: what decides lies in memory that stays."""
    eager, captured = (DynamicLossScale(initial=64.0, interval=3, hysteresis=2, most=256.0) for _ in range(2))
    overflow = torch.zeros(())

    def step(scale: DynamicLossScale) -> None:
        scale.settle()
        scale.note(overflow)

    step(captured)
    step(eager)
    graph, _ = TapeRecorder().record(lambda: step(captured))
    for bad in (0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0):
        overflow.fill_(bad)
        step(eager)
        graph.replay()
        assert captured.state_dict() == eager.state_dict()
    assert eager.state_dict()["scale"] != 64.0
    step(captured)  # an eager step goes on from there
    step(eager)
    assert captured.state_dict() == eager.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 0.5}, "0 < least <= initial <= most must hold"),
        ({"most": 2.0}, "0 < least <= initial <= most must hold"),
        ({"growth": 0.5}, "growth must be at least 1 and backoff in"),
        ({"backoff": 0.0}, "growth must be at least 1 and backoff in"),
        ({"interval": 0}, "interval and hysteresis must be at least 1"),
        ({"hysteresis": 0}, "interval and hysteresis must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        DynamicLossScale(**options)


def test_gradients_of_gradients_pass_through() -> None:
    scale = DynamicLossScale(initial=4.0)
    x = torch.tensor(3.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(scale.multiply(x**3), x, create_graph=True)
    assert float(gradient.detach()) == 4 * 27
    (second,) = torch.autograd.grad(gradient, x)
    assert float(second) == 4 * 18


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_is_multiplied_and_then_rounded_once(narrow: torch.dtype, order: torch.memory_format) -> None:
    scale, draw = DynamicLossScale(initial=2.0**12), torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 4, generator=draw).to(narrow).to(memory_format=order).requires_grad_()
    wide = scale.multiply(x, torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, x.float())
    # Products that overflow in float16, that are subnormal there, and everything between.
    sizes = 10.0 ** (12 * torch.rand(x.shape, generator=draw) - 9)
    sent = (torch.randn(x.shape, generator=draw) * sizes).to(memory_format=order)
    wide.backward(sent)
    assert x.grad is not None
    assert torch.equal(x.grad, (sent * 2.0**12).to(narrow))


def test_a_scale_that_stays_is_the_same_on_all_ranks() -> None:
    """LocalSGD asks for one that may change."""
    for loss_scale, asked in ((128.0, False), ("dynamic", True)):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        decorate(model, optimizer, dtype=torch.float16, loss_scale=loss_scale)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="must be passed to LocalSGD") if asked else contextlib.nullcontext():
            check_scale(optimizer, None)

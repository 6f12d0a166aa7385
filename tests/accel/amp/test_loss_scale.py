"""The loss scale by itself: when it falls, grows and stops, against the rule written out in numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.amp import DynamicLossScale
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
    scale = DynamicLossScale(
        init_scale=2.0**exponent, growth_interval=interval, hysteresis=hysteresis, min_scale=1.0, max_scale=64.0
    )
    value = scale.value
    for overflow in steps:
        scale.update(torch.tensor(float(overflow)))
        rule.update(overflow)
        assert float(scale.value) == rule.scale
    assert scale.value is value  # an optimizer, or a captured graph, holds it

    twin = DynamicLossScale(growth_interval=interval, hysteresis=hysteresis, min_scale=1.0, max_scale=2.0**24)
    twin.load_state_dict(scale.state_dict())
    assert twin.state_dict() == scale.state_dict()


def test_steps_of_several_optimizers_count_once() -> None:
    scale = DynamicLossScale(init_scale=8.0, growth_interval=100)
    for overflow in (0.0, 1.0, 0.0):
        scale.note(torch.tensor(overflow))
    scale.settle()
    assert scale.state_dict() == {"scale": 4.0, "good_steps": 0, "overflows_left": 0}


def test_a_captured_step_goes_on_noting() -> None:
    """No Python runs in a replay: what decides lies in memory that stays."""
    eager, captured = (
        DynamicLossScale(init_scale=64.0, growth_interval=3, hysteresis=2, max_scale=256.0) for _ in range(2)
    )
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
        ({"init_scale": 0.5}, "0 < min_scale <= init_scale <= max_scale must hold"),
        ({"max_scale": 2.0}, "0 < min_scale <= init_scale <= max_scale must hold"),
        ({"growth_factor": 0.5}, "growth_factor must be at least 1 and backoff_factor in"),
        ({"backoff_factor": 0.0}, "growth_factor must be at least 1 and backoff_factor in"),
        ({"growth_interval": 0}, "growth_interval and hysteresis must be at least 1"),
        ({"hysteresis": 0}, "growth_interval and hysteresis must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        DynamicLossScale(**options)


BAD = {
    "NaN": {"scale": float("nan"), "good_steps": 0, "overflows_left": 1},
    "infinite": {"scale": float("inf"), "good_steps": 0, "overflows_left": 1},
    "zero": {"scale": 0.0, "good_steps": 0, "overflows_left": 1},
    "a count that is none": {"scale": 2.0, "good_steps": float("inf"), "overflows_left": 1},
    "a text": {"scale": "large", "good_steps": 0, "overflows_left": 1},
    "nothing": {},
}


@pytest.mark.parametrize("case", BAD)
def test_a_state_that_is_none_changes_nothing(case: str) -> None:
    scale = DynamicLossScale(init_scale=8.0)
    with pytest.raises(InvalidArgument, match="loss scale"):
        scale.load_state_dict(BAD[case])
    assert scale.state_dict() == {"scale": 8.0, "good_steps": 0, "overflows_left": 1}


def test_saving_counts_what_was_noted_and_changes_nothing() -> None:
    scale = DynamicLossScale(init_scale=8.0, hysteresis=2)
    scale.note(torch.tensor(float("nan")))
    saved = scale.state_dict()
    assert saved == {"scale": 8.0, "good_steps": 0, "overflows_left": 1}
    scale.note(torch.tensor(0.0))
    scale.settle()
    scale.settle()  # counts once
    assert scale.state_dict() == saved


def test_a_call_keeps_the_scale_that_it_began_with() -> None:
    scale = DynamicLossScale(init_scale=8.0)
    first = scale.of_call()
    scale.note(torch.tensor(1.0))
    assert (float(first), float(scale.of_call()), float(first)) == (8.0, 4.0, 8.0)

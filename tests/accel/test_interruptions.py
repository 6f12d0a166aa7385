"""Ctrl-C, or a time limit, at any place of accel's, or of torch's `no_grad` that it is in.

The loop gets it, and can go on, or be undone.
"""

from __future__ import annotations

import itertools
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

import accel
from accel.profiler.loop import backward
from tests.accel.loops import Quick, advance, advance_until, make, settled, training
from tests.interruptions import GRAD_MODE, SignalInterrupter


class TimeLimit(Exception):
    """As a signal handler of the loop's own may raise it."""


def interrupted(folder: str, at: int, error: type[BaseException]) -> SignalInterrupter:
    """Interrupt a run at that place, go on, undo all, and go on again."""
    model, loader, optimizer = accel.optimize(*make(), budget=60, allow="exact")
    interrupter, has_reached_the_loop = SignalInterrupter(folder, at, error), False
    try:
        with interrupter():
            advance_until(training(model, loader, optimizer), settled(model))
    except error:
        has_reached_the_loop = True
    reaches_nobody = interrupter.is_swallowed or not interrupter.place
    assert has_reached_the_loop or reaches_nobody, f"interrupted at {interrupter.place}"
    assert torch.is_grad_enabled(), f"interrupted at {interrupter.place}"
    assert _get_current_dispatch_mode() is None, f"interrupted at {interrupter.place}"
    before = model.head.weight.detach().clone()
    advance(training(model, loader, optimizer), 20)
    assert model.head.weight.isfinite().all(), f"interrupted at {interrupter.place}"
    assert not torch.equal(model.head.weight, before), f"interrupted at {interrupter.place}"
    accel.undo(model)
    assert not Quick.on, f"interrupted at {interrupter.place}"
    assert "_compiled_call_impl" not in vars(model), f"interrupted at {interrupter.place}"
    assert passes_are_heard(), f"interrupted at {interrupter.place}"
    advance(training(model, loader, optimizer), 3)
    return interrupter


def passes_are_heard() -> bool:
    """Tell whether a listener is notified of a backward pass."""
    listener = Mock(spec=["backward_begins", "backward_ended"])
    backward.listen(listener)
    torch.ones(1, requires_grad=True).sum().backward()
    backward.forget(listener)
    return bool(listener.backward_begins.called and listener.backward_ended.called)


# A whole search has 40,000 places, and 50 of torch's in it; the strides are primes.
@pytest.mark.parametrize(
    ("folder", "stride", "error"),
    [
        pytest.param("accel", 20_011, KeyboardInterrupt, id="accel"),
        pytest.param("accel", 307, KeyboardInterrupt, id="accel, closely", marks=pytest.mark.slow),
        pytest.param("accel", 20_021, TimeLimit, id="accel, a time limit"),
        pytest.param("accel", 311, TimeLimit, id="accel, a time limit, closely", marks=pytest.mark.slow),
        pytest.param("accel", 20_023, TimeoutError, id="accel, TimeoutError"),
        pytest.param("accel", 313, TimeoutError, id="accel, TimeoutError, closely", marks=pytest.mark.slow),
        pytest.param(GRAD_MODE, 11, KeyboardInterrupt, id="no_grad"),
        pytest.param(GRAD_MODE, 1, KeyboardInterrupt, id="no_grad, each", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_after_an_interruption(
    only_quick: None, folder: str, stride: int, error: type[BaseException]
) -> None:
    for at in itertools.count(0, stride):
        if not interrupted(folder, at, error).place:
            assert at > 0
            return  # the search ended without coming to that place

"""Loops that replace their optimizer: the old one is freed, and the loop stays one with an optimizer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import accel
from accel import entry
from accel.profiler.loop.optimizers import Optimizers, Strangers
from tests.accel.loops import advance, make, settled, training


@pytest.mark.usefixtures("only_quick")
@pytest.mark.parametrize("passed", [True, False])
def test_an_optimizer_that_the_loop_has_replaced_is_freed(passed: bool) -> None:
    model, loader, first = make()
    model, loader, *_ = accel.optimize(model, loader, *([first] if passed else []), allow="exact", budget=60)
    loop = training(model, loader, first)
    advance(loop, 5)
    gone = weakref.ref(first)
    del first, loop, _
    ends = []
    for stage in range(3):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        advance(training(model, loader, optimizer), 5)
        ends.append(weakref.ref(optimizer))
        steps = accel.explain(model).steps
        assert 3 * stage < steps <= 5 * (stage + 2)
    gc.collect()
    assert gone() is None
    assert [end() is None for end in ends] == [True, True, False]
    assert entry.MODELS[model].session.run.optimizers == [optimizer]


@pytest.mark.usefixtures("only_quick")
def test_batches_between_two_optimizers_are_no_steps() -> None:
    model, loader, optimizer = make()
    model, loader = accel.optimize(model, loader, allow="exact", budget=60)
    advance(training(model, loader, optimizer), 5)
    steps = accel.explain(model).steps
    del optimizer
    gc.collect()
    for _ in loader:
        pass
    assert accel.explain(model).steps <= steps + 1


@pytest.mark.usefixtures("only_quick")
def test_a_search_goes_on_past_a_replacement() -> None:
    model, loader, optimizer = make()
    model, loader = accel.optimize(model, loader, allow="exact", budget=60)
    while not settled(model)():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        advance(training(model, loader, optimizer), 30)
    assert accel.explain(model).plan == {"quick": None}
    assert entry.MODELS[model].session.failed == ""


def test_those_that_are_left_stand_in_their_order() -> None:
    weights: Any = [torch.nn.Parameter(torch.ones(1))]
    one, two, three = (torch.optim.SGD(weights, lr) for lr in (0.1, 0.2, 0.3))
    optimizers = Optimizers()
    assert not optimizers
    for each in (one, two, three):
        optimizers.append(each)
    assert (optimizers == [one, two, three], len(optimizers), optimizers[-1] is three) == (True, 3, True)
    del each, two
    gc.collect()
    assert optimizers == [one, three]
    del one, three
    gc.collect()
    assert optimizers == [] and bool(optimizers)


def test_a_stranger_is_one_as_long_as_it_lives_and_gets_no_group() -> None:
    first, second = (torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(2))
    strangers = Strangers()
    strangers.add(first)
    assert first in strangers
    assert second not in strangers
    first.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert first not in strangers
    strangers.add(second)
    assert second in strangers
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None
    for _ in range(50):  # none that comes to lie where a stranger was is taken for it
        assert torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) not in strangers
    assert len(strangers._groups) == 1

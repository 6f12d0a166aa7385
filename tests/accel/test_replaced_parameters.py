"""Loops that put other parameters into their model on the way: a new head, or a grid of finer cells."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel import entry
from accel.guard.blame import Blame
from accel.script.training import ScriptTraining
from tests.accel.loops import advance, make, training
from tests.accel.script_followed import step, steps_of
from tests.accel.script_followed import training as followed

__all__ = ["followed"]


@pytest.mark.usefixtures("only_quick")
def test_an_optimizer_of_new_parameters_alone_goes_on_with_the_steps() -> None:
    model, loader, optimizer = make()
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
    advance(training(model, loader, optimizer), 5)
    steps = accel.explain(model).steps
    model.head = nn.Linear(16, 3)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
    advance(training(model, loader, optimizer), 5)
    assert accel.explain(model).steps >= steps + 4
    assert entry.MODELS[model].session.run.optimizers[-1] is optimizer


def test_parameters_that_the_model_has_no_more_are_let_go_of() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    _blame, old = Blame(model), weakref.ref(model[0].weight)
    model[0] = nn.Linear(2, 2)
    assert old() is None


def steps(model: Any, optimizer: Any, count: int) -> None:
    """Take some steps without a loader."""
    for _ in range(count):
        step(model, optimizer, torch.randn(8, 6), torch.randint(9, (8,)))


@pytest.mark.parametrize("replaces", ["optimizer", "parameters"])
def test_a_loop_without_a_loader_goes_on_with_another_optimizer(followed: ScriptTraining, replaces: str) -> None:
    model, _, optimizer = make()
    steps(model, optimizer, 20)
    for stage in range(1, 3):
        before = steps_of(model)
        if replaces == "parameters":
            model.head = nn.Linear(16, 3)
        optimizer = torch.optim.SGD((model.head if stage == 2 else model).parameters(), lr=0.01)
        steps(model, optimizer, 20)
        assert before + 17 <= steps_of(model) <= before + 20
    assert followed.models.count == 1

"""Loops that put other parameters into their model on the way: a new head, or a grid of finer cells."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel import entry
from accel.guard.blame import Blame
from accel.guard.guard import Comparison
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


def verdict_of(blame: Blame, model: nn.Module) -> str:
    """Return the verdict where a call made again agrees with itself, and all is finite."""
    x = torch.ones(1, 2)
    outputs = model(x)
    blame.keep(blame.begin((x,), {}), outputs)
    blame.backward_begins()
    plain: Any = SimpleNamespace(outputs=[torch.ones(1)], gradients=[])
    return blame.verdict([outputs.sum()], lambda call: (plain, Comparison()))


@pytest.mark.parametrize("has_gradient", ["neither", "old", "new"])
def test_only_gradients_of_parameters_that_the_model_has_may_be_from_before(has_gradient: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    blame, old = Blame(model), model[0].weight
    model[0] = nn.Linear(2, 2)
    for name, weight in (("old", old), ("new", model[0].weight)):
        weight.grad = torch.ones(2, 2) if has_gradient == name else None
    assert verdict_of(blame, model) == ""  # of the new one it was not known
    blame.forget()
    assert bool(verdict_of(blame, model)) == (has_gradient != "new")


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


def test_one_that_is_kept_is_taken_to_be_gone_in_the_end(followed: ScriptTraining) -> None:
    model, _, first = make()
    steps(model, first, 20)
    before = steps_of(model)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.01), 70)
    assert steps_of(model) >= before + 15


def test_an_optimizer_for_each_step_is_not_held_and_ends_it(followed: ScriptTraining) -> None:
    model, _, optimizer = make()
    steps(model, optimizer, 20)
    before, alive = steps_of(model), weakref.WeakSet[Any]()
    for _ in range(10):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        alive.add(optimizer)
        steps(model, optimizer, 1)
    assert len(alive) <= 2
    assert before + 9 <= steps_of(model) <= before + 10


def test_parts_that_no_call_has_reached_are_no_obstacle(followed: ScriptTraining) -> None:
    model, loader, _ = make()
    model.later = nn.LazyLinear(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, target in loader:
        step(model, optimizer, x, target)
    assert (followed.models.count, followed.has_failed) == (1, False)

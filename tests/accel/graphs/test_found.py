"""Models and optimizers that a step refers to in ordinary ways are found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.graphs import capture
from accel.graphs.capture import found
from tests.accel.graphs.tape import TapeRecorder

MODEL = nn.Linear(4, 2)
OTHER = nn.Linear(4, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)
MODELS = [MODEL, OTHER]
OPTIMIZERS = {"one": OPTIMIZER}
ALL = [MODEL, OTHER]


class Trainer:
    """Holds a list of models in an attribute, and calls another of its methods."""

    def __init__(self) -> None:
        self.models, self.optimizers = [MODEL, OTHER], (OPTIMIZER,)

    def step(self, x: Tensor) -> Any:
        return [model(x) for model in self.models]

    def __call__(self, x: Tensor) -> Any:
        return self.step(x)


@torch.no_grad()
def without_gradients(x: Tensor) -> Any:
    return MODEL(x), OPTIMIZER


@torch.autocast("cpu", torch.bfloat16)
def with_autocast(x: Tensor) -> Any:
    return MODEL(x), OPTIMIZER


def wrapped(x: Tensor) -> Any:
    return MODEL(x), OPTIMIZER


def by_hand(function: Callable[..., Any]) -> Callable[..., Any]:
    def around(*args: Any) -> Any:
        return function(*args)

    return around


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any) -> Any:
        return HANDLERS["only"](*args)

    return around


HANDLERS: dict[str, Any] = {}


def globals_in_lists(x: Tensor) -> Any:
    return MODELS, OPTIMIZERS


def in_inner_code(x: Tensor) -> Any:
    def inner() -> Any:
        return OPTIMIZER

    return [model(x) for model in [MODEL]], (lambda: OTHER), inner


def helper(x: Tensor) -> Any:
    return MODEL(x), OPTIMIZER, OTHER


_STEPS: dict[str, tuple[Any, int]] = {
    "no_grad": (without_gradients, 1),
    "autocast": (with_autocast, 1),
    "decorated by hand": (by_hand(wrapped), 1),
    "functools.wraps": (timed(wrapped), 1),
    "globals in lists": (globals_in_lists, 2),
    "inner code": (in_inner_code, 2),
    "lists of an object": (Trainer().step, 2),
    "a called object": (Trainer(), 2),
    "a list in a partial": (functools.partial(lambda models, optimizers, x: None, MODELS, OPTIMIZERS), 2),
    "a decorated method": (by_hand(Trainer().step), 2),
    "a list in a default": (lambda x, models=ALL, optimizer=OPTIMIZER: None, 2),
}


@pytest.mark.parametrize("form", _STEPS)
def test_ordinary_forms(form: str) -> None:
    step, count = _STEPS[form]
    modules, optimizers = found(step)
    assert len(modules) == count
    assert optimizers == [OPTIMIZER]


def test_a_function_that_refers_to_itself_is_read_once() -> None:
    def step(x: Tensor) -> Any:
        return step, MODEL

    assert found(step) == ([MODEL], [])


def test_a_step_in_which_nothing_was_found_is_said() -> None:
    step = capture(lambda x: x + 1, warmup=0)
    step._recorder = TapeRecorder()
    with pytest.warns(RuntimeWarning, match="no model and no optimizer was found.*modules=, optimizers="):
        step(torch.ones(2))
    quiet = capture(lambda x: x + 1, warmup=0, modules=[])
    quiet._recorder = TapeRecorder()
    quiet(torch.ones(2))

"""A script's training that is followed, and loops for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor, nn

import accel
from accel.script.training import ScriptTraining
from tests.accel.loops import assert_same, loss_of

OPTIONS = {"allow": "exact", "budget": "60s", "report": None, "enable": (), "disable": ()}


@pytest.fixture
def training(only_quick: None) -> Iterator[ScriptTraining]:
    followed = ScriptTraining(dict(OPTIONS), threading.get_ident(), whole="")
    followed.start()
    yield followed
    followed.stop()


def step(model: Any, optimizer: Any, x: Tensor, target: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x), target).backward()
    optimizer.step()


def epochs(model: Any, loader: Any, optimizer: Any, count: int) -> None:
    for _ in range(count):
        for x, target in loader:
            step(model, optimizer, x, target)


def steps_of(model: nn.Module) -> int:
    return accel.explain(model).steps


def assert_followed_with_the_same_bits(run: Callable[[], dict[str, Tensor]]) -> None:
    plain = run()
    training = ScriptTraining(dict(OPTIONS), threading.get_ident(), whole="")
    training.start()
    followed = run()
    training.stop()
    assert training.models.count == 1
    assert_same(followed, plain)

"""A model is found among all objects by the parameters of its optimizer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from accel.profiler.loop.called_modules import CalledModules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x * self.weight)
        return out


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Tree(Wrapper):
    """Has `children` of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.children = [1, 2]  # type: ignore[assignment]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Linear(2, 2),
    "wrapped": lambda: Wrapper(Wrapper(Block())),
    "a dictionary": lambda: nn.ModuleDict({"a": Block(), "b": nn.Linear(2, 2)}),
    "shared": lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2),
    "copied": lambda: copy.deepcopy(Wrapper(Block())),
    "unpickled": lambda: pickle.loads(pickle.dumps(Block())),
    "normed by parametrization": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), Block()),
    "with children of its own": lambda: Tree(Block()),
}


def roots(of: nn.Module) -> list[nn.Module]:
    modules = CalledModules(lambda call, calls: call, lambda calls: (print, print))
    assert modules.learn(torch.optim.SGD(of.parameters(), lr=0.1), 1)
    found = modules.modules
    modules.release()
    return found


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_outermost_owner_is_found(build: Callable[[], nn.Module]) -> None:
    model = build()
    assert roots(model) == [model]


def test_a_head_is_not_taken_for_the_whole() -> None:
    model = Wrapper(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    assert roots(model.inner[1]) == [model]

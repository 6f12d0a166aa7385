"""A model is found among all objects."""

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


def _listed() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.append(Block()).insert(0, Block())
    return model


def _dictionary() -> nn.Module:
    return nn.ModuleDict({"a": Block(), "b": nn.Linear(2, 2)})


def _put_in_later() -> nn.Module:
    model = nn.Module()
    model.add_module("block", Block())
    model.late = nn.Linear(2, 2)
    model.late.weight = nn.Parameter(torch.zeros(2, 2))
    return model


def _layers_that_are_copied() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 1, 4, batch_first=True)
    return Wrapper(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


BUILT: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Linear(2, 2),
    "a class": Block,
    "wrapped": lambda: Wrapper(Wrapper(Block())),
    "a list": _listed,
    "a dictionary": _dictionary,
    "put in later": _put_in_later,
    "shared": lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2),
    "a transformer": _layers_that_are_copied,
    "a copied part": lambda: Wrapper(copy.deepcopy(Block())),
    "normed by parametrization": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), Block()),
}


def roots(model: nn.Module) -> list[nn.Module]:
    modules = CalledModules(lambda call, calls: call, lambda calls: (print, print))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert modules.learn(optimizer, 1)
    found = modules.modules
    modules.release()
    return found


@pytest.mark.parametrize("build", BUILT.values(), ids=BUILT)
def test_the_outermost_module_is_found(build: Callable[[], nn.Module]) -> None:
    model = build()
    assert roots(model) == [model]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_head_that_replaces_a_part_of_a_copy_is_not_taken_for_the_whole(
    copied: Callable[[nn.Module], Wrapper],
) -> None:
    """Of a model that was loaded whole, only the head is trained: the list in which it lies was optimized."""
    model = copied(Wrapper(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    model.inner[1] = nn.Linear(2, 1)  # type: ignore[operator]
    assert roots(model.inner[1]) == [model]  # type: ignore[index]


def test_a_class_may_have_children_of_its_own() -> None:
    class Tree(Wrapper):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__(inner)
            self.children = [1, 2]  # type: ignore[assignment]

    tree = Tree(copy.deepcopy(Block()))
    assert roots(tree) == [tree]

"""A model is found among the modules that were built in the run, and else among all objects."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from accel.profiler.clocks import called_modules
from accel.profiler.clocks.called_modules import CalledModules
from accel.profiler.clocks.registered_modules import RegisteredModules


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


BUILT: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Linear(2, 2),
    "a class": Block,
    "wrapped": lambda: Wrapper(Wrapper(Block())),
    "a list": _listed,
    "a dictionary": _dictionary,
    "put in later": _put_in_later,
    "shared": lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2),
    "normed by parametrization": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), Block()),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "copied": lambda: copy.deepcopy(Block()),
    "unpickled": lambda: pickle.loads(pickle.dumps(Block())),
    "a copied part": lambda: Wrapper(copy.deepcopy(Block())),
}


@pytest.fixture
def registered() -> Iterator[RegisteredModules]:
    modules = RegisteredModules()
    modules.start()
    yield modules
    modules.stop()


def roots(model: nn.Module, registered: Callable[[], list[nn.Module]]) -> list[nn.Module]:
    modules = CalledModules(lambda call, calls: call, lambda calls: (print, print), registered)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert modules.learn(optimizer, 1)
    found = modules.modules
    modules.release()
    return found


@pytest.mark.parametrize("build", BUILT.values(), ids=BUILT)
def test_without_going_through_all_objects(
    build: Callable[[], nn.Module], registered: RegisteredModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    by_scan = roots(model, lambda: [])
    monkeypatch.setattr(called_modules, "_modules", lambda: pytest.fail("all objects were gone through"))
    assert roots(model, registered.seen) == by_scan == [model]


@pytest.mark.parametrize("build", OTHERS.values(), ids=OTHERS)
def test_what_registers_nothing_is_found_among_all_objects(
    build: Callable[[], nn.Module], registered: RegisteredModules
) -> None:
    model = build()
    assert roots(model, registered.seen) == [model]


def test_none_is_kept_alive_and_hooks_are_removed(registered: RegisteredModules) -> None:
    model = Block()
    gone = weakref.ref(model)
    assert any(each is model for each in registered.seen())
    del model
    gc.collect()
    assert gone() is None
    registered.stop()
    late = Block()
    assert not any(each is late for each in registered.seen())

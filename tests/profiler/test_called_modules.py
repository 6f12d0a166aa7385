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

from accel.profiler.loop import called_modules
from accel.profiler.loop.called_modules import CalledModules, RegisteredModules


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


def _loaded_by_assignment() -> nn.Module:
    """Each layer registers its parameters, those in between nothing."""
    model = _layers_that_are_copied()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def _parts_changed(model: nn.Module) -> nn.Module:
    """As pruning does: each layer registers a parameter."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_parameter(f"{name}_orig", nn.Parameter(parameter.detach().clone()))
    return model


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


class CopiedByHand(Wrapper):
    """Is copied without a word to torch."""

    def __deepcopy__(self, memo: dict[int, object]) -> CopiedByHand:
        other = type(self).__new__(type(self))
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "copied": lambda: copy.deepcopy(Block()),
    "loaded by assignment": _loaded_by_assignment,
    "unpickled": lambda: pickle.loads(pickle.dumps(Block())),
    "copied, parts changed since": lambda: _parts_changed(copy.deepcopy(Wrapper(Block()))),
    "unpickled, parts changed since": lambda: _parts_changed(pickle.loads(pickle.dumps(Wrapper(Block())))),
    "copied by hand": lambda: copy.deepcopy(CopiedByHand(Block())),
    "copied by hand, parts changed since": lambda: _parts_changed(copy.deepcopy(CopiedByHand(Block()))),
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
def test_what_may_be_a_part_of_something_unseen_is_found_among_all_objects(
    build: Callable[[], nn.Module], registered: RegisteredModules
) -> None:
    model = build()
    assert roots(model, registered.seen) == [model]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("kind", [Wrapper, CopiedByHand])
def test_a_head_that_replaces_a_part_of_a_copy_is_not_taken_for_the_whole(
    kind: type[Wrapper], copied: Callable[[nn.Module], Wrapper], registered: RegisteredModules
) -> None:
    """Of a model that was loaded whole, only the head is trained: the list in which it lies was optimized."""
    model = copied(kind(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    model.inner[1] = nn.Linear(2, 1)
    assert roots(model.inner[1], registered.seen) == [model]


def test_what_was_there_before_is_found_with_a_new_part(registered: RegisteredModules) -> None:
    registered.stop()
    model = Wrapper(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    registered.start()
    model.inner[1] = nn.Linear(2, 1)
    assert roots(model.inner[1], registered.seen) == [model]


def test_a_class_may_have_children_of_its_own(registered: RegisteredModules) -> None:
    class Tree(Wrapper):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__(inner)
            self.children = [1, 2]  # type: ignore[assignment]

    tree = Tree(copy.deepcopy(Block()))
    assert roots(tree, registered.seen) == [tree]


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

"""Models with state of their own, or with hooks of the loop's, train under accel as without it."""

from __future__ import annotations

import functools
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import accel
from accel import entry, strategies
from accel.guard.snapshot import ModelSnapshot, own_generators
from accel.run import Run
from tests.accel.loops import Net, Quick, assert_trains_the_same, loss_of, make

pytestmark = pytest.mark.usefixtures("only_quick")


class Noisy(Net):
    """Adds noise that it draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(1)
        self.others: Any = [random.Random(2), np.random.default_rng(3), np.random.RandomState(4)]

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.others
        drawn = one.random() + two.random() + three.rand()
        noise = torch.randn(x.shape, generator=self._generator)
        return super().forward(x + 0.1 * noise + 0.01 * drawn)


class Codebook(Net):
    """Keeps a moving average of its inputs in a parameter, which no optimizer updates."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.code.data.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x + self.code.detach())


class Replaced(Net):
    """Puts another parameter in the place of that codebook in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.code = nn.Parameter(torch.lerp(self.code.detach(), x.detach().mean(0), 0.1))
        return super().forward(x + self.code.detach())


class Features:
    """What hooks take of calls until the loss needs it; not an attribute of the model."""

    def __init__(self) -> None:
        self.of_calls: list[Tensor] = []
        self.gradients = 0

    def take(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.of_calls.append(output)

    def count(self, gradient: Tensor) -> Tensor:
        self.gradients += 1
        return gradient * (1 + 0.01 * (self.gradients % 7))

    def penalty(self) -> Tensor:
        penalty = sum((each.pow(2).mean() for each in self.of_calls), torch.tensor(0.0))
        self.of_calls.clear()
        return 0.1 * penalty


FEATURES = Features()


class HookedByMethod(Net):
    """A hook appends to what the loop holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.register_forward_hook(FEATURES.take)


class HookedByClosure(Net):
    """The same by a function, in whose closure it stands."""

    def __init__(self) -> None:
        super().__init__()
        features = FEATURES
        self.inner.register_forward_hook(lambda module, args, output: features.of_calls.append(output))


class GradientHook(Net):
    """A hook of a parameter counts its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(FEATURES.count)


class Anneals(Net):
    """Counts its calls in a private attribute, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        return super().forward(x * (1 + 0.01 * self._calls))


HOOKED = [HookedByMethod, HookedByClosure, GradientHook]


class Given(Net):
    """Draws from a generator that it is called with."""

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=generator))


class Fails(Quick):
    """Returns NaN in its 20th call."""

    calls: ClassVar[int] = 0

    def enable(self, run: Run, setting: Any) -> None:
        super().enable(run, setting)

        def wrap(call: Any) -> Any:
            def failing(*args: Any, **kwargs: Any) -> Any:
                Fails.calls += 1
                outputs = call(*args, **kwargs)
                return outputs * float("nan") if Fails.calls == 20 else outputs

            return failing

        run.gate.add(self.name, wrap)


def state_of(model: nn.Module, generator: torch.Generator) -> list[Any]:
    own = [str(source.read()) for source in own_generators(model)]
    weights = [value.tolist() for value in model.state_dict().values()]
    return [*own, *weights, generator.get_state().tolist()]


def trained(kind: type[Net], steps: int, optimized: bool) -> tuple[list[Any], Any]:
    FEATURES.__init__()  # type: ignore[misc]
    model, loader, optimizer = make(kind=kind)
    generator = torch.Generator().manual_seed(5)
    if optimized:
        model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60)
    done = 0
    while done < steps:
        for x, target in loader:
            optimizer.zero_grad()
            outputs = model(x, generator=generator) if kind is Given else model(x)
            (loss_of(outputs, target) + FEATURES.penalty()).backward()
            optimizer.step()
            done += 1
    report = accel.explain(model) if optimized else None
    return state_of(model, generator), report


class Kept:
    """Keeps what it is called with, and counts its calls."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self._calls = 0

    def note(self, _: Any, given: tuple[Tensor], output: Tensor) -> None:
        self.seen.append(output)
        self._calls += 1


def hooks_of_each_kind(model: Net) -> list[list[Tensor]]:
    """Register hooks that keep what passes, in the ways that people write them, and return where they keep it."""
    kept, seen = Kept(), list[Tensor]()
    model.norm.register_forward_hook(kept.note)
    model.head.register_forward_hook(lambda _, given, output: kept.seen.append(output))
    model.inner.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model.inner.register_forward_hook(functools.partial(lambda to, _, given, output: to.append(output), seen))
    model.drop.register_forward_hook(lambda _, given, output: KEPT.append(output))
    model.inner.weight.register_hook(torch.no_grad()(lambda gradient: KEPT.append(gradient)))
    return [kept.seen, seen, KEPT]


KEPT: list[Tensor] = []


def test_a_model_with_hooks_of_the_loop_s_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that clears its lists at the end of a step found what a replay had given in them at the next."""
    monkeypatch.setattr(strategies, "REGISTRY", [Quick])

    def train(model: Any, loader: Any, optimizer: Any) -> None:
        lists = hooks_of_each_kind(model)
        for _ in range(10):
            for x, target in loader:
                optimizer.zero_grad()
                outputs = model(x)
                (loss_of(outputs, target) + sum(each[0].square().mean() for each in lists)).backward()
                assert [len(each) for each in lists] == [2, 2, 2]
                for each in lists:
                    each.clear()
                optimizer.step()
        if entry.optimized(model) is not None:
            row = accel.explain(model).rows[0]
            assert row.status == "not tried" and "may keep what it sees" in row.why

    assert_trains_the_same(train)


def test_hooks_of_all_modules_are_hooks_of_the_model() -> None:
    model, _, _ = make()
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, output: None)
    try:
        assert "may keep what it sees" in ModelSnapshot(model).unkept
    finally:
        handle.remove()
    assert not ModelSnapshot(model).unkept


def test_private_attributes_of_parametrized_modules_are_put_back() -> None:
    """Their class is one that torch derives from the user's."""
    model = nn.Sequential(weight_norm(Counting(2, 2)))
    before = ModelSnapshot(model)
    model(torch.ones(1, 2))
    assert model[0]._calls == 1
    before.restore()
    assert model[0]._calls == 0


class Counting(nn.Linear):
    _calls = 0

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        return super().forward(x)


def test_hooks_of_libraries_are_taken_to_keep_nothing() -> None:
    model, _, _ = make()
    assert not ModelSnapshot(model).unkept
    model.inner.register_forward_hook(transformers_hook)
    assert "transformers_hook may keep" in ModelSnapshot(model).unkept
    transformers_hook.__module__ = "numpy.linalg"
    assert not ModelSnapshot(model).unkept


def transformers_hook(module: nn.Module, given: Any, output: Tensor) -> None:
    """Stands for one that PEFT registers."""


@pytest.mark.parametrize("kind", [Noisy, Codebook, Replaced, Given, Anneals, *HOOKED])
def test_a_search_leaves_the_plain_loop_s_bits(kind: type[Net]) -> None:
    plain, _ = trained(kind, 130, False)
    accelerated, report = trained(kind, 130, True)
    assert accelerated == plain
    assert report.plan == ({} if kind in (Codebook, *HOOKED) else {"quick": None})


@pytest.mark.parametrize("kind", [Noisy, Replaced, Given, Anneals])
def test_a_call_that_is_made_again_leaves_the_plain_loop_s_bits(
    kind: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Fails])
    monkeypatch.setattr(Fails, "calls", 0)
    plain, _ = trained(kind, 130, False)
    accelerated, _ = trained(kind, 130, True)
    assert accelerated == plain
    assert Fails.calls >= 20

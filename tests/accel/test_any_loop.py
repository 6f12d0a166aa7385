"""Any loop a user may write: under `exact` it ends with the plain loop's bits, and each model saw its steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import accel
from accel import entry
from tests.accel.loops import Net, Quick, loss_of, make_loader
from tests.sampling import examples


class Stop(Exception):
    """The user's own."""


@dataclass(frozen=True)
class Epoch:
    """One pass of a loop: which models are trained on each batch of which loader, and what happens in it."""

    models: tuple[int, ...]
    loader: int
    optimize: tuple[tuple[int, int, bool], ...]
    """Calls before it: model, loader, whether an optimizer is passed."""
    ends: str
    at: int
    bad: str
    bad_at: int
    iterates: str


@st.composite
def epochs(draw: Any) -> Epoch:
    number = st.integers(0, 1)
    return Epoch(
        models=draw(st.sampled_from([(0,), (1,), (0, 1)])),
        loader=draw(number),
        optimize=tuple(draw(st.lists(st.tuples(number, number, st.booleans()), max_size=2))),
        ends=draw(st.sampled_from(["whole", "whole", "break", "raise", "interrupt"])),
        at=draw(st.integers(1, 12)),
        bad=draw(st.sampled_from(["", "", "", "input", "loss", "gradient"])),
        bad_at=draw(st.integers(0, 12)),
        iterates=draw(st.sampled_from(["for", "next", "kept"])),
    )


class Loop:
    """The user's script; with `optimized` the calls of `optimize` in it are made."""

    def __init__(self, optimized: bool) -> None:
        torch.manual_seed(0)
        Quick.on = False
        self.optimized = optimized
        self.models: list[Any] = [Net(), Net()]
        self.optimizers: list[Any] = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in self.models]
        self.loaders: list[Any] = [make_loader(), make_loader(shuffle=False)]
        self.heard: dict[tuple[int, int], bool] = {}
        """Model and loader: passed together."""
        self.expected = [0, 0]
        """Steps that each model made on batches of a loader that was passed with it."""
        self.iterators: list[Iterator[Any] | None] = [None, None]

    def run(self, passes: list[Epoch]) -> None:
        torch.manual_seed(1)
        for one in passes:
            for model, loader, with_optimizer in one.optimize:
                self.optimize(model, loader, with_optimizer)
            with contextlib.suppress(Stop, KeyboardInterrupt):
                self.epoch(one)

    def optimize(self, model: int, loader: int, with_optimizer: bool) -> None:
        if not self.optimized:
            return
        given = (self.models[model], self.loaders[loader], *([self.optimizers[model]] if with_optimizer else []))
        back = accel.optimize(*given, allow="exact", budget=60)
        assert len(back) == len(given)
        assert back[0] is self.models[model]
        self.loaders[loader] = back[1]
        self.heard[model, loader] = True

    def batches(self, one: Epoch) -> Iterator[Any]:
        if one.iterates == "for":
            yield from self.loaders[one.loader]
            return
        kept = self.iterators[one.loader] if one.iterates == "kept" else None
        iterator = iter(self.loaders[one.loader]) if kept is None else kept
        self.iterators[one.loader] = iterator if one.iterates == "kept" else None
        while (batch := next(iterator, None)) is not None:
            yield batch
        self.iterators[one.loader] = None

    def epoch(self, one: Epoch) -> None:
        for number, (x, target) in enumerate(self.batches(one)):
            for model in one.models:
                self.step(model, x, target, one.bad if number == one.bad_at else "")
                self.expected[model] += (model, one.loader) in self.heard and one.iterates != "kept"
            if number == one.at and one.ends != "whole":
                if one.ends == "break":
                    break
                raise Stop if one.ends == "raise" else KeyboardInterrupt

    def step(self, number: int, x: Tensor, target: Tensor, bad: str) -> None:
        model, optimizer = self.models[number], self.optimizers[number]
        optimizer.zero_grad()
        loss = loss_of(model(x * math.nan if bad == "input" else x), target)
        (loss * math.nan if bad == "loss" else loss).backward()
        if bad == "gradient":
            model.head.weight.grad = torch.full_like(model.head.weight, math.inf)
        optimizer.step()

    def left(self) -> list[str]:
        tensors: list[Tensor] = [torch.get_rng_state()]
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            tensors += model.state_dict().values()
            tensors += [v for kept in optimizer.state.values() for v in kept.values() if isinstance(v, Tensor)]
        return [str(tensor.nan_to_num(nan=12345.0).tolist()) for tensor in tensors]


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch, only_quick: None) -> None:
    monkeypatch.setattr("tests.accel.loops.WAIT_S", 0.0002)


HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
ANY_LOOP = given(passes=st.lists(epochs(), min_size=1, max_size=8))


@settings(max_examples=examples(10), deadline=None, suppress_health_check=HEALTH)
@ANY_LOOP
def test_any_loop_ends_with_the_bits_of_the_plain_one(no_waiting: None, passes: list[Epoch]) -> None:
    assert_plain_bits(passes)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, suppress_health_check=HEALTH)
@ANY_LOOP
def test_many_loops_end_with_the_bits_of_the_plain_one(no_waiting: None, passes: list[Epoch]) -> None:
    assert_plain_bits(passes)


def assert_plain_bits(passes: list[Epoch]) -> None:
    plain, accelerated = Loop(False), Loop(True)
    plain.run(passes)
    try:
        accelerated.run(passes)
        assert accelerated.left() == plain.left()
        for number, model in enumerate(accelerated.models):
            if model not in entry.MODELS:
                continue
            session, report = entry.MODELS[model].session, accel.explain(model)
            assert session.failed == ""
            assert [row.why for row in report.rows if row.why.startswith(("wrong", "its", "a gradient"))] == []
            # A step is closed when the next batch is asked for; one that raised or was broken off may not be.
            missed = 1 + sum(1 for one in passes if one.ends != "whole" or one.iterates == "kept")
            assert report.steps >= accelerated.expected[number] - missed - 1
    finally:
        for model in accelerated.models:
            accel.undo(model)
    assert isinstance(accelerated.models[0], nn.Module)

"""Loops that repeat batches which they have kept: in a list, by itertools.cycle, one for ever."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import accel
from accel import entry, strategies
from accel.profiler.loop.steps import UNFED_AFTER
from accel.run import Run
from tests.accel import loops
from tests.accel.loops import (
    Quick,
    assert_same,
    assert_trains_the_same,
    everything,
    loss_of,
    make,
    play_clock,
)
from tests.sampling import examples

Batches = Iterator[Any]


class Dragging(Quick):
    """The plain call, and a wait beside it."""

    name = "dragging"

    def enable(self, run: Run, setting: Any) -> None:
        def wrap(call: Any) -> Any:
            def drags(*args: Any) -> Any:
                assert loops.clock is not None
                loops.clock.sleep(0.001)
                return call(*args)

            return drags

        run.gate.add(self.name, wrap)


def cycled(loader: Any) -> Batches:
    return itertools.cycle(loader)


def listed(loader: Any) -> Batches:
    batches = list(loader)
    while True:
        yield from batches


def one(loader: Any) -> Batches:
    return itertools.repeat(next(iter(loader)))


def step(model: Any, optimizer: Any, x: Any, target: Any) -> None:
    optimizer.zero_grad()
    loss_of(model(x), target).backward()
    optimizer.step()


def train(
    batches: Callable[[Any], Batches],
    *,
    steps: int = 400,
    wraps: bool = True,
    each: int = 1,
    context: Callable[[], Any] = contextlib.nullcontext,
) -> tuple[dict[str, Any], Any]:
    """Train, and return all that was trained, and the report."""
    model, loader, optimizer = make()
    if wraps:
        model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    for number, (x, target) in enumerate(itertools.islice(batches(loader), steps)):
        with context():
            loss = loss_of(model(x), target)
        loss.backward()
        if number % each == each - 1:
            optimizer.step()
            optimizer.zero_grad()
    report = copy.deepcopy(accel.explain(model)) if wraps else None
    accel.undo(model)
    return everything(model, optimizer), report


def bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.sample(2)
@pytest.mark.parametrize("context", [contextlib.nullcontext, bf16])
@pytest.mark.parametrize("batches", [cycled, listed, one])
def test_a_loop_that_repeats_batches_is_made_faster_and_trains_the_same(
    only_quick: None, batches: Callable[[Any], Batches], context: Callable[[], Any]
) -> None:
    plain, _ = train(batches, wraps=False, context=context)
    trained, report = train(batches, context=context)
    assert_same(trained, plain)
    assert report.state == "done" and report.plan == {"quick": None} and report.speedup > 1.2
    assert 400 - 3 * UNFED_AFTER < report.steps <= 400


@settings(max_examples=examples(8), deadline=None)
@given(each=st.integers(1, 3), steps=st.integers(100, 500), batches=st.sampled_from([cycled, listed, one]))
def test_whatever_the_loop_repeats_and_accumulates_it_trains_the_same(
    each: int, steps: int, batches: Callable[[Any], Batches]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "REGISTRY", [Quick])
        play_clock(patch.setattr)
        plain, _ = train(batches, wraps=False, steps=steps, each=each)
        trained, _ = train(batches, steps=steps, each=each)
    assert_same(trained, plain)


def test_what_is_being_tried_when_the_requests_end_does_not_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Dragging])
    play_clock(monkeypatch.setattr)
    model, loader, optimizer = make()
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    session = entry.MODELS[model].session

    while not session.active:
        for x, target in loader:
            step(model, optimizer, x, target)
            if session.active:
                break
    for _ in range(4 * UNFED_AFTER):
        step(model, optimizer, x, target)

    assert not session.active
    assert accel.explain(model).rows[0].status == "undone"


def test_several_updates_with_each_batch_are_one_step(only_quick: None) -> None:
    model, loader, optimizer = make()
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    for _ in range(3):
        for x, target in loader:
            for _ in range(5):
                optimizer.zero_grad()
                loss_of(model(x), target).backward()
                optimizer.step()
    assert accel.explain(model).steps <= 3 * 13


def test_a_closure_that_calls_the_model_ends_no_step_within_its_update(only_quick: None) -> None:
    def train(model: Any, loader: Any, _: Any) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        x, target = next(iter(loader))

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model(x), target)
            loss.backward()
            return loss

        for _ in range(2 * UNFED_AFTER):
            optimizer.step(closure)

    assert_trains_the_same(train, of_the_optimizer=False)


# -- what a review found -----------------------------------------------------------------------------------------------


def test_the_short_last_batch_is_not_taken_for_all_of_them(only_quick: None) -> None:
    _, report = train(cycled, steps=500)
    assert report.samples_per_step == 8 and not any("searching again" in event.text for event in report.events)


@pytest.mark.parametrize("within", [True, False])
def test_a_validation_on_another_optimized_loader_is_no_request(only_quick: None, within: bool) -> None:
    model, loader, optimizer = make()
    held_out = make()[1]
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    model, held_out, optimizer = accel.optimize(model, held_out, optimizer, budget=60)
    batches = list(loader)
    for _ in range(30):
        for x, target in batches:
            step(model, optimizer, x, target)
        with torch.no_grad() if within else contextlib.nullcontext():
            for x, _ in held_out:
                with torch.no_grad():
                    model(x)
    session = entry.MODELS[model].session
    assert session.steps > 200 and session.events.loader.moves == 0
    assert accel.explain(model).plan == {"quick": None}


@pytest.mark.parametrize("reentrant", [True, False])
def test_no_step_ends_within_what_autograd_makes_again(only_quick: None, reentrant: bool) -> None:
    def train(model: Any, loader: Any, optimizer: Any) -> None:
        for x, target in itertools.islice(cycled(loader), 300):
            optimizer.zero_grad()
            loss_of(checkpoint(model, x.requires_grad_(), use_reentrant=reentrant), target).backward()
            optimizer.step()

    assert_trains_the_same(train)


def test_what_the_loop_has_cast_stays_cast(only_quick: None) -> None:
    weights: list[torch.Tensor] = []

    def train(model: Any, loader: Any, optimizer: Any) -> None:
        torch.manual_seed(1)
        shared = nn.Linear(6, 6)
        optimizer.add_param_group({"params": list(shared.parameters())})
        for x, target in itertools.islice(cycled(loader), 300):
            optimizer.zero_grad()
            with bf16():
                first = shared(x)
                loss = loss_of(model(first), target) + shared(x + 1).square().mean()
            loss.backward()
            optimizer.step()
        weights.append(shared.weight)

    assert_trains_the_same(train)
    assert torch.equal(*weights)


def test_two_optimizers_of_one_model_step_in_one_step(only_quick: None) -> None:
    model, loader, _ = make()
    halves = list(model.parameters())
    one_half, other = (torch.optim.SGD(part, lr=0.01) for part in (halves[:3], halves[3:]))
    model, loader = accel.optimize(model, loader, budget=60)
    for x, target in itertools.islice(cycled(loader), 300):
        for optimizer in (one_half, other):
            step(model, optimizer, x, target)
    assert 150 < accel.explain(model).steps <= 300
    assert accel.explain(model).plan == {"quick": None}


def test_a_search_that_waits_for_its_budget_goes_on_when_batches_are_repeated(only_quick: None) -> None:
    """Nothing looked at the model's calls while it waited, so that none of them ended a step."""
    model, loader, optimizer = make()
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget="1%")
    controller = entry.MODELS[model].journal._controller
    for x, target in itertools.islice(cycled(loader), 3000):
        step(model, optimizer, x, target)
        if controller.plan and not controller.searching:
            break
    assert accel.explain(model).plan == {"quick": None}


def test_many_updates_with_each_of_few_batches_go_on_step_by_step(only_quick: None) -> None:
    """As in reinforcement learning: some of each batch's updates end steps, and a trial is never on for long."""

    def train(model: Any, loader: Any, optimizer: Any) -> None:
        for x, target in itertools.islice(loader, 4):
            for _ in range(120):
                step(model, optimizer, x, target)
        record = entry.optimized(model)
        assert record is None or record.session.steps > 4 * 40

    assert_trains_the_same(train)

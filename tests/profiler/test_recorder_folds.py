"""Scripts that go on to another model, or make their optimizers anew: what is gone is let go of."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from accel.profiler.loop import called_modules, callslot, facts
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from tests.accel.loops import PlayedClock
from tests.profiler.test_recorder import parts, train


@pytest.fixture
def looks(recorder: Recorder, clock: PlayedClock, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each look for the modules of an optimizer, which takes 20 ms."""
    taken: list[int] = []
    plain = called_modules._modules

    def look() -> list[nn.Module]:
        taken.append(1)
        clock.sleep(0.02)
        return plain()

    monkeypatch.setattr(called_modules, "_modules", look)
    return taken


def test_models_and_optimizers_of_earlier_folds_are_let_go_of(recorder: Recorder) -> None:
    alive = weakref.WeakSet[Any]()
    for _ in range(5):
        model, optimizer, loader = parts()
        alive.update((model, optimizer))
        train(model, optimizer, loader)
    gc.collect()

    assert set(alive) == {model, optimizer}
    assert recorder.roots.modules == [model]
    assert list(recorder.optimizers) == [optimizer]


def test_the_models_of_optimizers_that_are_kept_stay_marked(recorder: Recorder, seen: list[Measurement]) -> None:
    folds = [parts() for _ in range(3)]
    for model, optimizer, loader in folds:
        train(model, optimizer, loader)

    assert {id(module) for module in recorder.roots.modules} == {id(model) for model, *_ in folds}


def test_the_model_of_an_optimizer_that_is_made_for_each_epoch_stays_marked(
    recorder: Recorder, seen: list[Measurement], looks: list[int]
) -> None:
    model, _, loader = parts()
    del _
    for _ in range(6):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    gc.collect()
    assert recorder.roots.modules == [model]
    assert len(recorder.optimizers) == 0 and len(looks) == 1
    assert all(measured.phases["forward"] > 0 for measured in seen[2:])


def test_two_models_whose_optimizers_are_made_anew_by_turns_are_looked_for_twice_at_most(
    recorder: Recorder, looks: list[int]
) -> None:
    models, (*_, loader) = [parts()[0] for _ in range(2)], parts()
    for batch in loader:
        for model in models:
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch])

    assert len(looks) <= 4
    assert {id(module) for module in recorder.roots.modules} == set(map(id, models))
    recorder.stop()
    assert not any(callslot.contents(model) for model in models)


def test_an_optimizer_for_each_step_ends_the_steps_of_a_loop_without_a_loader(
    recorder: Recorder, seen: list[Measurement]
) -> None:
    """The first one, which was to end the steps, was kept although it was gone: fifty steps counted as one."""
    model, *_ = parts()
    for _ in range(40):
        train(
            model, torch.optim.SGD(model.parameters(), lr=0.1), [(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))]
        )

    assert len(seen) >= 35


def test_to_look_for_a_new_model_is_in_no_step(recorder: Recorder, seen: list[Measurement], looks: list[int]) -> None:
    """A new model every few steps looked as if the loop did something else after its first ones."""
    for _ in range(4):
        model, optimizer, loader = parts()
        train(model, optimizer, loader)

    assert len(looks) == 4
    assert max(measured.phases["outside"] for measured in seen) < 0.01
    assert recorder.delivery.unattributed() < 0.02


def test_a_parameter_that_lies_where_another_one_lay_is_another_one(recorder: Recorder) -> None:
    """Parameters are told by their ids, which those of a later model may get."""
    for _ in range(4):
        weight = nn.Parameter(torch.zeros(3))
        optimizer: Any = torch.optim.SGD([weight], lr=0.1)
        weight.sum().backward()
        optimizer.step()
        assert set(recorder.roots._owned) == {id(weight)}
        del weight, optimizer
        gc.collect(1)  # they are young, and all of torch is not looked through


def test_the_model_of_an_optimizer_for_each_parameter_is_looked_for_once(
    recorder: Recorder, seen: list[Measurement], looks: list[int]
) -> None:
    model, _, loader = parts()
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()

    assert (len(looks), recorder.delivery.steps) == (1, 10)
    assert recorder.roots.modules == [model]


# -- what can't be described -------------------------------------------------------------------------------------------


def test_a_part_that_no_call_has_reached_has_no_elements_yet(recorder: Recorder) -> None:
    model, _, loader = parts()
    later = nn.LazyLinear(2)
    train(model, torch.optim.SGD([*model.parameters(), *later.parameters()], lr=0.1), loader)

    assert (recorder.delivery.failed, recorder.delivery.steps) == ("", 10)
    described = recorder.trained.optimizer
    assert (described.tensors, described.elements) == (6, sum(p.numel() for p in model.parameters()))


def test_an_optimizer_that_can_not_be_described_ends_the_recording_alone(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("mine")

    monkeypatch.setattr(facts, "of_training", broken)
    train(*parts())

    assert recorder.delivery.failed == "the recorder stopped at step 0: RuntimeError: mine"

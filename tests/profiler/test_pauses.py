"""An experiment changes the steps and nothing else: not what lies between them, and not what comes after the last."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import nn

from accel.profiler.experiments.counterfactuals import Counterfactual, no_collector
from accel.profiler.experiments.whatif import experiment
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment
from tests.profiler.test_recorder import parts, train
from tests.profiler.test_recorder_loaders import anew
from tests.profiler.test_whatif import Switch


class Run:
    """A loop with an experiment from its fourth step on."""

    def __init__(self, recorder: Recorder, switch: Counterfactual, *, together: bool = False) -> None:
        self.model, self.optimizer, self.loader = parts()
        self.recorder, self.switch, self.together = recorder, switch, together
        self.result: Experiment | None = None
        self.before: dict[str, torch.Tensor] = {}
        """The parameters when the experiment began."""
        self.course = self._course()
        next(self.course)
        recorder.delivery.on_step = self._step

    def _course(self) -> Generator[None, Measurement, None]:
        for _ in range(3):
            yield
        self.before = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.result = yield from experiment(self.switch, self.recorder, together=self.together)
        while True:
            yield

    def _step(self, measured: Measurement) -> None:
        self.course.send(measured)

    def is_as_before(self) -> bool:
        return all(torch.equal(value, self.before[name]) for name, value in self.model.named_parameters())

    def train(self, batches: Any = None, after: Callable[[], None] = lambda: None) -> None:
        train(self.model, self.optimizer, self.loader if batches is None else batches, after)


def test_nothing_is_switched_between_epochs_nor_after_the_last(recorder: Recorder) -> None:
    switch = Switch()
    run = Run(recorder, switch)
    on_in, on_between = [], []
    for _ in range(14):
        run.train(after=lambda: on_in.append(switch.on))
        on_between.append(switch.on)

    assert run.result is not None and run.result.verdict != "void"
    assert 16 <= sum(on_in) <= 70  # four to twelve blocks of four steps, and one for each switching
    assert not any(on_between)


def test_nothing_is_switched_once_a_loop_was_left_by_break(recorder: Recorder) -> None:
    switch = Switch()
    run = Run(recorder, switch)
    for number, batch in enumerate(run.loader):
        run.train([batch])
        if number > 3 and switch.on:
            break

    assert number < 9
    assert not switch.on


@pytest.mark.sample(3)
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("where", ["after the update", "before the forward pass", "before the backward pass"])
def test_nothing_is_switched_in_an_evaluation(recorder: Recorder, where: str, mode: bool, gradients: bool) -> None:
    """Between two steps and in the midst of one; the rest of the step is again as the experiment wants it."""
    switch = Switch()
    run = Run(recorder, switch)
    in_evaluation, in_step, validation = [], [], anew(run.loader)

    def evaluate() -> None:
        run.model.train(mode)
        with torch.set_grad_enabled(gradients):
            for x, _ in validation:
                with torch.no_grad():
                    run.model(x)
                in_evaluation.append(switch.on)
        run.model.train()

    run.model.register_forward_hook(lambda *_: in_step.append(switch.on) if torch.is_grad_enabled() else None)
    for _ in range(14):
        for number, (x, y) in enumerate(run.loader):
            for place in ("before the forward pass", "before the backward pass", "after the update"):
                if place == "before the backward pass":
                    loss = nn.functional.cross_entropy(run.model(x), y)
                if number % 5 == 4 and place == where:
                    evaluate()
            loss.backward()
            run.optimizer.step()

    assert run.result is not None and run.result.verdict != "void"
    assert not any(in_evaluation)
    assert 16 <= sum(in_step) <= 70


IN_TURNS = [False] * 7 + ([True] * 9 + [False] * 9) * 3
"""Three steps before the experiment, a block of four without; then two blocks at a time, and one step to switch."""


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_rank_that_evaluates_takes_the_same_steps_as_one_that_does_not(recorder: Recorder, evaluates: bool) -> None:
    """Only the first rank of many evaluates; without an exchange on one of them, the others would wait for it."""
    switch = Switch()
    run = Run(recorder, switch, together=True)
    on_in: list[bool] = []
    run.model.register_forward_hook(lambda *_: on_in.append(switch.on) if torch.is_grad_enabled() else None)
    validation = anew(run.loader)

    def validate() -> None:
        if evaluates and len(on_in) % 3 == 0:
            with torch.no_grad():
                for x, _ in validation:
                    run.model(x)

    for _ in range(10):
        run.train(after=validate)

    assert on_in[: len(IN_TURNS)] == IN_TURNS


def test_what_an_experiment_has_taught_is_gone_in_an_evaluation_and_at_the_end(recorder: Recorder) -> None:
    run = Run(recorder, Switch(changes_learning=True), together=True)
    kept: list[bool] = []
    run.train()
    kept.append(run.is_as_before())
    with torch.no_grad():
        for x, _ in anew(run.loader):
            run.model(x)
    for number, batch in enumerate(run.loader):
        run.train([batch])
        if number % 4 == 3:
            assert not run.is_as_before()
            run.model.eval()
            with torch.no_grad():
                run.model(batch[0])
            run.model.train()
            kept.append(run.is_as_before())
    kept.append(run.is_as_before())

    assert run.result is None  # the experiment is not over
    assert kept == [True] * 4


@pytest.mark.parametrize("save", ["state_dict", "torch.save"])
def test_what_an_experiment_has_taught_is_not_saved(recorder: Recorder, save: str) -> None:
    run = Run(recorder, Switch(changes_learning=True), together=True)
    original = torch.save
    for number, batch in enumerate(run.loader):
        run.train([batch])
        if number == 7:
            assert not run.is_as_before()
            run.model.state_dict() if save == "state_dict" else torch.save(
                dict(run.model.named_parameters()), io.BytesIO()
            )
            assert run.is_as_before()
    run.course.close()

    assert torch.save is original


def test_a_step_that_an_evaluation_interrupts_can_still_go_back(recorder: Recorder) -> None:
    """Its forward pass is over, so the state is not put back under it."""
    run = Run(recorder, Switch(changes_learning=True), together=True)
    for number, (x, y) in enumerate(run.loader):
        loss = nn.functional.cross_entropy(run.model(x), y)
        if number == 7:
            run.model.eval()
            with torch.no_grad():
                run.model(x)
            run.model.train()
            assert not run.is_as_before()
        loss.backward()
        run.optimizer.step()

    assert run.is_as_before()


def test_an_experiment_without_a_whole_step_is_void(recorder: Recorder) -> None:
    run = Run(recorder, Switch())

    def validate() -> None:
        run.model.eval()
        with torch.no_grad():
            run.model(torch.randn(4, 8))
        run.model.train()

    for _ in range(16):
        run.train(after=validate)

    assert run.result is not None and run.result.verdict == "void"


def test_the_collector_is_back_after_the_last_step(recorder: Recorder) -> None:
    run = Run(recorder, no_collector(lambda: 0.0))
    off: list[bool] = []
    collect = gc.collect
    for _ in range(14):
        run.train(after=lambda: off.append(not gc.isenabled()))
        assert gc.isenabled() and gc.collect is collect

    assert any(off)

"""An experiment changes the steps and nothing else: not what lies between them, and not what comes after the last."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import nn

from accel.profiler.experiments.whatif import Counterfactual, experiment, no_collector
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment
from tests.profiler.test_recorder import parts, train
from tests.profiler.test_recorder_loaders import anew
from tests.profiler.test_whatif import Switch


class Run:
    """A loop with an experiment from its fourth step on."""

    def __init__(self, recorder: Recorder, switch: Counterfactual) -> None:
        self.model, self.optimizer, self.loader = parts()
        self.recorder, self.switch = recorder, switch
        self.result: Experiment | None = None
        self.course = self._course()
        next(self.course)
        recorder.delivery.on_step = self._step

    def _course(self) -> Generator[None, Measurement, None]:
        for _ in range(3):
            yield
        self.result = yield from experiment(self.switch, self.recorder.delivery.pauses)
        while True:
            yield

    def _step(self, measured: Measurement) -> None:
        self.course.send(measured)

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

"""Counterfactuals: each switches one thing, puts it back, and the experiment says what it gave."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Generator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel.profiler.experiments.whatif import (
    ALONE,
    TOGETHER,
    AllThreads,
    FetchedAhead,
    NoAnomalyMode,
    NoCollector,
    NoExchange,
    OneUpdate,
    Snapshot,
    can_update_at_once,
    experiment,
)
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment


class Switch:
    name = "switch"
    what = "it was on"
    changes_learning = True

    def __init__(self) -> None:
        self.on = False
        self.switched = 0
        self.works = True

    def enable(self) -> None:
        assert not self.on
        self.on, self.switched = True, self.switched + 1

    def disable(self) -> None:
        assert self.on
        self.on = False

    def worked(self) -> bool:
        return self.works


def drive(
    course: Generator[None, Measurement, Experiment], seconds: Callable[[], float], limit: int = 1000
) -> Experiment:
    next(course)
    for number in range(limit):
        try:
            course.send(Measurement(step=number, seconds=seconds()))
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
    raise AssertionError("it never ended")


class Saved(Snapshot):
    def __init__(self) -> None:
        super().__init__([], [])
        self.restored = 0

    def restore(self) -> None:
        self.restored += 1


@pytest.mark.parametrize("config", [ALONE, TOGETHER])
@pytest.mark.parametrize(("factor", "verdict"), [(0.4, "keep"), (1.0, "drop"), (1.5, "drop")])
def test_an_experiment_measures_what_the_switch_gives(config: object, factor: float, verdict: str) -> None:
    switch, saved, dice = Switch(), Saved(), random.Random(0)
    course = experiment(switch, config=config, snapshot=lambda: saved, pauses=Recorder().pauses)  # type: ignore[arg-type]

    found = drive(course, lambda: 0.01 * (factor if switch.on else 1.0) * (1 + dice.gauss(0, 0.02)))

    assert found.verdict == verdict
    assert found.saving.low - 0.02 <= 1 - factor <= found.saving.high + 0.02
    assert not switch.on and switch.switched > 1
    assert saved.restored == 1


def test_an_experiment_whose_switch_took_no_hold_is_void() -> None:
    switch, dice = Switch(), random.Random(0)
    switch.works = False

    found = drive(
        experiment(switch, config=ALONE, snapshot=Saved, pauses=Recorder().pauses),
        lambda: 0.01 * (1 + dice.gauss(0, 0.02)),
    )

    assert found.verdict == "void"


def test_several_ranks_always_take_the_same_number_of_steps() -> None:
    taken = []
    for factor in (0.2, 0.999, 1.0, 3.0):
        switch = Switch()
        steps = [0]

        def seconds(switch: Switch = switch, factor: float = factor, steps: list[int] = steps) -> float:
            steps[0] += 1
            return 0.01 * (factor if switch.on else 1.0)

        drive(experiment(switch, config=TOGETHER, snapshot=Saved, pauses=Recorder().pauses), seconds)
        taken.append(steps[0])

    assert len(set(taken)) == 1


def test_an_experiment_that_is_cut_short_puts_everything_back() -> None:
    switch, saved = Switch(), Saved()
    course = experiment(switch, config=ALONE, snapshot=lambda: saved, pauses=Recorder().pauses)
    next(course)
    for number in range(6):
        course.send(Measurement(step=number, seconds=0.01))
    assert switch.on
    course.close()

    assert not switch.on
    assert saved.restored == 1


def test_the_collector_comes_back() -> None:
    collect = gc.collect
    switch = NoCollector(lambda: 0.0)
    switch.enable()
    assert not gc.isenabled()
    assert gc.collect() == 0
    switch.disable()

    assert gc.isenabled()
    assert gc.collect is collect


@pytest.mark.parametrize(("by_name", "worked"), [(False, True), (True, False)])
def test_a_collector_that_was_imported_by_name_goes_on(by_name: bool, worked: bool) -> None:
    spent = [0.0]

    def collect() -> int:
        spent[0] += 0.1
        return 0

    found, gc.collect = gc.collect, collect
    try:
        switch = NoCollector(lambda: spent[0])
        for turn in range(8):
            (collect if by_name else gc.collect)()
            switch.disable() if turn % 2 else switch.enable()
    finally:
        gc.collect = found

    assert switch.worked() is worked


def test_a_collector_that_never_ran_was_not_switched_off() -> None:
    switch = NoCollector(lambda: 1.0)
    switch.enable()
    switch.disable()

    assert not switch.worked()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_comes_back() -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        switch = NoAnomalyMode()
        switch.enable()
        assert not torch.is_anomaly_enabled()
        switch.disable()
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    assert switch.worked()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_of_a_context_within_the_step_is_off_too() -> None:
    switch = NoAnomalyMode()
    switch.enable()
    with torch.autograd.detect_anomaly():
        assert not torch.is_anomaly_enabled()
    switch.disable()

    assert not torch.is_anomaly_enabled()
    assert switch.worked()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_does_not_outlive_its_context() -> None:
    switch = NoAnomalyMode()
    with torch.autograd.detect_anomaly():
        switch.enable()
    switch.disable()

    assert not torch.is_anomaly_enabled()


def test_anomaly_mode_that_is_off_anyway_is_not_switched_off() -> None:
    switch = NoAnomalyMode()
    switch.enable()
    switch.disable()

    assert not switch.worked()


def test_threads_come_back() -> None:
    before = torch.get_num_threads()
    switch = AllThreads(before + 1)
    switch.enable()
    assert torch.get_num_threads() == before + 1
    switch.disable()
    assert torch.get_num_threads() == before
    assert switch.worked()


def test_threads_that_the_loop_sets_itself_are_not_switched() -> None:
    before = torch.get_num_threads()
    switch = AllThreads(before + 1)
    switch.enable()
    torch.set_num_threads(before)
    switch.disable()

    assert not switch.worked()


def test_a_batch_fetched_ahead_is_counted() -> None:
    recorder = Recorder()
    switch = FetchedAhead(recorder)
    switch.enable()
    switch.disable()
    recorder.fetched += 1
    assert not switch.worked()
    switch.enable()
    recorder.fetched += 1
    switch.disable()

    assert switch.worked()


@pytest.mark.parametrize("sets_it_itself", [False, True])
def test_an_exchange_that_the_loop_switches_itself_goes_on(sets_it_itself: bool) -> None:
    model = SimpleNamespace(require_backward_grad_sync=True)
    switch = NoExchange([model])  # type: ignore[list-item]
    switch.enable()
    assert not model.require_backward_grad_sync
    if sets_it_itself:
        model.require_backward_grad_sync = True
    switch.disable()

    assert model.require_backward_grad_sync
    assert switch.worked() is not sets_it_itself


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_the_optimizer_takes_the_other_path_and_learns_the_same(kind: type[torch.optim.Optimizer]) -> None:
    def trained(switching: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = kind(model.parameters(), lr=0.01, foreach=False)  # type: ignore[call-arg]
        switch = OneUpdate([optimizer])
        for step in range(8):
            if switching and step == 3:
                switch.enable()
            if switching and step == 6:
                switch.disable()
                assert switch.worked()
            optimizer.zero_grad()
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
        assert [group["foreach"] for group in optimizer.param_groups] == [False]
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.allclose(trained(True), trained(False), rtol=1e-6)


def test_only_torch_s_own_optimizers_that_loop_have_another_path() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]

    assert can_update_at_once(torch.optim.AdamW(parameters))
    assert not can_update_at_once(torch.optim.AdamW(parameters, fused=True))
    assert not can_update_at_once(torch.optim.LBFGS(parameters))


def test_a_snapshot_restores_parameters_buffers_and_optimizer_state_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()

    step()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    moments = [v.clone() for s in optimizer.state.values() for v in s.values()]
    addresses = [p.data_ptr() for p in model.parameters()]
    snapshot = Snapshot([model], [optimizer])
    step()
    assert any(not torch.equal(v, before[k]) for k, v in model.state_dict().items())
    snapshot.restore()

    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(map(torch.equal, moments, [v for s in optimizer.state.values() for v in s.values()]))
    assert [p.data_ptr() for p in model.parameters()] == addresses

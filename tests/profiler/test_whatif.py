"""Counterfactuals: each switches one thing, puts it back, and the experiment says what it gave."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Generator

import pytest
import torch
from torch import nn

from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment
from accel.profiler.whatif import (
    ALONE,
    TOGETHER,
    AllThreads,
    NoAnomalyMode,
    NoCollector,
    OneUpdate,
    Snapshot,
    StaleReads,
    can_update_at_once,
    experiment,
)


class Switch:
    name = "switch"
    what = "it was on"
    changes_learning = True

    def __init__(self) -> None:
        self.on = False
        self.switched = 0

    def enable(self) -> None:
        assert not self.on
        self.on, self.switched = True, self.switched + 1

    def disable(self) -> None:
        assert self.on
        self.on = False


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
    course = experiment(switch, config=config, snapshot=lambda: saved)  # type: ignore[arg-type]

    found = drive(course, lambda: 0.01 * (factor if switch.on else 1.0) * (1 + dice.gauss(0, 0.02)))

    assert found.verdict == verdict
    assert found.saving.low - 0.02 <= 1 - factor <= found.saving.high + 0.02
    assert not switch.on and switch.switched > 1
    assert saved.restored == 1


def test_several_ranks_always_take_the_same_number_of_steps() -> None:
    taken = []
    for factor in (0.2, 0.999, 1.0, 3.0):
        switch = Switch()
        steps = [0]

        def seconds(switch: Switch = switch, factor: float = factor, steps: list[int] = steps) -> float:
            steps[0] += 1
            return 0.01 * (factor if switch.on else 1.0)

        drive(experiment(switch, config=TOGETHER, snapshot=Saved), seconds)
        taken.append(steps[0])

    assert len(set(taken)) == 1


def test_an_experiment_that_is_cut_short_puts_everything_back() -> None:
    switch, saved = Switch(), Saved()
    course = experiment(switch, config=ALONE, snapshot=lambda: saved)
    next(course)
    for number in range(6):
        course.send(Measurement(step=number, seconds=0.01))
    assert switch.on
    course.close()

    assert not switch.on
    assert saved.restored == 1


def test_the_collector_comes_back() -> None:
    collect = gc.collect
    switch = NoCollector()
    switch.enable()
    assert not gc.isenabled()
    assert gc.collect() == 0
    switch.disable()

    assert gc.isenabled()
    assert gc.collect is collect


def test_anomaly_mode_comes_back() -> None:
    with torch.autograd.set_detect_anomaly(True):
        switch = NoAnomalyMode()
        switch.enable()
        assert not torch.is_anomaly_enabled()
        switch.disable()
        assert torch.is_anomaly_enabled()


def test_threads_come_back() -> None:
    before = torch.get_num_threads()
    switch = AllThreads(before + 1)
    switch.enable()
    assert torch.get_num_threads() == before + 1
    switch.disable()
    assert torch.get_num_threads() == before


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


def test_a_read_that_waits_is_answered_from_memory_line_by_line() -> None:
    switch = StaleReads(waits=lambda tensor: tensor.dim() == 0)
    original = torch.Tensor.item

    def first(value: float) -> object:
        return torch.tensor(value).item()

    switch.enable()
    assert [first(1.0), first(2.0)] == [1.0, 1.0]
    assert torch.tensor(3.0).item() == 3.0  # another line
    assert torch.tensor([4.0]).item() == 4.0  # one that does not wait
    switch.disable()

    assert torch.Tensor.item is original
    assert first(2.0) == 2.0

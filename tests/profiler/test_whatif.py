"""Counterfactuals: each switches one thing, puts it back, and the experiment says what it gave."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel.profiler.experiments import counterfactuals
from accel.profiler.experiments.counterfactuals import (
    Counterfactual,
    all_threads,
    can_update_at_once,
    fetched_ahead,
    last_exchange,
    no_anomaly_mode,
    no_collector,
    no_exchange,
    one_update,
)
from accel.profiler.experiments.whatif import Snapshot, experiment
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment


class Switch(Counterfactual):
    """Tells whether it is on; of the whole, whether it works."""

    def __init__(self, *, works: bool = True, changes_learning: bool = False) -> None:
        super().__init__("switch", "it was on", self._entered, lambda: works, changes_learning)
        self.on, self.switched = False, 0

    @contextmanager
    def _entered(self) -> Iterator[None]:
        assert not self.on
        self.on, self.switched = True, self.switched + 1
        yield
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


def from_fifth_step(recorder: Recorder, course: Generator[None, Measurement, Experiment]) -> list[Experiment]:
    """Let an experiment begin with the fifth step that is recorded; return a list that gets it once it has ended."""
    seen: list[Measurement] = []
    ended: list[Experiment] = []

    def step(measured: Measurement) -> None:
        seen.append(measured)
        if len(seen) == 5:
            next(course)
        elif len(seen) > 5 and not ended:
            try:
                course.send(measured)
            except StopIteration as end:
                ended.append(end.value)

    recorder.delivery.on_step = step
    return ended


@pytest.mark.parametrize(("factor", "verdict"), [(0.4, "keep"), (1.0, "drop"), (1.5, "drop")])
def test_an_experiment_measures_what_the_switch_gives(factor: float, verdict: str) -> None:
    switch, dice = Switch(), random.Random(0)
    course = experiment(switch, Recorder())

    found = drive(course, lambda: 0.01 * (factor if switch.on else 1.0) * (1 + dice.gauss(0, 0.02)))

    assert found.verdict == verdict
    assert found.saving.low - 0.02 <= 1 - factor <= found.saving.high + 0.02
    assert not switch.on and switch.switched > 1


def test_an_experiment_whose_switch_took_no_hold_is_void() -> None:
    dice = random.Random(0)
    found = drive(experiment(Switch(works=False), Recorder()), lambda: 0.01 * (1 + dice.gauss(0, 0.02)))

    assert found.verdict == "void"


def test_several_ranks_always_take_the_same_number_of_steps() -> None:
    taken = []
    for factor in (0.2, 0.999, 1.0, 3.0):
        switch, steps = Switch(), [0]

        def seconds(switch: Switch = switch, factor: float = factor, steps: list[int] = steps) -> float:
            steps[0] += 1
            return 0.01 * (factor if switch.on else 1.0)

        drive(experiment(switch, Recorder(), together=True), seconds)
        taken.append(steps[0])

    assert len(set(taken)) == 1


def test_an_experiment_that_is_cut_short_puts_everything_back() -> None:
    switch = Switch()
    course = experiment(switch, Recorder())
    next(course)
    for number in range(6):
        course.send(Measurement(step=number, seconds=0.01))
    assert switch.on
    course.close()

    assert not switch.on


def test_the_collector_comes_back() -> None:
    collect = gc.collect
    with no_collector(lambda: 0.0).off():
        assert not gc.isenabled()
        assert gc.collect() == 0

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
        switch = no_collector(lambda: spent[0])
        for _ in range(4):
            (collect if by_name else gc.collect)()
            with switch.off():
                (collect if by_name else gc.collect)()
    finally:
        gc.collect = found

    assert switch.worked() is worked


def test_a_collector_that_never_ran_was_not_switched_off() -> None:
    switch = no_collector(lambda: 1.0)
    with switch.off():
        pass

    assert not switch.worked()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_comes_back() -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        switch = no_anomaly_mode()
        with switch.off():
            assert not torch.is_anomaly_enabled()
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    assert switch.worked()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode_is_on", [False, True])
def test_anomaly_mode_of_a_context_within_the_step_is_off_too(mode_is_on: bool) -> None:
    switch = no_anomaly_mode()
    with switch.off(), torch.autograd.set_detect_anomaly(mode_is_on):
        assert not torch.is_anomaly_enabled()

    assert not torch.is_anomaly_enabled()
    assert switch.worked() is mode_is_on


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_does_not_outlive_its_context() -> None:
    off = no_anomaly_mode().off()
    with torch.autograd.detect_anomaly():
        off.__enter__()
    off.__exit__(None, None, None)

    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize("loop_sets_them", [False, True])
def test_threads_come_back(loop_sets_them: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(counterfactuals, "usable_cores", lambda: before + 1)
    switch = all_threads()
    with switch.off():
        assert torch.get_num_threads() == before + 1
        if loop_sets_them:
            torch.set_num_threads(before)

    assert torch.get_num_threads() == before
    assert switch.worked() is not loop_sets_them


def test_a_batch_fetched_ahead_is_counted() -> None:
    recorder = Recorder()
    switch = fetched_ahead(recorder)
    with switch.off():
        assert recorder.loaders.ahead
    recorder.loaders.fetched += 1
    assert not switch.worked()
    with switch.off():
        recorder.loaders.fetched += 1

    assert switch.worked() and not recorder.loaders.ahead


@pytest.mark.parametrize("sets_it_itself", [False, True])
def test_an_exchange_that_the_loop_switches_itself_goes_on(sets_it_itself: bool) -> None:
    model = SimpleNamespace(require_backward_grad_sync=True)
    switch = no_exchange([model])  # type: ignore[list-item]
    with switch.off():
        assert not model.require_backward_grad_sync
        if sets_it_itself:
            model.require_backward_grad_sync = True

    assert model.require_backward_grad_sync
    assert switch.worked() is not sets_it_itself


@pytest.mark.parametrize("set_back", [False, True])
def test_exchanges_are_left_out_beside_those_that_the_loop_leaves_out_itself(set_back: bool) -> None:
    """Of four passes before an update the loop exchanges gradients in the last two."""
    model: Any = nn.Identity()
    model.require_backward_grad_sync = True

    def exchanged() -> list[bool]:
        found = []
        for own in (False, False, True, True):
            before = model.require_backward_grad_sync
            if not own or set_back:
                model.require_backward_grad_sync = own
            model(torch.ones(1))
            found.append(bool(model.require_backward_grad_sync))
            if not own and not set_back:
                model.require_backward_grad_sync = before  # as no_sync does
        return found

    switch = last_exchange([model], 2)
    assert exchanged() == [False, False, True, True]
    with switch.off():
        assert [exchanged(), exchanged()] == [[False, False, False, True]] * 2
    assert exchanged() == [False, False, True, True]
    assert switch.worked()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_the_optimizer_takes_the_other_path_and_learns_the_same(kind: type[torch.optim.Optimizer]) -> None:
    def trained(switching: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = kind(model.parameters(), lr=0.01, foreach=False)  # type: ignore[call-arg]
        switch = one_update([optimizer])

        def steps(number: int) -> None:
            for _ in range(number):
                optimizer.zero_grad()
                model(torch.ones(2, 6)).square().sum().backward()
                optimizer.step()

        steps(3)
        if switching:
            with switch.off():
                steps(3)
            assert switch.worked()
        else:
            steps(3)
        steps(2)
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

"""What the controller's look is told: where a real loop spends its time, and that the loop is left as it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry
from accel.profiler import naming
from accel.profiler.loop import device as device_events
from accel.profiler.loop.clock import StepClock
from accel.profiler.phases import Measurement
from accel.run import Run
from accel.run.gate import Gate
from accel.session.measured_steps import Observation
from tests.accel import observation_ranks
from tests.comm.ranks import run_ranks
from tests.conftest import Once


def test_a_loader_that_sleeps_is_named_and_the_marks_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "_crowded", lambda evidence: None)  # whatever else runs on this machine

    class Slow(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.01)  # 40 ms a batch: the neighbours' share of a core can't hide that
            return super().__getitem__(index)

    backward, gradient = torch.autograd.backward, torch.autograd.grad
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = DataLoader(Slow(torch.randn(96, 4), torch.zeros(96, dtype=torch.long)), batch_size=4)
    _, loader, _ = accel.optimize(model, plain, optimizer, disable=accel_names(), budget=60)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    session = entry.MODELS[model].session
    assert (torch.autograd.backward, torch.autograd.grad) == (backward, gradient)
    report = accel.explain(model)
    accel.undo(model)

    assert session.failed == ""
    assert report.bottleneck == "input"
    assert "waits for storage" in report.bottleneck_advice
    assert report.anatomy_before["data"] > 40.0
    assert report.anatomy_before["loss"] > 0
    assert report.anatomy_before["backward"] > 0


@pytest.fixture
def of_ranks(once: Once) -> Callable[[str], list[Any]]:
    """Return what each rank found in a case."""

    def found(name: str) -> list[Any]:
        return [rank[name] for rank in once("observation", lambda: run_ranks(observation_ranks.every_case, 2))]

    return found


def test_what_ddp_waits_for_the_other_rank_is_communication(of_ranks: Callable[[str], list[Any]]) -> None:
    found, _ = of_ranks("waits")
    # Rank 1 comes 100 ms later to each exchange, and rank 0 computes for less than that on any machine.
    assert found["communication"] > 75
    assert found["backward"] < found["communication"]


def test_exchanges_of_gradients_are_counted_by_step(of_ranks: Callable[[str], list[Any]]) -> None:
    assert of_ranks("exchanges") == [(3.0, 1.0)] * 2


def test_what_a_loop_asks_of_ddp_beside_the_exchange_is_seen(of_ranks: Callable[[str], list[Any]]) -> None:
    for found in of_ranks("habits"):
        assert {name: left_out for name, (left_out, _, _) in found.items() if left_out} == {"inverted": True}
        assert found["small buckets"][1] == 10
        assert found["right"][1] == 1
        assert [name for name, (_, _, is_timed) in found.items() if is_timed] == ["searches"]


def test_ddps_habits_are_switched_off_for_an_experiment_and_put_back(of_ranks: Callable[[str], list[Any]]) -> None:
    for buckets, search, exchanges in of_ranks("without"):
        assert buckets == (10, 1, True, False)
        assert search == (10, 10, True, True)
        assert exchanges == (2, 1, True, False)


def accel_names() -> tuple[str, ...]:
    from accel import strategies

    return strategies.names()


class Gpu:
    """Is passed at once; each event takes a second."""

    def __init__(self) -> None:
        self.recorded = 0

    def event(self) -> Any:
        def record() -> None:
            self.recorded += 1
            made.at = self.recorded

        made = SimpleNamespace(at=0, record=record, query=lambda: True, synchronize=lambda: None)
        made.elapsed_time = lambda later: (later.at - made.at) * 1e3
        return made


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(Run, "cuda", property(lambda self: True))
    monkeypatch.setattr(device_events, "events_on", lambda device: made.event)

    def cuda(tensor: Tensor) -> Tensor:
        return tensor

    monkeypatch.setattr(Tensor, "cuda", cuda)
    return made


def observing(clock: StepClock, steps: list[Measurement], counts: Any = lambda: True) -> Observation:
    model = nn.Linear(4, 2)
    run = Run(model, DataLoader(TensorDataset(torch.randn(8, 4))), [], Gate(model, []), SimpleNamespace())  # type: ignore[arg-type]
    return Observation(clock, run, lambda: len(steps), counts)


def test_steps_have_the_device_s_times_but_for_the_first_which_begins_with_an_idle_one(gpu: Gpu) -> None:
    clock, steps = StepClock(), list[Measurement]()
    observation = observing(clock, steps)
    for _ in range(8):
        clock.restart()
        for phase in ("host", "forward", "backward", "outside", "data"):
            clock.enter(phase)
        steps.append(clock.close(len(steps)))
        gpu.recorded += 5  # what the search does between two steps is none of them
    evidence = observation.evidence(steps)
    observation.close()

    assert [step.step for step in evidence.steps] == [*range(1, 8)]
    assert evidence.steps is steps  # the plain step is told by these too
    for step in steps:
        assert (step.seconds, step.phases["forward"], step.phases["data"]) == (5.0, 1.0, 1.0)
    assert set(vars(clock)) & {"restart"} == set()


def test_what_is_not_the_loop_s_own_step_is_not_marked(gpu: Gpu) -> None:
    """As an evaluation within `accel.disabled`, or the steps of a rest."""
    clock, aside = StepClock(), list[str]()
    observation = observing(clock, [], lambda: not aside)
    clock.enter("host")
    try:
        for expected in (["copy", "host", "backward", "host"], []):
            before = len(clock.tape)
            x = torch.ones(2, requires_grad=True).cuda()
            x.sum().backward()
            assert clock.tape[before::2] == expected
            aside.append("from the second time on")
        aside.clear()
        before = len(clock.tape)
        with torch.no_grad():
            torch.ones(2).cuda()
        assert len(clock.tape) == before
    finally:
        observation.close()

"""A host that runs ahead of its device: trials compare what the device takes, and not how fast work is queued."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.profiler.phases import Measurement
from accel.run import Run
from accel.search.actions import Action, Result
from accel.session.session import Session
from accel.session.usual_steps import UsualSteps
from accel.strategies.base import Exactness, Strategy

QUEUE_S = 0.03
"""By which the host runs ahead at most."""


class Device:
    """Does its work after what it was given before, by a clock of its own: a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now_s = self.free_at = 0.0
        self.waits = 0

    def now(self) -> float:
        """Return the time; it goes on by a little."""
        self.now_s += 1e-6
        return self.now_s

    def host(self, seconds: float) -> None:
        """Let the host take so long."""
        self.now_s += seconds

    def work(self, seconds: float) -> None:
        """Queue work, and wait while the queue is full."""
        self.free_at = max(self.now_s, self.free_at) + seconds
        self.now_s = max(self.now_s, self.free_at - QUEUE_S)

    def synchronize(self, device: Any = None) -> None:
        """Wait until all is done."""
        self.waits += 1
        self.now_s = max(self.now_s, self.free_at)


class Change(Strategy):
    """Changes what a step takes."""

    name, summary, treats, exactness, settle_steps = "change", "", frozenset(), Exactness.REORDERED, 1
    device_s, host_s = 0.004, 0.001
    times: ClassVar[tuple[float, float]]

    def refusal(self, run: Run) -> str:
        return ""

    def enable(self, run: Run, setting: Any) -> None:
        type(self).times = self.device_s, self.host_s

    def disable(self, run: Run) -> None:
        type(self).times = Change.device_s, Change.host_s


class LessOnTheDevice(Change):
    device_s = 0.002


class LessOnTheHost(Change):
    host_s = 0.0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("samples", [256, 250, 40], ids=["whole batches", "a smaller last one", "short epochs"])
@pytest.mark.parametrize(("kind", "gain"), [(LessOnTheDevice, 2.0), (LessOnTheHost, 1.0)])
def test_a_gain_is_that_of_the_device(
    kind: type[Change], gain: float, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    kind.times = Change.device_s, Change.host_s

    class Network(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            device.work(kind.times[0])
            device.host(kind.times[1])
            return super().forward(x)

    monkeypatch.setattr(strategies, "REGISTRY", [kind])
    monkeypatch.setattr(Run, "cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setitem(Session.__init__.__kwdefaults__, "clock", device.now)
    data = TensorDataset(torch.randn(samples, 4), torch.randn(samples, 2))
    model: Any = Network(4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, loader, optimizer = accel.optimize(model, DataLoader(data, batch_size=16), optimizer, budget=60, cache=False)
    began, steps = time.monotonic(), 0
    while accel.explain(model).rows[0].gain is None and time.monotonic() - began < 30:
        for x, target in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), target).backward()
            optimizer.step()
            steps += 1
    row = accel.explain(model).rows[0]
    accel.undo(model)
    assert row.gain is not None, row
    assert row.gain == pytest.approx(gain, rel=0.05), row
    assert samples == 40 or device.waits < steps  # at the edges of blocks, and of epochs


def test_the_edges_of_an_action() -> None:
    action, result = Action(plan={}, steps=2, settle=1), Result()
    assert action.may_end_block(result)
    result.settling.append(0.1)
    assert not action.may_end_block(result)
    result.measurements.append(None)  # type: ignore[arg-type]
    assert action.may_end_block(result)
    assert not Action(plan={}, whole_epoch=True).may_end_block(Result())
    assert Action(plan={}, steps=1).may_end_block(Result())
    assert not Action(plan={}, steps=2, settle=2).may_end_block(Result())


def test_in_a_whole_epoch_every_step_counts_and_nothing_twice() -> None:
    usual = UsualSteps()
    for samples in (16, 16, 16, 10):
        usual.add(measured := Measurement(step=0, seconds=0.1, samples=samples))
        usual.is_odd(measured)
    session: Any = SimpleNamespace(_usual=usual)
    for action, is_left_out in (
        (None, True),
        (Action(plan={}, steps=4), True),
        (Action(plan={}, whole_epoch=True), False),
    ):
        session._action = action
        assert Session.is_unusual(session, 10) == is_left_out
        assert not Session.is_unusual(session, 16)


def test_what_the_device_took_longer_is_of_the_step_before() -> None:
    result = Result(measurements=[Measurement(step=3, seconds=0.1, phases={"data": 0.02, "forward": 0.08})])
    result.lengthen(4, 1.0)
    assert result.seconds == [0.1]
    result.lengthen(3, 0.5)
    assert result.seconds == [0.6]
    assert sum(result.measurements[0].phases.values()) == pytest.approx(0.6)

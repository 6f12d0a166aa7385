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
from accel.profiler.clocks import device_steps
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


class Event:
    """Is passed when the work before it is done."""

    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, 0.0

    def record(self) -> None:
        self.at_s = max(self.device.now_s, self.device.free_at)

    def query(self) -> bool:
        return self.at_s <= self.device.now_s

    def elapsed_time(self, later: Event) -> float:
        return (later.at_s - self.at_s) * 1e3


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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("data_s", "limit"), [(0.001, "compute"), (0.03, "input")])
def test_where_the_host_waits_for_the_device_is_not_where_the_time_goes(
    data_s: float, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()

    class Slow(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            device.host(data_s)  # the device does its work of the last step meanwhile
            return [super(Slow, self).__getitem__(index) for index in indices]

    class Network(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            device.host(0.001)
            device.work(0.01)
            return super().forward(x)

    def copied(tensor: Tensor, *args: Any) -> Tensor:
        device.synchronize()  # as a copy from pageable memory does
        device.host(0.0005)
        return tensor

    monkeypatch.setattr(Run, "cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(Tensor, "cuda", copied)
    monkeypatch.setattr(device_steps, "CudaEvent", lambda place: Event(device))
    monkeypatch.setitem(Session.__init__.__kwdefaults__, "clock", device.now)
    model: Any = Network(4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    plain = DataLoader(Slow(torch.randn(800, 4), torch.randn(800, 2)), batch_size=16)
    model, loader, optimizer = accel.optimize(
        model, plain, optimizer, disable=strategies.names(), budget=60, cache=False
    )
    for x, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.cuda()), target).backward()
        optimizer.step()
    report = accel.explain(model)
    accel.undo(model)
    assert Tensor.cuda is copied
    anatomy = report.anatomy_before
    assert anatomy["forward"] == pytest.approx(11.0 if limit == "input" else 10.5, rel=0.1), anatomy
    assert anatomy["copy"] == pytest.approx(0.5, rel=0.1), anatomy
    assert anatomy["data"] == pytest.approx(data_s * 1e3 - 10 if limit == "input" else 0.0, abs=1.0), anatomy
    assert anatomy["host"] < 0.5, anatomy
    assert report.bottleneck in (limit, "crowded cores")


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

"""A host that runs ahead of its device: trials compare what the device takes, and not how fast work is queued."""

from __future__ import annotations

import time
import warnings
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry, strategies
from accel.profiler import naming
from accel.profiler.loop import device as device_events
from accel.profiler.loop.device import DeviceClock
from accel.profiler.phases import Measurement
from accel.report import Report
from accel.run import Run
from accel.search.actions import Action, Result
from accel.session.session import Session
from accel.strategies.base import Exactness, Strategy
from tests.played_events import Event, counted
from tests.sampling import examples

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

    def work(self, seconds: float, queue_s: float = QUEUE_S) -> None:
        """Queue work, and wait while the queue is full."""
        self.free_at = max(self.now_s, self.free_at) + seconds
        self.now_s = max(self.now_s, self.free_at - queue_s)

    def synchronize(self, device: Any = None) -> None:
        """Wait until all is done."""
        self.waits += 1
        self.now_s = max(self.now_s, self.free_at)


def play(device: Device, patch: pytest.MonkeyPatch) -> None:
    """Let it be the GPU that all models are on, and the session's clock."""
    patch.setattr(Run, "cuda", property(lambda self: True))
    patch.setattr(torch.cuda, "synchronize", device.synchronize)
    patch.setattr(device_events, "events_on", lambda place: lambda: Event(device))
    patch.setitem(Session.__init__.__kwdefaults__, "clock", device.now)


class Change(Strategy):
    """Changes what a step takes."""

    name, summary, treats, exactness = "change", "", frozenset(), Exactness.REORDERED
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
    play(device, monkeypatch)
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

    def cuda(tensor: Tensor, *args: Any) -> Tensor:
        device.synchronize()  # as a copy from pageable memory does
        device.host(0.0005)
        return tensor

    monkeypatch.setattr(naming, "_crowded", lambda evidence: None)  # whatever else runs on this machine
    monkeypatch.setattr(Run, "cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(Tensor, "cuda", cuda)
    monkeypatch.setattr(device_events, "events_on", lambda place: lambda: Event(device))
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
    assert Tensor.cuda is cuda
    anatomy = report.anatomy_before
    assert anatomy["forward"] == pytest.approx(11.0 if limit == "input" else 10.5, rel=0.1), anatomy
    assert anatomy["copy"] == pytest.approx(0.5, rel=0.1), anatomy
    assert anatomy["data"] == pytest.approx(data_s * 1e3 - 10 if limit == "input" else 0.0, abs=1.0), anatomy
    assert anatomy["host"] < 0.5, anatomy
    assert report.bottleneck == limit


class Times(NamedTuple):
    """What a step takes, s."""

    fetch: float
    copy: float
    launch: float
    device: float
    copy_waits: bool = False
    """It is from pageable memory: the host waits for the device's last step."""

    @property
    def queue_s(self) -> float:
        """By which the host runs ahead at most: the launch queue holds about 1.7 steps of a ResNet-50."""
        return 1.7 * self.device

    def fetch_on(self, device: Device) -> None:
        device.host(self.fetch)

    def run_on(self, device: Device) -> None:
        if self.copy_waits:
            device.host(max(0.0, device.free_at - device.now_s))
        device.host(self.copy + self.launch)
        device.work(self.device, self.queue_s)

    def steady_s(self) -> float:
        """Return what a step takes once the queue is filled."""
        device, ends = Device(), []
        for _ in range(60):
            self.fetch_on(device)
            self.run_on(device)
            ends.append(device.free_at)
        return (ends[-1] - ends[19]) / 40


HIDDEN = Times(fetch=0.03, copy=0.001, launch=0.01, device=0.1)
"""The device never waits for a batch."""
UNDER_WAY = Times(fetch=0.0, copy=0.0, launch=0.01, device=0.1)
"""Pinned memory, and nothing that the host waits for: it runs ahead as far as the queue lets it."""


class Ran(NamedTuple):
    """A run until its search has ended."""

    report: Report
    steps: int
    steps_with: int
    """Those with the candidate."""
    took_s: float


def ran(plain: Times, changed: Times, batches: int = 40, rest: int = 0) -> Ran:
    """Run with one candidate, which makes steps of `plain` those of `changed`; an epoch's last batch may be smaller."""
    device, now = Device(), [plain]

    class Candidate(Change):
        touches = frozenset()  # the guard compares nothing

        def enable(self, run: Run, setting: Any) -> None:
            now[0] = changed

        def disable(self, run: Run) -> None:
            now[0] = plain

    class Fetched(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            now[0].fetch_on(device)
            return [super(Fetched, self).__getitem__(index) for index in indices]

    class Network(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            now[0].run_on(device)
            return super().forward(x)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        play(device, patch)
        patch.setattr(strategies, "REGISTRY", [Candidate])
        data = Fetched(torch.randn(4 * batches + rest, 4), torch.randn(4 * batches + rest, 2))
        model: Any = Network(4, 2)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        model, loader, optimizer = accel.optimize(
            model, DataLoader(data, batch_size=4), optimizer, budget=1e6, cache=False
        )
        steps, steps_with = 0, 0
        while accel.explain(model).state == "searching" and steps < 4000:
            for x, target in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), target).backward()
                optimizer.step()
                steps += 1
                steps_with += now[0] is changed
        report = accel.explain(model)
        accel.undo(model)
    return Ran(report, steps, steps_with, device.free_at)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Times, Times]:
    """Draw a loop's step, and one with a candidate."""
    plain = Times(
        fetch=draw(st.floats(0.0, 0.06)),
        copy=draw(st.floats(0.0, 0.005)),
        launch=draw(st.floats(0.0005, 0.03)),
        device=draw(st.floats(0.001, 0.25)),  # blocks of five steps, or of two
        copy_waits=draw(st.booleans()),
    )
    launch, device = draw(st.sampled_from([0.5, 1.0, 1.5])), draw(st.floats(0.3, 5.0))
    return plain, plain._replace(launch=launch * plain.launch, device=device * plain.device)


@given(change=changes(), batches=st.integers(2, 40), rest=st.sampled_from([0, 3]))
@settings(max_examples=examples(32), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(change=(HIDDEN, HIDDEN._replace(device=0.05)), batches=40, rest=0)
@example(change=(HIDDEN, HIDDEN._replace(device=0.5)), batches=40, rest=0)
@example(change=(UNDER_WAY, UNDER_WAY._replace(device=0.08)), batches=4, rest=3)
def test_a_gain_is_that_of_steady_steps_and_what_is_much_slower_goes_after_a_block(
    change: tuple[Times, Times], batches: int, rest: int
) -> None:
    """A block began with an idle device, and so with a fetch that no other step waited for: gains seemed smaller."""
    plain, changed = change
    gain = plain.steady_s() / changed.steady_s()
    run = ran(plain, changed, batches, rest)
    row = run.report.rows[0]
    assert row.gain == pytest.approx(gain, rel=0.03)
    if gain < 0.75:
        assert (row.status, row.why) == ("undone", "slower")
        not_counted = (batches + 1) / (batches - 1)  # an epoch's first, and a smaller last one
        assert run.steps_with <= 2 * ((1 + 5) * not_counted + 2)


def test_the_report_has_the_device_s_times() -> None:
    """Of a host that runs ahead they were those of queueing a step's work."""
    run = ran(UNDER_WAY, UNDER_WAY._replace(device=0.08))
    row = run.report.rows[0]
    assert row.before_ms == pytest.approx(100.0, rel=0.03)
    assert row.after_ms == pytest.approx(80.0, rel=0.03)
    assert run.report.plain_ms == pytest.approx(100.0, rel=0.03)


@pytest.mark.parametrize("factor", [1.0, 0.8])
def test_what_draining_takes_from_the_run_is_a_cost_of_the_trial(factor: float) -> None:
    """Each block exposes one fetch, in both arms: a brief trial took a second that nobody counted."""
    changed = HIDDEN._replace(device=factor * HIDDEN.device)
    run = ran(HIDDEN, changed)
    ideal_s = (run.steps - run.steps_with) * HIDDEN.steady_s() + run.steps_with * changed.steady_s()
    lost_s = run.took_s - ideal_s  # the observed steps, and the last ones, end with an idle device too
    assert 0.7 * lost_s < run.report.search_s < 1.1 * lost_s


def test_a_host_that_runs_ahead_makes_no_settling_step_dear() -> None:
    """Their times were the device's, and those of others the host's: each switch seemed to cost a third of a step."""
    run = ran(UNDER_WAY, UNDER_WAY._replace(device=0.08))
    assert run.report.rows[0].cost_s == pytest.approx(8 * UNDER_WAY.launch, rel=0.3)


def test_a_clock_that_was_closed_makes_no_more_events() -> None:
    """Of a session that had ended, each `accel.disabled()` of the loop left two in memory."""
    device = Device()
    made, make = counted(device)
    clock = DeviceClock(make)
    clock.begin()
    clock.mark()
    clock.close()
    for _ in range(3):
        clock.mark()
        clock.begin()
        clock.begin_again()
        clock.end(1)
    assert len(made) == 2
    assert clock.seconds() == {} and not clock.is_passed()


def test_in_a_whole_epoch_every_step_counts_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    device, results = Device(), list[Result]()
    play(device, monkeypatch)

    class Network(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            HIDDEN.run_on(device)
            return super().forward(x)

    def decisions() -> Any:
        yield Action(plan={}, steps=4)
        for _ in range(3):
            results.append((yield Action(plan={}, whole_epoch=True)))
        while True:
            yield Action(plan={}, rest=50, steps=1, after_search=True)

    model: Any = Network(4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(46, 4), torch.randn(46, 2))  # the last batch has two samples
    model, loader, optimizer = accel.optimize(
        model, DataLoader(data, batch_size=4), optimizer, disable=strategies.names(), budget=60, cache=False
    )
    entry.MODELS[model].session.runner.make_decisions = decisions
    for _ in range(6):
        for x, target in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), target).backward()
            optimizer.step()
    accel.undo(model)
    for result in results:
        assert len(result.seconds) == 12
        assert sum(result.seconds) == pytest.approx(12 * HIDDEN.device + HIDDEN.launch, rel=0.01)


def test_an_action_fills_the_queue_first_unless_its_steps_are_all_to_be_counted() -> None:
    assert Action(plan={}, steps=5).on_idle_device().settle == 1
    assert Action(plan={}, steps=5, settle=3).on_idle_device().settle == 3
    for kept in (Action(plan={}, rest=9), Action(plan={}, whole_epoch=True), Action(plan={}, check={}, steps=2)):
        assert kept.on_idle_device() == kept


def test_without_events_the_host_s_times_are_left_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_event() -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    clock, calls = DeviceClock(no_event), []
    monkeypatch.setattr("accel.profiler.loop.device.log.debug", lambda *args, **kwargs: calls.append(args))
    for number in range(3):
        clock.begin()
        clock.mark()
        clock.end(number)
    assert clock.seconds() == {} and not clock.is_passed()
    assert len(calls) == 1


def test_what_is_aside_within_a_step_is_not_counted_and_events_are_used_again() -> None:
    device = Device()
    made, make = counted(device)
    clock = DeviceClock(make)
    for first in (0, 2):
        for number in (first, first + 1):
            clock.begin()
            device.host(0.5)
            clock.begin_again()  # an epoch begins
            device.host(0.1)
            clock.mark()
            device.host(10.0)
            clock.mark()
            device.work(0.2)
            clock.end(number)
        assert not clock.is_passed()
        device.synchronize()
        assert clock.seconds() == pytest.approx({first: 0.3, first + 1: 0.3})
    assert len(made) <= 10


def test_work_on_another_stream_than_the_events_is_of_the_last_step() -> None:
    device = Device()
    clock = DeviceClock(lambda: Event(device))
    for number in range(2):
        clock.begin()
        device.host(0.1)
        clock.end(number)
    assert clock.is_passed()
    clock.went_on(0.4)
    assert clock.seconds() == pytest.approx({0: 0.1, 1: 0.5})


def test_what_the_device_took_longer_is_of_the_step_before() -> None:
    result = Result(measurements=[Measurement(step=3, seconds=0.1, phases={"data": 0.02, "forward": 0.08})])
    result.lengthen(4, 1.0)
    assert result.seconds == [0.1]
    result.lengthen(3, 0.5)
    assert result.seconds == [0.6]
    assert sum(result.measurements[0].phases.values()) == pytest.approx(0.6)

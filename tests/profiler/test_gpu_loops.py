"""Loops on a played GPU, from their marks to the cause: what is named is what holds the device up, by what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel.profiler.diagnose.step_times import by_device, means
from accel.profiler.evidence import Evidence, LoaderFacts, SyncPoint, ThreadShare, TraceSummary
from accel.profiler.experiments.counterfactuals import Counterfactual, fetched_ahead
from accel.profiler.experiments.whatif import experiment
from accel.profiler.loop.clock import StepClock
from accel.profiler.loop.device import Backlog
from accel.profiler.loop.recorder import Recorder
from accel.profiler.naming import Diagnosis, diagnose
from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment
from tests.played_events import Event
from tests.profiler.test_whatif import from_fifth_step

MS = 1e-3
WARM_UP = 60
"""Steps in which the queue fills."""


class Gpu:
    """Does its work after what it was given before; host and device have one clock, which only the loop moves."""

    def __init__(self, room_ms: float) -> None:
        self.room_ms = room_ms
        self.now_s = self.free_at = 0.0

    def now(self) -> float:
        self.now_s += 1e-7
        return self.now_s

    def host(self, ms: float) -> None:
        """The host takes so long."""
        self.now_s += ms * MS

    def launch(self, host_ms: float, work_ms: float, pieces: int = 10) -> None:
        """Launch kernels one by one, until the queue is full."""
        for _ in range(pieces):
            self.host(host_ms / pieces)
            self.free_at = max(self.now_s, self.free_at) + work_ms / pieces * MS
            self.now_s = max(self.now_s, self.free_at - self.room_ms * MS)

    def drain(self) -> float:
        """Wait until all is done, and return for how long."""
        waited = max(0.0, self.free_at - self.now_s)
        self.now_s += waited
        return waited

    def event(self) -> Event:
        return Event(self)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, launch: Callable[[], None]) -> Tensor:
        ctx.launch = launch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.launch()
        return gradients[0], None


class Loop:
    """A training loop.

    Args:
        work: device work of a batch, ms: forward 30 %, backward 60 %, update 10 %.
        launch: the host's time to launch it.
        fetch: of the loader, in the process.
        copy: of a batch, which waits for the device; None does not block, and takes nothing.
        read: where a value is read back: `layer` (of the forward pass), `batch` (after each backward pass), `update`
            (before each) or `step` (after it).
        every: of so many steps one is read after.
        room: of the device's queue, ms of work.
        micro_batches: batches of a step.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        work: float,
        launch: float,
        fetch: float = 0.0,
        copy: float | None = None,
        read: str = "",
        every: int = 1,
        room: float = 45,
        micro_batches: int = 1,
    ) -> None:
        gpu = self.gpu = Gpu(room)
        self.every = every
        self.work, self.launch, self.read, self.micro_batches = work, launch, read, micro_batches
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

        def cuda(tensor: Tensor, non_blocking: bool = False) -> Tensor:
            if not non_blocking:
                gpu.drain()
                gpu.host(copy or 0.0)
                gpu.free_at = gpu.now_s
            return tensor

        monkeypatch.setattr(Tensor, "cuda", cuda)
        self.blocks = copy is not None

        class Data(TensorDataset):
            def __getitems__(self, indices: list[int]) -> list[Any]:
                gpu.host(fetch)
                return [self[index] for index in indices]

        loop = self

        class Network(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                for _ in range(10):
                    loop.part(0.03, pieces=1)
                    loop.reading("layer")
                return Backward.apply(super().forward(x), lambda: loop.part(0.6))  # type: ignore[no-any-return]

        class Update(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                loop.part(0.1)
                super().step(closure)

        self.loader: DataLoader[Any] = DataLoader(Data(torch.randn(4000, 4)), batch_size=4)
        self.model = Network(4, 2)
        self.optimizer = Update(self.model.parameters(), lr=0.01)
        self.recorder = Recorder(StepClock(gpu.now))
        self.recorder.loaders.drain = gpu.drain
        self.steps: list[Measurement] = []
        self.recorder.delivery.on_step = self.steps.append

    def part(self, share: float, pieces: int = 10) -> None:
        self.gpu.launch(share * self.launch, share * self.work, pieces)

    def reading(self, place: str) -> None:
        if self.read == place:
            self.gpu.drain()

    def run(self) -> Iterator[int]:
        """Train; yields after each batch."""
        for number, (x,) in enumerate(self.loader):
            self.model(x.cuda(non_blocking=not self.blocks)).square().sum().backward()
            self.reading("batch")
            if number % self.micro_batches == self.micro_batches - 1:
                self.reading("update")
                self.optimizer.step()
                self.optimizer.zero_grad()
                if number % self.every == 0:
                    self.reading("step")
            yield number

    def diagnosed(self, timed: int, **trace: Any) -> Diagnosis:
        """Let 120 steps pass, so many of them with events, and return what follows."""
        events = self.recorder.events
        assert events is not None

        def step(measured: Measurement) -> None:  # between two steps, off the clock
            self.steps.append(measured)
            if len(self.steps) == WARM_UP:
                events.start(self.gpu.event)
            if len(self.steps) == WARM_UP + 1 + timed:
                events.stop()

        self.recorder.delivery.on_step = step
        self.recorder.start()
        try:
            for _ in self.run():
                if len(self.steps) == WARM_UP + 120:
                    break
        finally:
            self.recorder.stop()
        assert len(events.taken) == timed
        steps = by_device(self.steps[WARM_UP:], self.recorder.events.taken)
        told = {"ops_per_step": 1000, "small_share": 0.0, "matmul_share": 0.9, "elementwise_share": 0.05, **trace}
        return diagnose(
            Evidence(
                steps=list(steps),
                cores=8,
                device="cuda",
                data_thread=ThreadShare(run=1.0, wait=0.0, blocked=0.0),
                loader=LoaderFacts(kind="DataLoader"),
                host_ms=means(self.steps),
                trace=TraceSummary(steps=2, ops=[], busy_ms=self.work * (0.9 * self.micro_batches + 0.1), **told),
            )
        )


ITEM = SyncPoint(name="item", file="train.py", line=9, calls=1, ms=100)
TO = SyncPoint(name="to", file="train.py", line=5, calls=1, ms=100, copies=True)
LOOPS: dict[str, tuple[dict[str, Any], dict[str, Any], float, dict[str, float]]] = {
    # the loop, what its trace tells, the step in ms, and what takes which share of it
    "pageable copies, hidden loader": (
        {"work": 120, "launch": 20, "fetch": 40, "copy": 25},
        {"copy_ms": 25, "launch_ms": 2, "syncs": [TO]},
        145 + 0.6,
        {"transfer.pageable": 0.17},
    ),
    "the same, and the loss is read": (
        {"work": 120, "launch": 20, "fetch": 40, "copy": 25, "read": "step"},
        {"copy_ms": 25, "read_ms": 41, "launch_ms": 2, "syncs": [ITEM, TO]},
        185 + 0.6,
        {"input.cpu": 0.215, "transfer.pageable": 0.135},
    ),
    "a gradient scaler reads before the update": (
        {"work": 60, "launch": 25, "read": "update"},
        {"read_ms": 1, "launch_ms": 1, "syncs": [ITEM]},
        60.25,
        {},
    ),
    "small copies that wait": (
        {"work": 60, "launch": 25, "copy": 0.01},
        {"copy_ms": 0.01, "launch_ms": 2, "syncs": [TO]},
        60.8,
        {},
    ),
    "kernels that are shorter than their launch": (
        {"work": 6, "launch": 20},
        {"launch_ms": 16},
        20.1,
        {"launch.small_ops": 0.7},
    ),
    "a loader that the device hides": ({"work": 12, "launch": 3, "fetch": 8}, {}, 12, {}),
    "a loader that it does not hide": (
        {"work": 12, "launch": 3, "fetch": 30},
        {"launch_ms": 20},
        33,
        {"input.cpu": 0.63},
    ),
    "accumulation, and each loss is read": (
        {"work": 30, "launch": 5, "read": "batch", "micro_batches": 4},
        {"read_ms": 1, "syncs": [ITEM]},
        4 * 27 + 3.5,
        {},
    ),
    "a value of each layer is read": (
        {"work": 6, "launch": 5, "read": "layer"},
        {"read_ms": 1.5, "launch_ms": 1, "syncs": [ITEM]},
        7.7,
        {"sync.read": 0.2},
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("timed", [119, 40], ids=["all timed", "a third timed"])
@pytest.mark.parametrize("name", LOOPS)
def test_what_holds_the_device_up_is_named(name: str, timed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options, trace, step_ms, named = LOOPS[name]
    found = Loop(monkeypatch, **options).diagnosed(timed, **trace)

    assert found.anatomy.step_s * 1e3 == pytest.approx(step_ms, rel=0.03)
    assert [finding.cause for finding in found.findings] == [*named]
    assert [finding.share for finding in found.findings] == pytest.approx([*named.values()], abs=0.03)
    assert found.refused == ""


def tried(loop: Loop, switch: Counterfactual) -> Experiment:
    backlog = Backlog(loop.gpu.now, loop.gpu.drain, loop.gpu.event)
    ended = from_fifth_step(loop.recorder, experiment(switch, loop.recorder, backlog))
    loop.recorder.start()
    try:
        for _ in loop.run():
            if ended:
                return ended[0]
    finally:
        loop.recorder.stop()
    raise AssertionError("it never ended")


@pytest.mark.parametrize(("fetch", "saved"), [(8, 0.0), (30, 0.62)])
def test_a_batch_fetched_ahead_saves_what_the_device_does_not_hide(
    fetch: float, saved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(monkeypatch, work=12, launch=3, fetch=fetch)
    found = tried(loop, fetched_ahead(loop.recorder))
    assert found.saving.value == pytest.approx(saved, abs=0.06)
    assert found.verdict == ("keep" if saved else "drop")


def test_a_queue_that_fills_up_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the reads the host runs ahead: four steps are launched in the time of one."""
    loop = Loop(monkeypatch, work=12, launch=3, read="step")

    @contextmanager
    def unread() -> Iterator[None]:
        loop.read = ""
        yield
        loop.read = "step"

    found = tried(loop, Counterfactual("nothing read", "", unread, lambda: True))
    assert found.saving.value == pytest.approx(0.0, abs=0.05)


@pytest.mark.sample(2)
@pytest.mark.parametrize("room", [45, 1000])
@pytest.mark.parametrize("every", range(2, 8))
def test_steps_that_are_launched_sooner_than_done_are_compared_by_their_sum(
    every: int, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each third loss is read, a step of 8 ms had less than nothing, and the watching ended with an error."""
    loop = Loop(monkeypatch, work=60, launch=8, read="step", every=every, room=room)
    found = tried(loop, fetched_ahead(loop.recorder))
    assert found.saving.value == pytest.approx(0.0, abs=0.05)
    assert found.before_ms == pytest.approx(60, rel=0.05)

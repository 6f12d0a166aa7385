"""Events are recorded beside the clock's marks, read once passed, never waited for within the loop, and used again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.profiler.loop import device as device_events
from accel.profiler.loop.clock import CUT, MAYBE_DATA, MAYBE_HOST, RESUME, SETTLED, SKIP, WAS, StepClock
from accel.profiler.loop.device import MOST_PENDING, CudaEvent, DeviceEvents, events_on

PHASES = ("data", "host", "forward", "loss", "backward", "optimizer", "outside")
SECOND = 1e3
"""In the events' ms."""


class Device:
    """Passes each event a second after the one before it; `reached` is how far it has come."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.recorded = 0
        self.reached = 10**9

    def event(self) -> Event:
        made = Event(self)
        self.events.append(made)
        return made


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0

    def record(self) -> None:
        self.device.recorded += 1
        self.at = self.device.recorded

    def query(self) -> bool:
        return self.at <= self.device.reached

    def synchronize(self) -> None:
        self.device.reached = max(self.device.reached, self.at)

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query()
        return (later.at - self.at) * SECOND


@pytest.fixture
def device() -> Device:
    return Device()


class Loop:
    """Writes the marks of steps."""

    def __init__(self, device: Device) -> None:
        self.tape: list[Any] = []
        self.number = 0
        self.events = DeviceEvents(self.tape.extend, lambda: self.number)
        self.events.start(device.event)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step(*((phase, 0.0) for phase in PHASES))

    def step(self, *pairs: tuple[str, Any]) -> None:
        for pair in (*pairs, CUT):
            self.events.write(pair)
        self.number += 1


def test_phases_are_told_by_step_and_the_first_one_is_left_out(device: Device) -> None:
    loop = Loop(device)
    loop.steps(20)

    assert len(loop.tape) == 2 * 8 * 20
    assert [*loop.events.taken] == [*range(1, 20)]
    for took in loop.events.taken.values():
        assert took == pytest.approx(dict.fromkeys(PHASES, 1.0))


@pytest.mark.parametrize("behind", [1, 20, MOST_PENDING - 1])
def test_a_device_that_lags_by_many_steps_is_read_in_the_end(device: Device, behind: int) -> None:
    loop = Loop(device)
    device.reached = 0
    loop.steps(behind + 1)
    assert loop.events.taken == {}
    assert device.reached == 0  # and is not waited for
    loop.events.stop()

    assert [*loop.events.taken] == [*range(1, behind + 1)]


def test_a_device_that_never_gets_there_does_not_fill_the_memory(device: Device) -> None:
    loop = Loop(device)
    device.reached = 0
    loop.steps(3 * MOST_PENDING)

    assert len(device.events) <= 9 * (MOST_PENDING + 3)


def test_events_are_used_again(device: Device) -> None:
    loop = Loop(device)
    loop.steps(200)

    assert len(device.events) <= 8 * 3
    assert len(loop.events.taken) == 199


def test_switched_off_it_only_passes_on(device: Device) -> None:
    loop = Loop(device)
    loop.events.stop()
    loop.steps(3)

    assert device.events == []
    assert len(loop.tape) == 48


def test_what_the_profiler_does_is_in_no_phase(device: Device) -> None:
    loop = Loop(device)
    loop.steps(1)
    began = device.recorded
    device.recorded += 5  # the device waits while the profiler reads what it needs between two steps
    loop.events.write((RESUME, 0.0))
    loop.step(("host", 0.0), ("forward", 0.0), (SKIP, 0.0), ("loss", 0.0))
    assert began

    # The interval that ends with the skip is left out; forward goes on after it.
    assert loop.events.taken[1] == pytest.approx({"outside": 1.0, "host": 1.0, "forward": 1.0})


def test_a_failing_event_passes_the_loop_by(device: Device) -> None:
    """As each call does after a failed assertion on the device."""
    loop = Loop(device)
    loop.steps(3)

    def failing() -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    loop.events._make, loop.events._free = failing, []
    loop.steps(3)
    loop.events.stop()

    assert len(loop.tape) == 2 * 8 * 6
    assert [*loop.events.taken] == [1, 2]


def test_events_go_to_the_stream_that_was_the_loop_s_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop may copy its batches on another stream, or train a model on another device than the current one."""
    recorded: list[Any] = []
    current = {torch.device("cuda:0"): "main of 0", torch.device("cuda:1"): "main of 1"}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[device])
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=recorded.append))
    make = events_on(torch.device("cuda:1"))
    current[torch.device("cuda:1")] = "copies"
    make().record()

    assert recorded == ["main of 1"]


def test_a_clock_s_marks_go_through_it(device: Device) -> None:
    clock = StepClock()
    events = DeviceEvents(clock.write, lambda: 0)
    clock.write = events.write  # type: ignore[assignment]
    events.start(device.event)
    for _ in range(10):
        clock.enter("data")
        clock.enter("forward")
        clock.updated()
        clock.write(CUT)

    assert len(clock.read()) == 10
    assert events.taken


@pytest.mark.gpu
def test_a_long_kernel_is_seen_in_its_phase() -> None:
    clock = StepClock()
    events = DeviceEvents(clock.write, lambda: 0)
    clock.write = events.write  # type: ignore[assignment]
    x = torch.randn(4096, 4096, device="cuda")
    events.start(device_events.events_on(x.device))
    for _ in range(20):
        clock.enter("forward")
        for _ in range(4):
            x @ x
        clock.enter("backward")
        clock.write(CUT)
    events.stop()

    took = events.taken[0]
    assert took["forward"] > 10 * took.get("backward", 0.0)
    assert isinstance(events._free[0], CudaEvent)


def test_a_phase_that_was_another_is_told_as_that(device: Device) -> None:
    loop = Loop(device)
    clock = StepClock()
    clock.write = loop.events.write  # type: ignore[assignment]
    for _ in range(10):
        clock.enter("data")
        clock.enter("host")
        clock.write((WAS, "forward"))
        clock.enter("backward")
        clock.write(CUT)
        loop.number += 1

    assert {name for took in loop.events.taken.values() for name in took} == {"data", "forward", "backward"}
    assert len(loop.tape) == 2 * 5 * 10


@pytest.mark.parametrize("within", [True, False])
def test_provisional_phases_are_told_as_they_were_settled(device: Device, within: bool) -> None:
    loop = Loop(device)
    for _ in range(20):
        loop.step((MAYBE_DATA, 0.0), (MAYBE_HOST, 0.0), (SETTLED, within), ("backward", 0.0))

    phases = {"data", "host"} if within else {"evaluation"}
    assert {name for took in loop.events.taken.values() for name in took} == phases | {"backward"}

"""Events are recorded beside the clock's marks, read late, never waited for, and used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.profiler.clocks.device_events import READ_AFTER_STEPS, DeviceEvents
from accel.profiler.phases import CUT, MAYBE_DATA, MAYBE_HOST, SETTLED, StepClock


class Device:
    """Passes each event a fixed time after the one before it; `reached` is how far it has come."""

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

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query()
        return float(later.at - self.at)


@pytest.fixture
def device() -> Device:
    return Device()


def steps(events: DeviceEvents, count: int) -> None:
    for _ in range(count):
        for phase in ("data", "host", "forward", "loss", "backward", "optimizer", "outside"):
            events.write((phase, 0.0))
        events.write(CUT)


def test_phases_are_told_per_step(device: Device) -> None:
    tape: list[Any] = []
    events = DeviceEvents(tape.extend, device.event)
    events.on = True
    steps(events, 20)

    assert len(tape) == 2 * 8 * 20
    assert events.steps == 20 - READ_AFTER_STEPS
    assert events.ms()["forward"] == pytest.approx(1.0)
    assert set(events.ms()) <= {"data", "host", "forward", "loss", "backward", "optimizer", "outside"}


def test_a_device_that_lags_is_not_waited_for(device: Device) -> None:
    events = DeviceEvents(lambda pair: None, device.event)
    events.on = True
    device.reached = 0
    steps(events, 20)

    assert events.steps == 0
    assert events.ms() == {}


def test_events_are_used_again(device: Device) -> None:
    events = DeviceEvents(lambda pair: None, device.event)
    events.on = True
    steps(events, 200)

    assert len(device.events) <= 8 * (READ_AFTER_STEPS + 3)
    assert events.steps > 150


def test_switched_off_it_only_passes_on(device: Device) -> None:
    tape: list[Any] = []
    events = DeviceEvents(tape.extend, device.event)
    steps(events, 3)

    assert device.events == []
    assert len(tape) == 48


def test_a_clock_s_marks_go_through_it(device: Device) -> None:
    clock = StepClock()
    events = DeviceEvents(clock.write, device.event)
    clock.write = events.write  # type: ignore[method-assign]
    events.on = True
    for _ in range(READ_AFTER_STEPS + 2):
        clock.request()
        clock.call()
        clock.updated()
        clock.cut()

    assert len(clock.read()) == READ_AFTER_STEPS + 2
    assert events.steps > 0


@pytest.mark.gpu
def test_a_long_kernel_is_seen_in_its_phase() -> None:
    clock = StepClock()
    events = DeviceEvents(clock.write)
    clock.write = events.write  # type: ignore[method-assign]
    events.on = True
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(READ_AFTER_STEPS + 20):
        clock.enter("forward")
        for _ in range(4):
            x @ x
        clock.enter("backward")
        clock.cut()
        torch.cuda.synchronize()

    found = events.ms()
    assert found["forward"] > 10 * found.get("backward", 0.0)


def test_a_phase_that_was_another_is_told_as_that(device: Device) -> None:
    tape: list[Any] = []
    clock = StepClock()
    events = DeviceEvents(tape.extend, device.event)
    clock.write = events.write
    events.on = True
    for _ in range(READ_AFTER_STEPS + 1):
        clock.enter("data")
        clock.enter("host")
        clock.rename("forward")
        clock.enter("backward")
        clock.cut()

    assert {name for name, ms in events.ms().items() if ms} == {"data", "forward"}
    assert len(tape) == 2 * 5 * (READ_AFTER_STEPS + 1)


@pytest.mark.parametrize("within", [True, False])
def test_provisional_phases_are_told_as_they_were_settled(device: Device, within: bool) -> None:
    events = DeviceEvents(lambda pair: None, device.event)
    events.on = True
    for _ in range(20):
        for phase in (MAYBE_DATA, MAYBE_HOST):
            events.write((phase, 0.0))
        events.write((SETTLED, within))
        events.write(("backward", 0.0))
        events.write(CUT)

    phases = {"data", "host"} if within else {"evaluation"}
    assert set(events.ms()) == phases | {"backward"}

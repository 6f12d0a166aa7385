"""Values of a GPU are read once they have arrived: the events and the page-locked memory are stand-ins here."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.guard import late_values
from accel.guard.late_values import LateValues, PinnedPlace, PlainPlace
from accel.guard.watch import Watch
from accel.run.gate import Call, Gate


class Device:
    """Copies what was queued on it only when it is told to, as a GPU that is behind the host."""

    def __init__(self) -> None:
        self.queued: list[Copy] = []
        self.places: list[Copy] = []
        self.waited = 0
        """How often the host has waited for a copy."""

    def place(self, value: Tensor) -> Copy:
        self.places.append(Copy(self))
        return self.places[-1]

    def runs(self, copies: int) -> None:
        for copy in self.queued[:copies]:
            copy.arrives()
        del self.queued[:copies]


class Copy:
    """Stands in for a place in page-locked memory; it refuses to be read, or used again, before the copy is there."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sent = self._number = math.nan
        self._is_under_way = False

    def put(self, value: Tensor) -> None:
        assert not self._is_under_way
        self._sent, self._number, self._is_under_way = float(value), math.nan, True
        self._device.queued.append(self)

    def arrives(self) -> None:
        self._number, self._is_under_way = self._sent, False

    def is_ready(self) -> bool:
        return not self._is_under_way

    def read(self) -> float:
        if self._is_under_way:
            self._device.waited += 1
            self._device.runs(self._device.queued.index(self) + 1)
        return self._number


def values(count: int, start: int = 0) -> list[Tensor]:
    return [torch.tensor(float(number)) for number in range(start, start + count)]


@pytest.mark.parametrize("behind", [0, 1, 8, 9, 30])  # calls that the device is behind: less than, as, more than late
def test_values_come_in_order_and_none_before_its_event(behind: int) -> None:
    device, read = Device(), list[float]()
    late = LateValues(8, place=device.place)
    for number, value in enumerate(values(100)):
        late.note(value)
        device.runs(max(0, len(device.queued) - behind))
        read += late.due()
        assert read == [float(each) for each in range(number + 1 - max(behind, 8))]
    assert device.waited == 0


def test_none_is_lost_of_a_device_that_stands_still_for_long() -> None:
    device, read = Device(), list[float]()
    late = LateValues(8, place=device.place)
    for value in values(50):
        late.note(value)
        read += late.due()
    assert read == []
    device.runs(50)
    for value in values(8, 50):
        late.note(value)
        read += late.due()
    assert read == [float(number) for number in range(50)]  # the host waits for none of the last eight


def test_the_oldest_is_waited_for_where_very_many_are_under_way() -> None:
    device, read = Device(), list[float]()
    late = LateValues(8, most=64, place=device.place)
    for value in values(1000):
        late.note(value)
        read += late.due()
        assert len(device.queued) <= 64
    assert read == [float(number) for number in range(1000 - 64)]
    assert len(device.places) == 65
    assert device.waited == 1000 - 64


def test_places_are_used_again_by_values_of_their_kind() -> None:
    kinds: list[torch.dtype] = []

    def place(value: Tensor) -> PlainPlace:
        kinds.append(value.dtype)
        return PlainPlace()

    late, read = LateValues(2, place=place), list[float]()
    for number in range(20):
        late.note(torch.tensor(float(number), dtype=(torch.float32, torch.float64)[number % 2]))
        read += late.due()
    assert read == [float(number) for number in range(18)]
    assert sorted(map(str, kinds)) == ["torch.float32"] * 2 + ["torch.float64"] * 2


def test_a_value_that_cannot_be_read_holds_up_no_other() -> None:
    late = LateValues(0)
    late.note(torch.ones(2))  # no number
    late.note(torch.ones(()))
    with pytest.raises(ValueError, match="one element"):
        late.due()
    assert late.due() == [1.0]


def test_values_of_the_host_are_held_as_they_are() -> None:
    late = LateValues(1)
    value = torch.tensor(3.0)
    assert isinstance(late_values.place_for(value), PlainPlace)
    late.note(value)
    assert late.due() == []
    late.note(value + 1)
    assert late.due() == [3.0]


class Event:
    """Stands in for an event of CUDA's."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.has_come = False
        self.waits = 0

    def record(self, stream: Any) -> None:
        self.recorded.append(stream)

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.waits += 1


def test_a_pinned_place_copies_without_waiting_and_reads_behind_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    empty, copy = torch.empty, Tensor.copy_
    copied: list[bool] = []

    def unpinned(*args: Any, **kwargs: Any) -> Tensor:
        made.append(kwargs)
        return empty(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})

    def noting(self: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
        copied.append(non_blocking)
        return copy(self, value)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(Tensor, "copy_", noting)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(device=device))
    with torch.inference_mode():  # an evaluation is the first to be watched
        place: Any = PinnedPlace(torch.float64)
        place.put(torch.tensor(2.0))
    assert made[0]["pin_memory"]
    assert made[0]["device"] == "cpu"
    assert not place.is_ready()
    place._event.has_come = True
    assert place.is_ready()
    place.put(torch.tensor(5.0, dtype=torch.float64))
    assert place.read() == 5.0
    assert copied == [True, True]
    assert (len(place._event.recorded), place._event.waits) == (2, 1)


def spoilt(after: int, device: Device) -> tuple[Gate, Watch, list[str]]:
    """A model under a strategy whose calls return infinity from some call on, on a device that is behind the host."""
    gate, trips = Gate(nn.Linear(2, 2), ["broken"]), list[str]()
    calls = iter(range(1000))

    def wrap(call: Call) -> Call:
        return lambda *args: call(*args) / (0 if next(calls) >= after else 1)

    def trip(why: str) -> None:
        trips.append(why)
        gate.remove("broken")

    gate.add("broken", wrap)
    watch = Watch(gate, torch.device("meta"), trip)  # any device but the host
    watch._late, watch._learnt = LateValues(Watch.LATE, place=device.place), LateValues(0, place=device.place)
    return gate, watch, trips


def test_the_watch_waits_for_no_call_until_one_was_bad() -> None:
    device = Device()
    gate, watch, trips = spoilt(3, device)
    for _ in range(40):
        watch.call(gate.call, (torch.ones(1, 2),), {})
    assert (trips, device.waited) == ([], 0)  # nothing has arrived
    device.runs(3)
    watch.call(gate.call, (torch.ones(1, 2),), {})
    assert trips == []  # those that have were good
    device.runs(1)
    outputs = watch.call(gate.call, (torch.ones(1, 2),), {})
    assert trips == ["its output is not finite"]
    assert outputs.isfinite().all()
    assert device.waited == 0


def test_the_watch_learns_from_plain_calls_without_waiting() -> None:
    device = Device()
    _, watch, _ = spoilt(1000, device)
    for size in (1.0, 7.0, math.inf, 3.0):
        watch.learn(torch.tensor([size]))
    assert (watch._plain_max, device.waited) == (0.0, 0)
    device.runs(1)
    watch.learn(torch.tensor([2.0]))
    assert watch._plain_max == 1.0
    device.runs(4)
    watch.call(watch._gate.call, (torch.ones(1, 2),), {})
    assert (watch._plain_max, device.waited) == (7.0, 0)  # the last plain ones, in the first call of the plan

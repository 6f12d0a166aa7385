"""Values of a GPU are read once they have arrived: the events and the page-locked memory are stand-ins here."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.guard import watch as watching
from accel.guard.watch import LateValues, Watch, sample
from accel.run.gate import Call, Gate


class Device:
    """Copies what was queued on it only when it is told to, as a GPU that is behind the host."""

    def __init__(self) -> None:
        self.queued: list[Copy] = []
        self.waited = 0
        """How often the host has waited for a copy."""

    def send(self, value: Tensor) -> tuple[Copy, Copy]:
        self.queued.append(Copy(self, value))
        return self.queued[-1], self.queued[-1]

    def runs(self, copies: int) -> None:
        for copy in self.queued[:copies]:
            copy.is_there = True
        del self.queued[:copies]


class Copy:
    """Stands in for a number in page-locked memory and for its event; it refuses to be read before it is there."""

    def __init__(self, device: Device, value: Tensor) -> None:
        self._device, self._value, self.is_there = device, float(value), False

    def query(self) -> bool:
        return self.is_there

    def synchronize(self) -> None:
        self._device.waited += 1
        self._device.runs(self._device.queued.index(self) + 1)

    def __float__(self) -> float:
        assert self.is_there
        return self._value


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Every value is one of a GPU."""
    made = Device()
    monkeypatch.setattr(watching, "_on_its_way", made.send)
    return made


def values(count: int, start: int = 0) -> list[Tensor]:
    return [torch.tensor(float(number)) for number in range(start, start + count)]


@pytest.mark.parametrize("behind", [0, 1, 8, 9, 30])  # calls that the device is behind: less than, as, more than late
def test_values_come_in_order_and_none_before_its_event(behind: int, device: Device) -> None:
    late, read = LateValues(8), list[float]()
    for number, value in enumerate(values(100)):
        late.note(value)
        device.runs(max(0, len(device.queued) - behind))
        read += late.due()
        assert read == [float(each) for each in range(number + 1 - max(behind, 8))]
    assert device.waited == 0


def test_the_oldest_is_waited_for_where_very_many_are_under_way(device: Device) -> None:
    late, read = LateValues(8, most=64), list[float]()
    for value in values(1000):
        late.note(value)
        read += late.due()
        assert len(device.queued) <= 64
    assert read == [float(number) for number in range(1000 - 64)]
    assert device.waited == 1000 - 64


def test_a_value_that_cannot_be_read_holds_up_no_other() -> None:
    late = LateValues(0)
    late.note(torch.ones(2))  # no number
    late.note(torch.ones(()))
    with pytest.raises(ValueError, match="one element"):
        late.due()
    assert late.due() == [1.0]


def test_a_value_of_a_gpu_is_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    empty = torch.empty
    copied: list[bool] = []

    def unpinned(*args: Any, **kwargs: Any) -> Tensor:
        made.append(kwargs)
        return empty(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})

    recorded: list[Any] = []
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=recorded.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    value: Any = SimpleNamespace(is_cuda=True, dtype=torch.float64, device="cuda")
    monkeypatch.setattr(Tensor, "copy_", lambda self, value, non_blocking=False: copied.append(non_blocking))
    watching._on_its_way(value)
    assert (made[0]["pin_memory"], made[0]["device"], copied, recorded) == (True, "cpu", [True], ["cuda"])


def spoilt(after: int) -> tuple[Gate, Watch, list[str]]:
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
    return gate, watch, trips


def test_the_watch_waits_for_no_call_until_one_was_bad(device: Device) -> None:
    gate, watch, trips = spoilt(3)
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


def test_the_watch_learns_from_plain_calls_without_waiting(device: Device) -> None:
    _, watch, _ = spoilt(1000)
    for size in (1.0, 7.0, math.inf, 3.0):
        watch.learn(torch.tensor([size]))
    assert (watch._sizes._plain_max, device.waited) == (0.0, 0)
    device.runs(1)
    watch.learn(torch.tensor([2.0]))
    assert watch._sizes._plain_max == 1.0
    device.runs(4)
    watch.call(watch._gate.call, (torch.ones(1, 2),), {})
    assert (watch._sizes._plain_max, device.waited) == (7.0, 0)  # the last plain ones, in the first call of the plan


@pytest.mark.parametrize("shape", [(5,), (1 << 20,), (3, 1 << 20), (1 << 11, 1 << 11)])
def test_of_a_large_output_a_sample_from_all_over_it_is_looked_at(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    part = sample(tensor)
    assert part.numel() <= 1 << 20
    assert part.numel() == tensor.numel() or part.numel() > 1 << 18
    assert (part.unique() % shape[-1]).unique().numel() == min(shape[-1], part.numel())  # of all columns
    assert float(part[-1].max()) > 0.99 * float(tensor.max())
    scaled = torch.linalg.vector_norm(part) * (tensor.numel() / part.numel()) ** 0.5
    torch.testing.assert_close(scaled, torch.linalg.vector_norm(tensor), rtol=1e-3, atol=0.0)


def test_a_large_output_in_channels_last_is_sampled_too() -> None:
    tensor = torch.ones(2, 16, 256, 512).contiguous(memory_format=torch.channels_last)
    assert 1 << 18 < sample(tensor).numel() <= 1 << 20
    with_gaps = torch.ones(2, 16, 256, 1024)[..., ::2]
    assert sample(with_gaps) is with_gaps

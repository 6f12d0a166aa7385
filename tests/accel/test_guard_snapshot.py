"""What a call may change is put back: attributes and what they hold, buffers, random states; and only that."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.guard import guard, snapshot
from accel.guard.guard import NotRestorable
from accel.guard.snapshot import Changes, ModelSnapshot, devices_of
from accel.strategies.base import Exactness

CPU = torch.device("cpu")


class Remembers(nn.Module):
    """Keeps a memory bank and statistics in plain attributes, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.memory = torch.zeros(6, 4)
        self.bank: dict[str, list[Tensor]] = {"rows": [torch.zeros(4), torch.zeros(4)]}
        self.stats: dict[str, Any] = {"norms": [], "by kind": defaultdict(list), "pair": ([], 1)}
        self.outer = self.stats

    def forward(self, x: Tensor) -> Any:
        z = self.layer(x) + self.memory.sum(0) + self.bank["rows"][0]
        self.memory[:2] += z.detach()[:2]
        self.bank["rows"][0] += 1
        self.bank["rows"].append(z.detach()[0])
        self.stats["norms"].append(float(z.detach().norm()))
        self.stats["by kind"][len(self.stats["norms"])].append([1])
        self.stats["pair"][0].append(1)
        return z * len(self.stats["norms"])


def seen(model: Remembers) -> list[Any]:
    rows = [row.tolist() for row in model.bank["rows"]]
    return [model.memory.tolist(), rows, repr(model.stats)]


def test_a_check_leaves_tensors_and_nested_containers_as_they_were() -> None:
    model = Remembers()
    x = torch.randn(5, 3)
    model(x)
    before = seen(model)
    held = model.memory, model.bank["rows"], model.stats["norms"], model.stats["by kind"]
    with guard.untouched(model, CPU):
        recording = guard.record(model, CPU, (x,), {})
        guard.replay(model, model, recording)
        guard.replay(model, model, recording)
    assert seen(model) == before
    now = model.memory, model.bank["rows"], model.stats["norms"], model.stats["by kind"]
    assert all(a is b for a, b in zip(held, now, strict=True))


def test_both_replays_begin_with_the_state_of_the_call() -> None:
    model = Remembers()
    x = torch.randn(5, 3)
    recording = guard.record(model, CPU, (x,), {})
    outputs = model(x)
    recording.listen(outputs)
    outputs.sum().backward()
    replays = []
    for _ in range(2):
        recording.before.restore()
        replays.append(guard.replay(model, model, recording))
    assert guard.compare(*replays, Exactness.EXACT).problem == ""
    assert torch.equal(replays[0].outputs[0], outputs)


def test_what_has_not_changed_is_not_written() -> None:
    """A graph that waits for its backward pass may hold it."""
    model = nn.Linear(3, 2)
    model.scale = torch.full((2,), 2.0)
    with guard.untouched(model, CPU):
        model(torch.randn(4, 3))
    assert model.scale._version == 0


def test_a_tensor_that_has_grown_is_put_back() -> None:
    model = nn.Linear(3, 2)
    model.memory = torch.ones(2)
    with guard.untouched(model, CPU):
        model.memory.resize_(4).fill_(5.0)
    assert model.memory.tolist() == [1.0, 1.0]


def test_weights_that_a_list_holds_are_not_copied_or_written() -> None:
    """The optimizer has moved them since the call; they are not the call's own state."""
    model = nn.Linear(3, 2)
    model.held = [model.weight.data, model.bias.detach()]
    recording = guard.record(model, CPU, (torch.randn(4, 3),), {})
    model.weight.data += 1
    after = model.weight.detach().clone()
    recording.before.restore()
    assert torch.equal(model.weight, after)


@pytest.mark.parametrize("kind", ["tensors", "entries"])
def test_a_model_that_keeps_more_than_is_copied_is_not_replayed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_BYTES" if kind == "tensors" else "MOST_ENTRIES", 100)
    model = nn.Linear(3, 2)
    model.kept = [torch.ones(10)] if kind == "tensors" else list(range(50))
    guard.record(model, CPU, (torch.ones(1, 3),), {})
    model.more = [torch.ones(50)] if kind == "tensors" else list(range(90))
    with pytest.raises(NotRestorable, match="MiB in attributes" if kind == "tensors" else "more than 100 entries"):
        guard.record(model, CPU, (torch.ones(1, 3),), {})


def test_containers_that_hold_themselves_are_looked_at_once() -> None:
    model = nn.Linear(3, 2)
    model.ring = [1]
    model.ring.append(model.ring)
    with guard.untouched(model, CPU):
        model.ring[0] = 2
    assert model.ring[0] == 1


@pytest.mark.parametrize("container", [Counter({"a": 2}), OrderedDict(a=2), {3, 4}, deque([1, 2], maxlen=2), {"a": 2}])
def test_containers_of_each_kind_are_refilled(container: Any) -> None:
    model = nn.Linear(3, 2)
    model.kept = {"inner": container}
    before = copy.copy(container)
    with guard.untouched(model, CPU):
        container.clear()
        (container.append if isinstance(container, deque) else container.update)({"x": 1})
    assert container == before


def test_calls_may_be_replayed_between_two_backward_passes() -> None:
    """Each has saved the running statistics, by their version."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    first, second = model(torch.randn(4, 2)), model(torch.randn(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recording = guard.record(model, CPU, (torch.randn(4, 2),), {})
    first.sum().backward()
    with guard.untouched(model, CPU):
        recording.before.restore()
        guard.replay(model, model, recording)
    second.sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_buffer_that_has_grown_is_put_back() -> None:
    model: Any = nn.Linear(3, 2)
    model.register_buffer("queue", torch.ones(2))
    with guard.untouched(model, CPU):
        model.queue.resize_(4).fill_(5.0)
    assert model.queue.tolist() == [1.0, 1.0]


def test_buffers_that_torch_cant_compare_are_put_back() -> None:
    model: Any = nn.Linear(3, 2)
    model.register_buffer("scales", torch.ones(2).to(torch.float8_e4m3fn))
    with guard.untouched(model, CPU):
        model.scales.copy_(torch.zeros(2))
    assert model.scales.float().tolist() == [1.0, 1.0]


# -- what calls were seen to change ------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Has statistics, a count, a table that stays as it is, and buffers that are written to or get other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)
        self.calls = 1
        for name in ("table", "cache", "mean", "queue"):
            self.register_buffer(name, torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        buffers: Any = self
        buffers.cache.fill_(self.calls)
        buffers.mean.data = 0.9 * buffers.mean.data + 0.1 * self.calls
        buffers.queue.add_(1)
        return self.norm(self.layer(x))  # type: ignore[no-any-return]


def changes_of(model: nn.Module, *arguments: Any) -> Changes:
    before = ModelSnapshot(model)
    model(*arguments)
    return before.changed()


def names(model: nn.Module, changes: Changes) -> set[str]:
    return {name for name, buffer in model.named_buffers() if id(buffer) in changes.written}


def different(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    return [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]


def test_what_calls_change_is_found_and_put_back() -> None:
    model: Any = Counts()
    changes = changes_of(model, torch.randn(4, 2))
    assert names(model, changes) == {f"norm.{name}" for name, _ in model.norm.named_buffers()} | {
        *("cache", "mean", "queue")
    }
    first = model(torch.randn(4, 2))  # its graph has saved the statistics
    for is_resized in (False, False, True):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        restore, calls = changes.kept(), model.calls
        model(torch.randn(4, 2))
        if is_resized:  # what has no more room for it stays
            model.queue.resize_(3, 2)
            before["queue"] = model.queue.clone()
        restore()
        assert (different(model, before), model.calls) == ([], calls)
    (first + model(torch.randn(4, 2))).sum().backward()


def test_copies_made_in_an_evaluation_in_inference_mode_serve_the_next_training_step() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    changes = changes_of(model, torch.randn(4, 2))
    with torch.inference_mode():
        changes.kept()()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    restore = changes.kept()
    model(torch.randn(4, 2))
    restore()
    assert different(model, before) == []


# -- random states -----------------------------------------------------------------------------------------------------


class Chip:
    """Stands in for torch's module of a kind of device."""

    def __init__(self, devices: list[str]) -> None:
        self.states = dict.fromkeys(devices, 0)

    def get_rng_state(self, device: Any = "mps") -> int:
        return self.states[str(device)]

    def set_rng_state(self, state: int, device: Any = "mps") -> None:
        self.states[str(device)] = state


@pytest.fixture
def chips(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with two of NVIDIA's, one of Intel's and of Apple's, and one kind that has no random state."""
    made = {
        "cuda": Chip(["cuda:0", "cuda:1"]),
        "xpu": Chip(["xpu:0"]),
        "mps": Chip(["mps"]),
        "hpu": SimpleNamespace(),
    }
    monkeypatch.setattr(torch, "get_device_module", lambda kind: made[kind])
    return made


class Spread(nn.Module):
    """Claims to have parameters on devices."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.places = devices

    def parameters(self, recurse: bool = True) -> Any:
        return iter([SimpleNamespace(device=torch.device(place)) for place in self.places])


@pytest.mark.parametrize("place", ["cuda:0", "cuda:1", "xpu:0", "mps"])
def test_the_state_of_each_device_is_put_back(place: str, chips: dict[str, Any]) -> None:
    devices = devices_of(Spread("cpu", "cuda:0", "cuda:1", "xpu:0", "mps", "hpu:0", "meta"), CPU)
    before = ModelSnapshot(nn.Linear(2, 2), devices)
    chip = chips[place.split(":")[0]]
    chip.states[place] = 7
    restore = before.changed().kept()
    chip.states[place] = 8
    restore()
    assert chip.states[place] == 7
    before.restore()
    assert chip.states[place] == 0


def test_devices_are_those_of_parameters_buffers_and_what_is_given() -> None:
    model = Spread("cpu", "cuda:1")
    model.register_buffer("kept", torch.ones(1))
    assert devices_of(model, torch.device("xpu:0"), [torch.ones(1)]) == [torch.device("xpu:0"), torch.device("cuda:1")]
    assert devices_of(nn.Linear(2, 2, device="meta"), CPU) == []

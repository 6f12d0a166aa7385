"""Replays put back what stands in plain attributes: tensors, and lists and dicts within each other."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.guard import guard, nested_state
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
        recording.modules.restore()
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
    recording.modules.restore()
    assert torch.equal(model.weight, after)


def test_the_memory_for_copies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested_state, "MOST_BYTES", 100)
    model = nn.Linear(3, 2)
    model.large, model.small = torch.ones(50), torch.ones(10)
    with guard.untouched(model, CPU):
        model.large += 1
        model.small += 1
    assert (float(model.large[0]), float(model.small[0])) == (2.0, 1.0)


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

"""Replays write to containers of their own, of whatever class the loop passes, and not to the loop's."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from accel.guard import guard
from accel.profiler import trees
from tests.accel.guard_replays import replayed_both_ways

CPU = torch.device("cpu")


@dataclass
class Log:
    losses: list[float] = field(default_factory=list)
    scale: Tensor = field(default_factory=lambda: torch.ones(1))


@dataclass(frozen=True)
class Frozen:
    losses: list[float] = field(default_factory=list)


class Pair(NamedTuple):
    losses: list[float]
    calls: int


class Dict(dict[str, list[float]]):
    """A dict of a class of its own."""


class List(list[float]):
    """A list that is made otherwise."""

    def __init__(self, first: float) -> None:
        super().__init__([first])


LOGS: dict[str, tuple[Any, Callable[[Any, float], Any]]] = {
    "defaultdict": (defaultdict(list), lambda log, loss: log["loss"].append(loss)),
    "ordered dict": (OrderedDict(loss=[]), lambda log, loss: log["loss"].append(loss)),
    "dict of its own class": (Dict(loss=[]), lambda log, loss: log["loss"].append(loss)),
    "list of its own class": (List(0.0), lambda log, loss: log.append(loss)),
    "user's dict": (UserDict(loss=[]), lambda log, loss: log["loss"].append(loss)),
    "counter": (Counter({"calls": 1}), lambda log, loss: log.update([f"{log['calls']}"])),
    "deque": (deque([0.0]), lambda log, loss: log.append(loss)),
    "deque of lists": (deque([[0.0]]), lambda log, loss: log[0].append(loss)),
    "set": ({"a"}, lambda log, loss: log.add(len(log))),
    "dataclass": (Log(), lambda log, loss: log.losses.append(loss)),
    "dataclass that counts": (Log(), lambda log, loss: setattr(log, "losses", [*log.losses, loss])),
    "frozen dataclass": (Frozen(), lambda log, loss: log.losses.append(loss)),
    "named tuple": (Pair([], 1), lambda log, loss: log.losses.append(loss)),
    "list in a tuple": (([], 1), lambda log, loss: log[0].append(loss)),
}


class Logs(nn.Module):
    """Writes to the log that it is called with."""

    def __init__(self, write: Callable[[Any, float], Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(2, 2), write

    def forward(self, x: Tensor, log: Any) -> Tensor:
        outputs: Tensor = self.layer(x)
        self.write(log, float(outputs.detach().mean()))
        return outputs


@pytest.mark.parametrize("name", LOGS)
def test_replays_leave_the_loop_s_containers_alone(name: str) -> None:
    log, write = copy.deepcopy(LOGS[name])
    model, x = Logs(write), torch.ones(1, 2)
    recording = guard.record(model, CPU, (x, log), {})
    model(x, log)
    before = repr(log)
    assert replayed_both_ways(model, lambda call: call, recording).problem == ""
    assert repr(log) == before
    assert type(recording.args[1]) is type(log)


def test_a_candidate_that_adds_to_such_a_container_is_found() -> None:
    log, write = copy.deepcopy(LOGS["defaultdict"])
    model, x = Logs(write), torch.ones(1, 2)
    recording = guard.record(model, CPU, (x, log), {})

    def adds(call: Any) -> Any:
        return lambda x, log: (log["more"].append(1.0), call(x, log))[1]

    assert "other entries" in replayed_both_ways(model, adds, recording).problem


def test_what_can_not_be_copied_is_passed_as_it_is() -> None:
    class Refuses(dict[str, int]):
        def __copy__(self) -> Any:
            raise TypeError("not to be copied")

    given = Refuses(a=1), UserList([1]), torch.Size([2, 3]), object(), nn.Linear(2, 2), Log
    assert all(copied is own for copied, own in zip(trees.copied(given), given, strict=True))

"""A call that is made again has the memory of the one that failed: nothing of that is held, then or later."""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.guard.watch import Watch
from accel.run.gate import Call, Gate
from tests.accel.test_watch_outputs import broken


class Activates(nn.Module):
    """Notes in each call how many of the activations of earlier ones are still held."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(2, 2), fails
        self._activations: list[weakref.ref[Tensor]] = []
        self._held: list[int] = []

    @property
    def held(self) -> int:
        return sum(activation() is not None for activation in self._activations)

    def forward(self, x: Tensor) -> Tensor:
        self._held.append(self.held)
        activation = torch.tanh(self.layer(x))
        self._activations.append(weakref.ref(activation))
        if self.fails:
            torch.empty(1 << 60)
        return activation


def has_no_room(call: Call, first: Call | None = None) -> Call:
    def run_call(x: Tensor) -> Any:
        _activations = (first or call)(x)
        raise torch.OutOfMemoryError("no room")

    return run_call


def gives_nan(call: Call) -> Call:
    return lambda x: call(x * float("nan"))


@pytest.mark.parametrize("spoils", [has_no_room, gives_nan])
def test_a_call_made_again_has_the_room_of_the_one_that_failed(spoils: Any) -> None:
    model = Activates()
    gate, watch, trips = broken(model, spoils)
    assert watch.call(gate.call, (torch.ones(1, 2),), {}).isfinite().all()
    assert len(trips) == 1
    assert model._held == [0, 0]


def test_an_error_of_the_user_s_own_leaves_nothing_in_memory() -> None:
    """A loop that makes do with a smaller batch then has the room for it without a collection of garbage."""
    model = Activates(fails=True)
    gate, watch, trips = broken(model, lambda call: lambda x: call(x))
    with contextlib.suppress(RuntimeError):
        watch.call(gate.call, (torch.ones(1, 2),), {})
    assert (model._held, model.held, trips) == ([0, 0], 0, [])


@pytest.mark.parametrize("trains", [True, False])
def test_what_a_strategy_keeps_is_given_up_before_a_call_is_made_again(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step or an evaluation that fitted died beside captured graphs: the plain call had no more room than theirs."""
    kept, model, trips = [torch.empty(1)], nn.Linear(2, 2), list[str]()
    forward = nn.Linear.forward

    def needs_all(self: nn.Linear, x: Tensor) -> Tensor:
        if kept:
            raise torch.OutOfMemoryError("no room")
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", needs_all)
    gate = Gate(model, ["keeps"])
    gate.add("keeps", partial(has_no_room, first=torch.tanh), make_room=kept.clear)
    watch = Watch(gate, torch.device("cpu"), lambda why: (trips.append(why), gate.remove("keeps"))[1])
    with torch.set_grad_enabled(trains):
        assert watch.call(gate.call, (torch.ones(1, 2),), {}).isfinite().all()
    assert trips == ["it raised OutOfMemoryError: no room"]

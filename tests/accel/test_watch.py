"""The watch around each call under a strategy: what it repeats, and what it leaves in the loop's own objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accel
from accel import entry
from accel.guard import guard
from accel.guard.blame import Blame
from accel.guard.watch import Watch
from accel.run.gate import Call, Gate
from tests.accel.loops import make_loader

CPU = torch.device("cpu")


def watched(model: nn.Module) -> tuple[Gate, Watch, list[str]]:
    """A model under a strategy that changes nothing, its watch, and the reasons for which that has switched it off."""
    gate, trips = Gate(model, ["same"]), list[str]()

    def trip(why: str) -> None:
        trips.append(why)
        gate.remove("same")

    def wrap(call: Call) -> Call:
        return lambda *args, **kwargs: call(*args, **kwargs)

    gate.add("same", wrap)
    return gate, Watch(gate, CPU, trip), trips


def keep_quick_on(model: nn.Module) -> Any:
    """Keep `quick` on from here, as a finished search would."""
    session = entry.MODELS[model].session
    session.runner._next_action = lambda first=False: None  # type: ignore[method-assign]
    session.switchboard.switch({"quick": None})
    session.run.gate.watch(session.events.calls)
    return session


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_call_that_checkpointing_repeats_is_not_made_once_more(reentrant: bool) -> None:
    """Torch ends it by an error of its own, as soon as all is there that the backward pass needs."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    gate, watch, trips = watched(model)
    x = torch.randn(5, 3, requires_grad=True)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    repeated = checkpoint(lambda x: watch.call(gate.call, (x,), {}), x, use_reentrant=reentrant)
    repeated.sum().backward()  # type: ignore[union-attr]
    assert trips == []
    for wanted, p in zip(expected, model.parameters(), strict=True):
        assert torch.equal(wanted, p.grad)  # type: ignore[arg-type]


def test_a_loop_that_checkpoints_its_model_trains_under_a_strategy(only_quick: None) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, loader, optimizer = accel.optimize(model, make_loader(), optimizer, allow="exact", budget=60)
    session: Any = None
    for number, (x, target) in enumerate(loader):
        session = keep_quick_on(model) if number == 4 else session
        optimizer.zero_grad()
        outputs = checkpoint(model, x, use_reentrant=False)
        nn.functional.cross_entropy(outputs, target % 3).backward()
        optimizer.step()
    assert (session.switchboard.trips, session.active, session.failed) == ({}, {"quick": None}, "")


class ReturnsAWeight(nn.Module):
    """Returns a parameter beside its output, for a penalty on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.weight


def test_no_hook_stays_on_a_parameter_that_the_model_returns(only_quick: None) -> None:
    model = ReturnsAWeight()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, loader, optimizer = accel.optimize(model, make_loader(), optimizer, allow="exact", budget=60)
    for number, (x, target) in enumerate(loader):
        keep_quick_on(model) if number == 4 else None
        optimizer.zero_grad()
        outputs, weight = model(x)
        (nn.functional.cross_entropy(outputs, target % 3) + 0.1 * weight.square().sum()).backward()
        optimizer.step()
    assert len(model.layer.weight._backward_hooks or {}) <= 1  # that of the last call
    accel.undo(model)
    assert not model.layer.weight._backward_hooks


def test_recorded_calls_listen_no_more_once_they_are_forgotten() -> None:
    model = ReturnsAWeight()
    recording = guard.record(model, CPU, (torch.ones(1, 6),), {})
    recording.listen(model(torch.ones(1, 6)))
    blame = Blame(model)
    for _ in range(2):
        call = blame.begin((torch.ones(1, 6),), {})
        blame.keep(call, model(torch.ones(1, 6)))
    assert len(model.layer.weight._backward_hooks or {}) == 3
    blame.forget()
    recording.forget()
    assert not model.layer.weight._backward_hooks


class Merges(nn.Module):
    """Merges a second weight into the first one in evaluation, as loralib's layers do in a train() of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.low = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(3, 6))

    def train(self, mode: bool = True) -> Merges:
        if mode != self.training:
            self.weight.data += -self.low.data if mode else self.low.data
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight + self.low).T if self.training else x @ self.weight.T


def test_a_replay_in_evaluation_mode_calls_no_train_of_the_user_s_own() -> None:
    model = Merges()
    before = model.weight.detach().clone()
    recording = guard.record(model, CPU, (torch.ones(1, 6),), {})
    guard.replay_evaluation(model, model, recording)
    assert torch.equal(model.weight, before)
    assert model.training


class WritesToItsInputs(nn.Module):
    """Scales both of its inputs in place, one of them by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return x.mul_(self.scale) + weights.mul_(2)


def test_a_call_that_fails_after_it_has_written_is_made_again_with_what_it_was_given() -> None:
    model = WritesToItsInputs()
    expected = torch.ones(2), torch.ones(2)
    model(*expected).sum().backward()
    gradient, model.scale.grad = model.scale.grad, None
    gate, watch, trips = watched(model)

    def fails(call: Call) -> Call:
        def run_call(*args: Any) -> Any:
            call(*args)
            raise ValueError("the strategy's own")

        return run_call

    gate.add("same", fails)
    watch.keep_inputs()
    given = torch.ones(2), torch.ones(2)
    watch.call(gate.call, given, {}).sum().backward()
    assert trips == ["it raised ValueError: the strategy's own"]
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    assert torch.equal(model.scale.grad, gradient)  # type: ignore[arg-type]


def test_a_recorded_call_shows_that_inputs_are_written(only_quick: None) -> None:
    class Shifts(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.sub_(x.mean()))

    for kind in (Shifts, nn.Sequential):
        model: Any = kind(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, loader, optimizer = accel.optimize(model, make_loader(), optimizer, allow="exact", budget=60)
        session = entry.MODELS[model].session
        session.events.calls.check.expect({"quick": None})
        session.events.calls.check.recorded((next(iter(loader))[0],), {})
        assert session.events.calls.watch.calls._keeps_inputs == (kind is Shifts)
        accel.undo(model)

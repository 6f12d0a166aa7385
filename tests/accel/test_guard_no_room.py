"""What ends a comparison without a result, as a lack of memory does: the candidate is then neither wrong nor right."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry, strategies
from accel.guard import guard, update_guard
from accel.guard.guard import Comparison, Replayed
from accel.run.gate import Call
from accel.search.actions import Action, Result
from accel.session import plan_check
from accel.session.plan_check import PlanCheck
from accel.strategies.cuda_graphs import compared_with_eager
from accel.strategies.trial_design import TrialDesign as Judged
from tests.accel.guard_replays import Acting
from tests.accel.simulation import Machine, candidate, simulate

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB"
NO_ROOM = f"there is no room to compare: {MESSAGE}"
PLAN: dict[str, Any] = {"large": None}
BY_GRAPHS = Judged(further_check=compared_with_eager)


class Large(Acting):
    """May need more memory for the model than there is."""

    name = "large"


def runs_out(call: Call) -> Call:
    def run_call(*args: Any, **kwargs: Any) -> Any:
        _held = call(*args, **kwargs)
        raise torch.OutOfMemoryError(MESSAGE)

    return run_call


class Loop:
    """A loop of the user's, and the guard of its session."""

    def __init__(self, *layers: nn.Module) -> None:
        loader: Any = DataLoader(TensorDataset(torch.randn(64, 3), torch.randn(64, 2)), batch_size=4)
        model = nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.model, self.loader, self.optimizer = accel.optimize(model, loader, optimizer, budget=60, cache=False)

    @property
    def guard(self) -> PlanCheck:
        return entry.MODELS[self.model].session.events.calls.check

    def record(self) -> None:
        self.guard.expect(PLAN)
        outputs = self.guard.recorded((torch.randn(4, 3),), {})
        outputs.square().mean().backward()

    def checked(self) -> Comparison | None:
        self.record()
        self.guard.check(PLAN)
        return self.guard.take_finding()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(strategies, "REGISTRY", [Large])
    loop = Loop()
    yield loop
    accel.undo(loop.model)


def test_a_candidate_without_room_is_not_wrong(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Large, "act", staticmethod(runs_out))
    assert loop.checked() == Comparison(unsure=NO_ROOM)
    assert entry.MODELS[loop.model].session.active == {}


def test_a_gradient_for_whose_copy_there_is_no_room_does_not_end_the_loops_backward_pass(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone, failed = Tensor.clone, []

    def runs_out_in_the_backward_pass(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch._C._current_graph_task_id() < 0:
            return clone(tensor, *args, **kwargs)
        failed.append(tensor.shape)
        raise torch.OutOfMemoryError(MESSAGE)

    monkeypatch.setattr(Tensor, "clone", runs_out_in_the_backward_pass)
    finding = loop.checked()
    assert failed == [(4, 2)]
    assert all(parameter.grad is not None for parameter in loop.model.parameters())
    assert finding is not None and not finding.problem


@pytest.mark.parametrize(("available", "unsure"), [(95, "there is no room to compare: outputs take 0.0 GiB"), (96, "")])
def test_outputs_for_whose_gradients_there_is_no_room_are_not_recorded(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, available: int, unsure: str
) -> None:
    check = loop.guard
    monkeypatch.setattr(plan_check, "has_room", lambda device, needed: needed <= available)  # outputs take 32 bytes
    loop.record()
    finding = check.take_finding()
    assert unsure == ("" if finding is None else finding.unsure)
    assert (check._recording is None) is bool(unsure)


def test_any_other_error_of_a_candidate_is_its_fault(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("of its own")

    monkeypatch.setattr(Large, "act", staticmethod(lambda call: fails))
    finding = loop.checked()
    assert finding is not None
    assert (finding.problem, finding.unsure) == ("RuntimeError: of its own", "")


def test_memory_is_given_back_when_nothing_holds_the_tensors(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def runs_out(call: Call) -> Call:
        def run_call(*args: Any) -> Any:
            held = call(*args)
            made.extend(map(weakref.ref, (held, *args)))
            raise torch.OutOfMemoryError(MESSAGE)

        return run_call

    monkeypatch.setattr(Large, "act", staticmethod(runs_out))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(sum(each() is not None for each in made)))
    loop.checked()
    assert (len(made), alive) == (2, [0])


def test_an_allocator_that_gives_nothing_back_ends_no_loop(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("captures_underway.empty()")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    monkeypatch.setattr(Large, "act", staticmethod(runs_out))
    assert loop.checked() == Comparison(unsure=NO_ROOM)


def test_a_plain_call_without_room_is_no_fault_either(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.record()
    monkeypatch.setattr(nn.Linear, "forward", runs_out(nn.Linear.forward))
    loop.guard.check(PLAN)
    assert loop.guard.take_finding() == Comparison(unsure=NO_ROOM)


def test_an_evaluation_without_room_is_unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_out_later(call: Call) -> Call:
        return lambda *args: call(*args) if torch.is_grad_enabled() else runs_out(call)(*args)

    monkeypatch.setattr(strategies, "REGISTRY", [Large])
    monkeypatch.setattr(Large, "act", staticmethod(runs_out_later))
    loop = Loop(nn.Dropout(0.5))  # what draws is compared in evaluation mode, too
    finding = loop.checked()
    accel.undo(loop.model)
    assert finding == Comparison(unsure=NO_ROOM)


def test_a_recording_without_room_is_unsure(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError(MESSAGE)

    monkeypatch.setattr(guard, "record", fails)
    finding = loop.checked()
    assert finding == Comparison(unsure=NO_ROOM)  # not: the model was not called


def test_an_update_without_room_is_unsure_and_hides_no_fault(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError(MESSAGE)

    monkeypatch.setattr(update_guard, "updated", fails)
    monkeypatch.setattr(Large, "touches", frozenset({"model", "optimizer"}))
    finding = loop.checked()
    assert finding is not None
    assert (finding.problem, finding.unsure) == ("", NO_ROOM)
    monkeypatch.setattr(Large, "act", staticmethod(lambda call: lambda *args: 2 * call(*args)))
    finding = loop.checked()
    assert finding is not None
    assert finding.problem.startswith("its output is off by")


def test_two_replays_at_most_are_alive(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds the outputs of a call and the gradients of all parameters."""
    made: list[weakref.ref[Replayed]] = []
    most = [0]
    replay, compare = guard.replay, guard.compare

    def alive() -> int:
        return sum(each() is not None for each in made)

    def noting(*args: Any, **kwargs: Any) -> Replayed:
        most[0] = max(most[0], 1 + alive())
        result = replay(*args, **kwargs)
        made.append(weakref.ref(result))
        return result

    def comparing(*args: Any) -> Comparison:
        most[0] = max(most[0], alive())
        return compare(*args)

    monkeypatch.setattr(guard, "replay", noting)
    monkeypatch.setattr(guard, "compare", comparing)
    monkeypatch.setattr(Large, "trial_design", lambda self, run: BY_GRAPHS)
    finding = loop.checked()
    assert finding is not None
    assert (finding.problem, finding.unsure) == ("", "")
    assert (len(made), most[0]) == (5, 2)
    assert alive() == 0


@pytest.mark.parametrize("wrong", [1, 2])  # the call that captures, the one that replays what was captured
def test_a_graph_that_computes_something_else_is_wrong(loop: Loop, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def spoils(call: Call) -> Call:
        def run_call(*args: Any) -> Any:
            calls[0] += 1
            return call(*args) * (2 if calls[0] == 1 + wrong else 1)  # the first is under the mode that notes draws

        return run_call

    monkeypatch.setattr(Large, "act", staticmethod(spoils))
    monkeypatch.setattr(Large, "trial_design", lambda self, run: BY_GRAPHS)
    finding = loop.checked()
    assert finding is not None
    assert finding.problem.startswith("its output is off by")
    assert calls[0] == 1 + wrong


def train(loop: Loop) -> None:
    for _ in range(4):
        for x, target in loop.loader:
            loop.optimizer.zero_grad()
            (loop.model(x) - target).square().mean().backward()
            loop.optimizer.step()


def test_a_search_does_not_try_what_it_has_no_room_to_compare(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Large, "act", staticmethod(runs_out))
    train(loop)
    (row,) = accel.explain(loop.model).rows
    assert (row.status, row.why) == ("not tried", f"the guard could compare nothing: {NO_ROOM}")


class Cramped(Machine):
    """Has no room to compare the second setting."""

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        if action.check and action.check.get("w") == 2:
            result.finding = Comparison(unsure="there is no room to compare")
        return result


def test_a_setting_that_can_not_be_compared_leaves_the_kept_one() -> None:
    machine = Cramped(speed={("w", 1): 1.3, ("w", 2): 1.5}, noise=0.03)
    controller = simulate([candidate("w", settings=(1, 2))], machine)
    assert controller.plan == {"w": 1}
    assert controller.rows["w"].status == "kept"
    assert any("w 2 was not compared: there is no room to compare; 1 stays" in e.text for e in controller.events)


# -- a plain call that can't be made again is no fault of the strategy either ------------------------------------------


class Reentrant(nn.Module):
    """Repeats a layer in the backward pass, the old way, which bears no `autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.second(checkpoint(torch.nn.Sequential(self.first, nn.ReLU()), x, use_reentrant=True))


def test_reentrant_checkpointing_is_not_the_candidates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Large])
    loader: Any = DataLoader(TensorDataset(torch.randn(64, 3), torch.randn(64, 2)), batch_size=4)
    model = Reentrant()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60, cache=False)
    for _ in range(4):
        for x, target in loader:
            optimizer.zero_grad()
            (model(x.requires_grad_()) - target).square().mean().backward()
            optimizer.step()
    (row,) = accel.explain(model).rows
    accel.undo(model)
    assert row.status == "not tried", row
    assert "the guard could compare nothing: the plain call can't be replayed: " in row.why
    assert "checkpoint" in row.why.lower()

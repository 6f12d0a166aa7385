"""The watch around each call under a strategy: what it looks at, what it repeats, and what it leaves to the loop."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import UserList
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accel
from accel import entry
from accel.guard import guard
from accel.guard import watch as watching
from accel.guard.blame import Blame
from accel.guard.watch import Watch
from accel.run import ranks
from accel.run.gate import Call, Gate
from tests.accel.autograd_functions import OneNode
from tests.accel.guard_replays import broken, gives_nan, same
from tests.accel.loops import make_loader
from tests.accel.test_guard_alone import Parallel, state

CPU = torch.device("cpu")


def keep_quick_on(model: nn.Module) -> Any:
    """Keep `quick` on from here, as a finished search would."""
    session = entry.MODELS[model].session
    session.runner._next_action = lambda first=False: None  # type: ignore[method-assign]
    session.switchboard.switch({"quick": None})
    session.run.gate.watch(session.events.calls)
    return session


def check_training_under_quick(model: nn.Module, optimizer: Any, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Train an epoch, from the fifth step on under `quick`, and check that it stays on and nothing fails."""
    _, loader, optimizer = accel.optimize(model, make_loader(), optimizer, allow="exact", budget=60)
    session: Any = None
    for number, (x, target) in enumerate(loader):
        session = keep_quick_on(model) if number == 4 else session
        optimizer.zero_grad()
        loss(x, target % 3).backward()
        optimizer.step()
    assert (session.switchboard.trips, session.active, session.failed) == ({}, {"quick": None}, "")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_call_that_checkpointing_repeats_is_not_made_once_more(reentrant: bool) -> None:
    """Torch ends it by an error of its own, as soon as all is there that the backward pass needs."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    gate, watch, trips = broken(model, same)
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
    check_training_under_quick(
        model,
        optimizer,
        lambda x, target: nn.functional.cross_entropy(checkpoint(model, x, use_reentrant=False), target),  # type: ignore[arg-type]
    )


class LogitsAndLoss(nn.Module):
    """Returns two outputs from one node of the graph, of which the loop uses the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = self.layer(x)
        return OneNode.apply(logits, nn.functional.cross_entropy(logits, target))


def test_an_output_that_the_loss_leaves_out_trains_under_a_strategy(only_quick: None) -> None:
    """Autograd calls hooks on it with None: once the whole search, the guard's replays, and the watch after it."""
    torch.manual_seed(0)
    model = LogitsAndLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    check_training_under_quick(model, optimizer, lambda x, target: model(x, target)[1])


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
    guard.replay(model, model, recording, evaluates=True)
    assert torch.equal(model.weight, before)
    assert model.training


# -- outputs of any kind, which lie anywhere: what can't be judged is passed over, and nothing raises ------------------


class WithPlaceholder(nn.Module):
    """Returns a tensor of another device beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), torch.zeros((), device="meta")


def test_a_model_with_outputs_on_two_devices_trains(only_quick: None) -> None:
    model: Any = WithPlaceholder()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model, loader, optimizer = accel.optimize(model, make_loader(), optimizer, allow="exact", budget=60)
    for x, target in loader:
        optimizer.zero_grad()
        outputs, _ = model(x)
        nn.functional.cross_entropy(outputs, target % 3).backward()
        optimizer.step()
    accel.undo(model)


def test_norms_are_brought_to_one_device_before_they_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU; with one, the sum is taken there, so that the host needn't wait."""
    stacked: list[list[torch.device]] = []
    stack = torch.stack

    def noting(norms: list[Tensor]) -> Tensor:
        stacked.append([norm.device for norm in norms])
        return stack(norms)

    monkeypatch.setattr(torch, "stack", noting)
    watching._total([torch.ones(()), torch.ones((), device="meta"), torch.ones((), dtype=torch.float64)])
    assert stacked == [[torch.device("meta")] * 3]


class Unreadable(Tensor):
    """Has no norm to ask for."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.linalg.vector_norm or getattr(function, "__name__", "") == "_foreach_norm":
            raise RuntimeError("no norm")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_outputs_that_cannot_be_judged_are_handed_on(device: str) -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).as_subclass(Unreadable)

    model = Odd(2, 2)
    gate, _, trips = broken(model, lambda call: lambda *args: call(*args))
    watch = Watch(gate, torch.device(device), trips.append)
    watch.learn(model(torch.ones(1, 2)))
    for _ in range(watching._LATE + 2):
        assert type(watch.call(gate.call, (torch.ones(1, 2),), {})) is Unreadable
    assert trips == []


def test_gradients_that_cannot_be_judged_are_taken() -> None:
    gate, watch, _ = broken(nn.Linear(2, 2), lambda call: call)
    optimizer = torch.optim.SGD(gate.model.parameters(), 0.1)
    gate.model.weight.grad = torch.ones(2, 2).as_subclass(Unreadable)  # type: ignore[assignment]
    assert watch.gradients_are_finite(optimizer)


@pytest.mark.parametrize("part", ["real", "imag"])
def test_complex_outputs_are_judged_by_both_parts_without_a_warning(part: str) -> None:
    class Spectral(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return torch.complex(super().forward(x), torch.ones(1, 2))

    def spoils(call: Call) -> Call:
        def run_call(*args: Any) -> Any:
            outputs = call(*args).clone()
            getattr(outputs, part).fill_(float("nan"))
            return outputs

        return run_call

    gate, watch, trips = broken(Spectral(2, 2), spoils)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.learn(gate.plain(torch.ones(1, 2)))
        outputs = watch.call(gate.call, (torch.ones(1, 2),), {})
    assert trips == ["its output is not finite"]
    assert torch.view_as_real(outputs).isfinite().all()


# -- memory: nothing is held of a call that has failed -----------------------------------------------------------------


class Activates(nn.Module):
    """Notes in each call how many of the activations of earlier ones are still held."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(2, 2), fails
        self._activations: UserList[weakref.ref[Tensor]] = UserList()  # a list would be put back
        self._held: UserList[int] = UserList()

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
    watch = Watch(gate, torch.device("cpu"), lambda *why: (trips.extend(why), gate.remove("keeps"))[1])
    with torch.set_grad_enabled(trains):
        assert watch.call(gate.call, (torch.ones(1, 2),), {}).isfinite().all()
    assert trips == ["it raised OutOfMemoryError: no room", "keeps"]


# -- several ranks: a call that one of them makes again talks to no other ----------------------------------------------


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "are_several", lambda: True)


@pytest.mark.parametrize("within", [False, True])
def test_a_call_that_is_made_again_sends_no_buffers_and_counts_for_no_step(within: bool, two_ranks: None) -> None:
    parallel = Parallel(nn.Linear(2, 2))
    gate, watch, trips = broken(nn.Sequential(parallel) if within else parallel, gives_nan)
    before = state(parallel)
    outputs = watch.call(gate.call, (torch.ones(1, 2),), {})
    assert trips == ["its output is not finite"] and outputs.isfinite().all()
    # Gradients are reduced in the backward pass of the call that is made again: there is one on each rank.
    assert parallel._told == ["of the step", "buffers", "gradients", "gradients"]
    assert state(parallel) == before
    assert not parallel._forward_pre_hooks


@pytest.mark.parametrize("reached", [False, True])
def test_after_an_error_the_others_are_told_what_they_have_not_been_told(reached: bool, two_ranks: None) -> None:
    def fails(call: Call) -> Call:
        def run_call(*args: Any) -> Any:
            if reached:
                call(*args)
            raise ValueError("the strategy's own")

        return run_call

    parallel = Parallel(nn.Linear(2, 2))
    gate, watch, trips = broken(parallel, fails)
    watch.call(gate.call, (torch.ones(1, 2),), {})
    assert trips == ["it raised ValueError: the strategy's own"]
    assert (parallel._told.count("of the step"), parallel._told.count("buffers")) == (1, 1)


class Calls(nn.Module):
    """Notes its calls, not in a list, which would be put back; its norm would talk to the other ranks within each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self._calls = nn.Linear(2, 2), nn.SyncBatchNorm(2), UserList[int]()

    def forward(self, x: Tensor) -> Tensor:
        self._calls.append(1)
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_model_that_talks_within_its_call_is_not_called_again(two_ranks: None) -> None:
    model = Calls()
    gate, watch, trips = broken(model, gives_nan)
    outputs = watch.call(gate.call, (torch.ones(1, 2),), {})
    assert (len(model._calls), bool(outputs.isnan().all())) == (1, True)
    assert len(trips) == 1 and trips[0].startswith("its output is not finite")


def test_on_one_rank_it_is_called_again() -> None:
    model = Calls()
    gate, watch, _ = broken(model, gives_nan)
    assert watch.call(gate.call, (torch.ones(1, 2),), {}).isfinite().all()
    assert len(model._calls) == 2

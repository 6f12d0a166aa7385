"""What only uses fewer cores is compared with the step under way, without a plain call that is made once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry, strategies
from accel.guard.guard import Comparison
from accel.session.guard_runner import GuardRunner
from tests.accel.autograd_functions import OneGradient
from tests.accel.test_guard_no_room import Large

PLAN: dict[str, Any] = {"fewer": None}
CALLS: list[int] = []
"""Of the model, by their samples: an attribute of it would be put back."""
BY_ITSELF, AS_USUAL = 2, 5
"""Calls of the model: the loop's and the candidate's; or the loop's, and two in each mode, since it draws."""


class Fewer(Large):
    """Calls the model as it is, on fewer cores."""

    name = "fewer"
    frees_cores = True


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Any:
        CALLS.append(len(x))
        return self.layers(x)


class Loop:
    """A loop of the user's, whose coming step is one in which a plan is compared."""

    def __init__(self, *, optimized: bool = True) -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(64, 3), torch.randn(64, 2))
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader: Any = DataLoader(data, batch_size=4)
        if optimized:
            _, self.loader, _ = accel.optimize(self.model, self.loader, self.optimizer, budget=60, cache=False)
        self.batches = iter(self.loader)

    @property
    def guard(self) -> GuardRunner:
        return entry.MODELS[self.model].session.guard

    def begin(self) -> tuple[Tensor, Tensor]:
        x, y = next(self.batches)
        self.guard.expect(PLAN)
        CALLS.clear()
        return x, y

    def end(self) -> Comparison:
        self.guard.check(PLAN)
        finding = self.guard.take_finding()
        self.guard.expect(None)
        assert finding is not None and self.guard.own_step is None
        assert all(p._backward_hooks is None for p in self.model.parameters())
        return finding

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        mse_loss(self.model(x), y).backward()
        self.optimizer.step()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(strategies, "REGISTRY", [Fewer])
    loop = Loop()
    yield loop
    accel.undo(loop.model)


def changed(change: Callable[[Tensor], Tensor]) -> Any:
    return staticmethod(lambda call: lambda *args: change(call(*args)))


def test_a_right_one_takes_no_plain_call(loop: Loop) -> None:
    for _ in range(3):
        loop.step(*loop.begin())
        finding = loop.end()
        assert (finding.problem, finding.unsure, finding.output_error) == ("", "", 0.0)
        assert len(CALLS) == BY_ITSELF


@pytest.mark.parametrize(
    "change",
    [lambda out: out * 1.01, lambda out: out.detach().requires_grad_(), lambda out: out + 0.1 * (out - out.detach())],
)
def test_a_wrong_one_is_found_by_the_replays(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]
) -> None:
    monkeypatch.setattr(Fewer, "act", changed(change))
    loop.step(*loop.begin())
    assert loop.end().problem
    assert len(CALLS) == BY_ITSELF + 2


def test_training_goes_on_as_without_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Fewer])
    plain, loop = Loop(optimized=False), Loop()
    for each in (plain, loop):
        torch.manual_seed(1)
        for number in range(4):
            each.step(*(loop.begin() if each is loop and number > 1 else next(each.batches)))
            if each is loop and number > 1:
                loop.end()
    accel.undo(loop.model)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, loop.model.state_dict()[name]), name


def test_gradients_that_the_loop_clips_or_accumulates_are_those_of_the_call(loop: Loop) -> None:
    x, y = loop.begin()
    loop.optimizer.zero_grad()
    for parameter in loop.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    mse_loss(loop.model(x), y).backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
    loop.optimizer.step()
    assert not loop.end().problem
    assert len(CALLS) == BY_ITSELF


def test_what_is_not_that_of_one_call_is_compared_as_usual(loop: Loop) -> None:
    x, y = loop.begin()
    loop.optimizer.zero_grad()
    penalty = sum(p.square().sum() for p in loop.model.parameters())
    (mse_loss(loop.model(x), y) + penalty).backward()
    loop.optimizer.step()
    assert not loop.end().problem
    assert len(CALLS) == BY_ITSELF + AS_USUAL - 1

    x, y = loop.begin()
    loop.optimizer.zero_grad()
    (mse_loss(loop.model(x), y) + mse_loss(loop.model(x), y)).backward()
    loop.optimizer.step()
    assert not loop.end().problem
    assert len(CALLS) == AS_USUAL + 1  # two of the loop's

    x, y = loop.begin()
    mse_loss(loop.model(x), y).backward()  # a step that is left out
    assert not loop.end().problem
    assert len(CALLS) == AS_USUAL


def test_what_does_more_than_use_fewer_cores_is_compared_as_usual(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fewer, "frees_cores", False)
    loop.step(*loop.begin())
    assert not loop.end().problem
    assert len(CALLS) == AS_USUAL


def test_a_call_that_fails_under_it_is_compared_as_usual(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("of its own")

    monkeypatch.setattr(Fewer, "act", staticmethod(lambda call: fails))
    loop.step(*loop.begin())
    assert loop.end().problem == "RuntimeError: of its own"


def test_a_parameter_that_a_function_gives_no_gradient_breaks_no_backward_pass(loop: Loop) -> None:
    loop.model.weight = nn.Parameter(torch.ones(2))
    loop.model.forward = lambda x: OneGradient.apply(Net.forward(loop.model, x), loop.model.weight)  # type: ignore[method-assign]
    loop.step(*loop.begin())
    finding = loop.end()
    assert (finding.problem, finding.unsure) == ("", "")
    assert len(CALLS) == BY_ITSELF


def test_outputs_that_are_views_agree_as_well(loop: Loop) -> None:
    loop.model.forward = lambda x: Net.forward(loop.model, x).chunk(2, -1)  # type: ignore[method-assign]
    x, y = loop.begin()
    loop.optimizer.zero_grad()
    mean, deviation = loop.model(x)
    (mse_loss(mean, y[:, :1]) + deviation.exp().mean()).backward()
    loop.optimizer.step()
    assert not loop.end().problem
    assert len(CALLS) == BY_ITSELF


def test_a_loop_that_keeps_its_graph_or_writes_to_outputs_is_compared_as_usual(loop: Loop) -> None:
    for writes in (False, True):
        x, y = loop.begin()
        loop.optimizer.zero_grad()
        out = loop.model(x)
        mse_loss(out, y).backward(retain_graph=not writes)
        if writes:
            with torch.no_grad():
                out.zero_()
        loop.optimizer.step()
        assert not loop.end().problem
        assert len(CALLS) == AS_USUAL


def test_nothing_stays_where_accel_is_undone_within_the_step(loop: Loop) -> None:
    x, y = loop.begin()
    loss = mse_loss(loop.model(x), y)
    accel.undo(loop.model)
    assert all(p._backward_hooks is None for p in loop.model.parameters())
    loss.backward()
    loop.optimizer.step()


def test_several_ranks_and_optimizers_are_compared_as_usual(loop: Loop) -> None:
    loop.guard.steps_alone = False
    loop.step(*loop.begin())
    assert not loop.end().problem
    assert len(CALLS) == AS_USUAL

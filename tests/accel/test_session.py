"""Strategies that go wrong in a real loop: each is caught, undone and reported, and the training is unharmed."""

from __future__ import annotations

import functools
import math
import time
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.report import Report
from accel.run import Run
from accel.strategies.base import Exactness, Strategy
from accel.strategies.trial_design import TrialDesign
from tests.accel import loops
from tests.accel.loops import Longer

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Injected(Strategy):
    """A strategy whose call is the plain one with a fault."""

    name = "injected"
    summary = "a fault"
    treats = frozenset()
    exactness = Exactness.REORDERED
    calls: ClassVar[int] = 0

    def refusal(self, run: Run) -> str:
        return ""

    def trial_design(self, run: Run) -> TrialDesign:
        return TrialDesign(settle_steps=0)

    def enable(self, run: Run, setting: Any) -> None:
        run.gate.add(self.name, lambda call: lambda *args: self.faulty(call, *args))

    def disable(self, run: Run) -> None:
        run.gate.remove(self.name)

    def faulty(self, call: Any, x: Tensor) -> Any:
        return call(x)


class Faster(Injected):
    """Right, and faster than plain, because the plain call is slowed down (see `Slow`)."""

    name = "faster"

    def faulty(self, call: Any, x: Tensor) -> Any:
        Slow.on = False
        try:
            return call(x)
        finally:
            Slow.on = True


class Slow(nn.Sequential):
    """A network that waits unless told not to."""

    on: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        if Slow.on:
            (loops.clock or time).sleep(0.002)
        return super().forward(x)


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs on the machine makes no trial noisy."""
    loops.play_clock(monkeypatch.setattr)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> list[type[Strategy]]:
    kinds: list[type[Strategy]] = []
    monkeypatch.setattr(strategies, "REGISTRY", kinds)
    return kinds


def train(
    registry: list[type[Strategy]], kind: type[Strategy] | None, steps: int = 300, *, to_a_speedup: bool = False
) -> tuple[list[Tensor], list[float], Report | None]:
    """Train a small net with `kind` as the only strategy; None trains plainly.

    Args:
        to_a_speedup: go on until the report has one: on a busy machine trials take more steps.
    """
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model = Slow(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=16)
    if kind is not None:
        registry[:] = [kind]
        model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    losses: list[float] = []
    while len(losses) < steps or (to_a_speedup and accel.explain(model).speedup is None and len(losses) < 10_000):
        for batch, target in loader:
            loss = nn.functional.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    report = accel.explain(model) if kind is not None else None
    accel.undo(model)
    return [p.detach().clone() for p in model.parameters()], losses, report


@functools.cache
def plain() -> tuple[list[Tensor], list[float]]:
    """Return the weights and losses of a plain run."""
    weights, losses, _ = train([], None)
    return weights, losses


def assert_undone(registry: list[type[Strategy]], kind: type[Strategy], why: str, *, same: bool = True) -> Report:
    plain_weights, plain_losses = plain()
    weights, losses, report = train(registry, kind)
    assert report is not None
    row = report.rows[0]
    assert row.status == "undone", row
    assert why in row.why
    assert report.plan == {}
    assert all(math.isfinite(loss) for loss in losses)
    if same:
        assert all(torch.equal(a, b) for a, b in zip(plain_weights, weights, strict=True))
        assert losses == plain_losses
    return report


def test_a_gradient_scaled_by_five_percent_never_reaches_the_weights(registry: Any) -> None:
    class Scaled(Injected):
        def faulty(self, call: Any, x: Tensor) -> Any:
            return Longer.apply(call(x))

    assert_undone(registry, Scaled, "wrong: its gradient")


def test_a_dropped_bias_gradient_never_reaches_the_weights(registry: Any) -> None:
    class Dropped(Injected):
        def enable(self, run: Run, setting: Any) -> None:
            self.bias: Any = run.model[2].bias  # type: ignore[index]
            super().enable(run, setting)

        def faulty(self, call: Any, x: Tensor) -> Any:
            return call(x) - self.bias + self.bias.detach()

    assert_undone(registry, Dropped, "2.bias")


def test_a_stale_input_never_reaches_the_weights(registry: Any) -> None:
    class Stale(Injected):
        kept: Any = None

        def faulty(self, call: Any, x: Tensor) -> Any:
            self.kept = x if self.kept is None else self.kept
            return call(self.kept)

    assert_undone(registry, Stale, "wrong: its output is off")


def test_a_wrong_forward_set_on_a_module_never_reaches_the_weights(registry: Any) -> None:
    class Patched(Injected):
        def enable(self, run: Run, setting: Any) -> None:
            layer = run.model[0]  # type: ignore[index]
            layer.forward = lambda x: nn.Linear.forward(layer, x) * 0

        def disable(self, run: Run) -> None:
            del run.model[0].forward  # type: ignore[index]

    assert_undone(registry, Patched, "wrong: its output is off")


def test_a_non_finite_gradient_of_the_users_own_is_left_alone(registry: Any) -> None:
    class Harmless(Faster):
        touches = frozenset({"input"})

    registry[:] = [Harmless]
    model = Slow(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, loader, optimizer = accel.optimize(model, [torch.ones(4, 3)] * 400, optimizer, budget=60)
    for step, batch in enumerate(loader):
        (model(batch).sum() * (math.inf if step == 390 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    accel.undo(model)

    assert not all(p.isfinite().all() for p in model.parameters())  # as in the plain loop


def test_an_output_that_turns_nan_is_made_again_plainly(registry: Any) -> None:
    class Nan(Faster):
        count = 0

        def faulty(self, call: Any, x: Tensor) -> Any:
            self.count += 1
            return super().faulty(call, x) * (math.nan if self.count == 40 else 1.0)

    report = assert_undone(registry, Nan, "its output is not finite")
    assert any("faster undone" in event.text for event in report.events)


class Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.nan


class Nan(Faster):
    """From its 40th call on gradients are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def faulty(self, call: Any, x: Tensor) -> Any:
        self.count += 1
        return Poison.apply(call(x)) if self.count >= 40 else super().faulty(call, x)


def test_a_gradient_that_turns_nan_is_left_out(registry: Any) -> None:
    assert_undone(registry, Nan, "a gradient is not finite", same=False)


def test_a_gradient_that_turns_nan_in_a_closure_is_left_out(registry: Any) -> None:
    """As Lightning steps: nothing is there to be looked at before the closure has run."""
    registry[:] = [Nan]
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    model: nn.Module = Slow(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60)
    for _ in range(20):
        for batch, target in loader:

            def closure(batch: Tensor = batch, target: Tensor = target) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(batch), target)
                loss.backward()
                return loss

            optimizer.step(closure)
    report = accel.explain(model)
    assert any("that update was left out" in event.text for event in report.events)
    assert all(p.isfinite().all() for p in model.parameters())
    accel.undo(model)


def test_a_call_that_raises_is_made_again_plainly(registry: Any) -> None:
    class Raises(Faster):
        count = 0

        def faulty(self, call: Any, x: Tensor) -> Any:
            self.count += 1
            if self.count == 30:
                raise MemoryError("no room for the workspace")
            return super().faulty(call, x)

    assert_undone(registry, Raises, "it raised MemoryError: no room for the workspace")


@pytest.mark.parametrize("method", ["enable", "disable"])
def test_a_strategy_that_cannot_be_switched_is_dropped(registry: Any, method: str) -> None:
    class Stuck(Injected):
        def enable(self, run: Run, setting: Any) -> None:
            super().enable(run, setting)
            if method == "enable":
                raise OSError("no such device")

        def disable(self, run: Run) -> None:
            super().disable(run)
            if method == "disable":
                raise OSError("device is gone")

    assert_undone(registry, Stuck, f"it could not be switched {'on' if method == 'enable' else 'off'}")


def test_a_run_that_diverges_goes_back_to_plain(registry: Any) -> None:
    class Grows(Faster):
        name = "grows"
        count = 0

        def faulty(self, call: Any, x: Tensor) -> Any:
            self.count += 1
            # Fine in guard and trial; later its outputs grow without end.
            return super().faulty(call, x) * (1.0 if self.count < 200 else 1e4)

    _, _, report = train(registry, Grows, steps=600)

    assert report is not None
    assert "the run diverges" in report.rows[0].why
    assert report.plan == {}


def test_a_right_and_faster_strategy_is_kept_and_changes_nothing(registry: Any) -> None:
    weights, losses, report = train(registry, Faster, to_a_speedup=True)
    plain, plain_losses, _ = train(registry, None, len(losses))

    assert report is not None
    assert report.rows[0].status == "kept"
    assert report.speedup is not None
    assert report.speedup > 1.1
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    assert report.rows[0].gradient_error == 0


def test_when_accel_itself_fails_the_loop_goes_on_plainly(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.session.action_runner import ActionRunner

    def broken(self: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(ActionRunner, "_finish_action", broken)
    plain_weights, plain_losses = plain()
    weights, losses, report = train(registry, Faster)

    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(plain_weights, weights, strict=True))
    assert report is not None
    assert any("ZeroDivisionError: a bug" in text for text in report.unseen)

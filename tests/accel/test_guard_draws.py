"""Models that draw random numbers: another order of draws passes the guard, another distribution never does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.guard.draws import ReplayedDraws, difference
from accel.report import StrategyRow
from accel.run import Run
from accel.run.gate import Call
from accel.strategies.base import Exactness, Strategy
from accel.strategies.channels_last import ChannelsLast
from accel.strategies.trial_design import TrialDesign as Judged
from tests.accel.guard_replays import Acting

_dropout = functional.dropout


class Dropouts(nn.Sequential):
    """Two dropout layers of the same shape, behind convolutions and before a linear layer."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Dropout(0.5),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Dropout(0.5),
            nn.Dropout2d(0.2),
            nn.Flatten(),
            nn.Linear(512, 4),
        )


def judged(kind: type[Strategy], monkeypatch: pytest.MonkeyPatch, steps: int = 60, **options: Any) -> StrategyRow:
    """Train with `kind` as the only strategy, and return its row."""
    monkeypatch.setattr(strategies, "REGISTRY", [kind])
    torch.manual_seed(0)
    loader: Any = DataLoader(TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 4, (64,))), batch_size=8)
    model: nn.Module = Dropouts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60, **options)
    done = 0
    while done < steps:
        for x, target in loader:
            loss = functional.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
    (row,) = accel.explain(model).rows
    accel.undo(model)
    return row


class Injected(Acting):
    """Dropout by another function while it is on."""

    name = "injected"

    def trial_design(self, run: Run) -> Judged:
        return Judged(settle_steps=0)

    def act(self, call: Call) -> Call:  # type: ignore[override]
        def run_call(*args: Any) -> Any:
            functional.dropout = self.drop
            try:
                return call(*args)
            finally:
                functional.dropout = _dropout

        return run_call

    def drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return _dropout(x, p, training, inplace)


class Right(Injected):
    pass


class Scaled(Injected):
    def drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return _dropout(x, p, training) * 1.05


class OtherProbability(Injected):
    def drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return _dropout(x, 1.1 * p, training)


class OneMaskForAll(Injected):
    """Layers share a mask."""

    def act(self, call: Call) -> Call:  # type: ignore[override]
        def run_call(*args: Any) -> Any:
            self.mask: Tensor | None = None
            return inner(*args)

        inner = super().act(call)
        return run_call

    def drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training:
            return x
        if self.mask is None:
            self.mask = _dropout(torch.ones_like(x), p)
        return x * self.mask


class KeptMask(Injected):
    """Each layer draws once, and uses its mask in all steps to come."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []
        self.layer = 0

    def drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training:
            return x
        if len(self.masks) < 2:
            self.masks.append(_dropout(torch.ones_like(x), p))
            return x * self.masks[-1]
        self.layer = 1 - self.layer
        return x * self.masks[1 - self.layer]


class AlwaysOn(Injected):
    """Drops in evaluation too."""

    def drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return _dropout(x, p, True)


class Nothing(Injected):
    """Drops nothing."""

    def drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x


def test_the_plain_call_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not judged(Right, monkeypatch).why.startswith("wrong")


@pytest.mark.sample(3)
@pytest.mark.parametrize("exactness", [Exactness.EXACT, Exactness.REORDERED, Exactness.REDUCED], ids=lambda e: e.word)
@pytest.mark.parametrize("fault", [Scaled, OtherProbability, OneMaskForAll, KeptMask, AlwaysOn, Nothing])
def test_a_fault_of_dropout_is_caught(
    fault: type[Injected], exactness: Exactness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault, "exactness", exactness)
    row = judged(fault, monkeypatch, allow="lossy")
    assert row.status == "undone", row
    assert row.why.startswith("wrong: "), row.why


def test_what_was_drawn_otherwise_is_said() -> None:
    plain, other = ReplayedDraws(canonical=True), ReplayedDraws(canonical=True)
    x = torch.ones(3, 4)
    with plain:
        _dropout(x, 0.5)
    with other:
        _dropout(x, 0.55)
    assert difference(plain.noted, plain.noted) == ""
    assert "random draw 1 is bernoulli_" in difference(plain.noted, other.noted)
    assert difference(plain.noted, []) == "it draws random numbers 0 times, the plain path 1"


def test_channels_last_passes_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    row = judged(ChannelsLast, monkeypatch)
    assert not row.why.startswith("wrong"), row.why
    assert row.output_error is not None and row.output_error < 1e-5


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x.bernoulli_(0.3),
        lambda x: x.uniform_(1, 2),
        lambda x: x.normal_(1, 2),
        lambda x: x.exponential_(),
        torch.rand_like,
        torch.randn_like,
        lambda x: torch.bernoulli(x * 0 + 0.4),
        lambda x: torch.native_dropout(x, 0.4, True)[0],
        lambda x: functional.dropout(x, 0.4),
        lambda x: torch.rand(4) + x,
    ],
)
def test_draws_are_those_of_float32_in_canonical_order(draw: Callable[[Tensor], Tensor]) -> None:
    def drawn(x: Tensor) -> tuple[Tensor, ReplayedDraws]:
        torch.manual_seed(3)
        with ReplayedDraws(canonical=True) as draws:
            return draw(x).float(), draws

    plain, noted = drawn(torch.ones(2, 3, 5, 4))
    assert len(noted.noted) == 1
    assert not noted.other_order
    last, other = drawn(torch.ones(2, 3, 5, 4).to(memory_format=torch.channels_last))
    half, _ = drawn(torch.ones(2, 3, 5, 4, dtype=torch.bfloat16))
    assert torch.equal(plain, last)
    assert torch.allclose(plain, half, atol=0.02)
    assert other.noted == noted.noted

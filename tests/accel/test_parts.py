"""A model that is never called itself: the report says what to pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accel
from tests.accel.loops import Quick, assert_same, everything, loss_of, make_loader


class Module(nn.Module):
    """As in Lightning: the training step is a method, and what it calls is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.spare = nn.Linear(3, 3)

    def training_step(self, batch: Any) -> Tensor:
        return loss_of(self.net(batch[0]), batch[1])


class ByHand(Module):
    def training_step(self, batch: Any) -> Tensor:
        last: Any = self.net[3]
        return loss_of(torch.nn.functional.linear(batch[0][:, :3] @ self.spare.weight, last.weight[:, :3]), batch[1])


class Itself(Module):
    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any) -> Tensor:
        self.eval()  # with frozen statistics, as in fine-tuning
        return loss_of(self(batch[0]), batch[1])


def train(kind: type[Module], optimized: bool, epochs: int = 3) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    Quick.on = True
    model, loader = kind(), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if optimized:
        model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60, allow="exact")
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            model.training_step(batch).backward()
            optimizer.step()
    return model, everything(model, optimizer)


@pytest.mark.parametrize("kind", [Module, ByHand])
def test_what_to_pass_is_said(only_quick: None, kind: type[Module], capsys: pytest.CaptureFixture[str]) -> None:
    words = f"the training steps never call {kind.__name__} itself, or only within a function that is compiled; pass"
    model, weights = train(kind, True)
    row = accel.explain(model).rows[0]
    assert row.status == "not applicable"
    assert words in row.why and row.why.endswith("such as model.net")
    assert capsys.readouterr().err.count(words) >= 1
    assert_same(weights, train(kind, False)[1])


def test_a_model_that_is_called_in_eval_mode_is_called(only_quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = train(Itself, True)
    assert "never" not in capsys.readouterr().err
    assert accel.explain(model).rows[0].status != "not applicable"


def test_a_net_without_images_is_not_told_of_images() -> None:
    model, _ = train(Module, True)
    whys = {row.name: row.why for row in accel.explain(model).rows}
    assert not any("4-d" in why for why in whys.values())

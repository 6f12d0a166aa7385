"""What the strategy may not hide from the loop: what a model writes to its input, and the layout of its outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.run.gate import Gate
from accel.strategies.base import NothingHelps
from accel.strategies.channels_last import ChannelsLast


class InPlace(nn.Module):
    """An autoencoder that normalises the batch in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Any:
        x.sub_(x.mean()).div_(x.std())
        return self.layers(x)


class Learned(InPlace):
    """What it writes depends on a parameter, so that the loss has a gradient through the input."""

    def forward(self, x: Tensor) -> Any:
        return self.layers(x.mul_(self.scale))


def run_of(model: nn.Module) -> Any:
    return SimpleNamespace(gate=Gate(model, ["channels_last"]))


@pytest.mark.parametrize("kind", [InPlace, Learned])
def test_what_the_model_writes_to_its_input_reaches_the_loop(kind: type[InPlace]) -> None:
    torch.manual_seed(0)
    model, images = kind(), torch.randn(4, 3, 8, 8)
    plain, other = images.clone(), images.clone()
    nn.functional.mse_loss(model(plain), plain).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    run, strategy = run_of(model), ChannelsLast()
    strategy.enable(run, None)
    nn.functional.mse_loss(model(other), other).backward()
    strategy_failed = strategy.failure(run)
    strategy.disable(run)
    assert "writes to its input" in strategy_failed
    assert not torch.equal(other, images)
    torch.testing.assert_close(other, plain)
    for wanted, p in zip(expected, (p for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(p.grad, wanted)
    with pytest.raises(NothingHelps, match="writes to its input"):
        strategy.enable(run, None)


def test_a_model_that_only_reads_its_input_keeps_it() -> None:
    model, images = nn.Conv2d(3, 8, 3), torch.randn(4, 3, 8, 8)
    run, strategy = run_of(model), ChannelsLast()
    strategy.enable(run, None)
    before, version = images.clone(), images._version
    model(images).sum().backward()
    with torch.inference_mode():
        model(images.clone())
    assert (torch.equal(images, before), images._version, strategy.failure(run)) == (True, version, "")
    strategy.disable(run)


@pytest.mark.parametrize(
    ("name", "why"),
    [("channels_last", "the model writes to its input"), ("amp_o2", "wrong: it does not write to input 0")],
)
def test_a_run_whose_model_writes_to_its_input_has_the_plain_losses(name: str, why: str) -> None:
    images = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def losses(optimized: bool) -> list[float]:
        torch.manual_seed(0)
        model: Any = InPlace()
        loader: Any = DataLoader(TensorDataset(images), batch_size=8)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.05)
        if optimized:
            plan = accel.Plan(
                fingerprint=accel.search.plan.fingerprint(model), model="InPlace", strategies={name: None}
            )
            model, loader, optimizer = accel.optimize(model, loader, optimizer, plan=plan, enable=(name,))
        curve = []
        for _ in range(8):
            for (x,) in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), x)
                loss.backward()
                optimizer.step()
                curve.append(loss.item())
        if optimized:
            row = {row.name: row for row in accel.explain(model).rows}[name]
            assert row.status == "undone"
            assert row.why.startswith(why)
            accel.undo(model)
        return curve

    assert losses(True) == losses(False)


def test_outputs_of_a_call_with_images_in_this_order_are_handed_on_as_they_are() -> None:
    model, images = nn.Conv2d(3, 8, 3), torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    run, strategy = run_of(model), ChannelsLast()
    model(images).permute(0, 2, 3, 1).view(-1, 8)
    strategy.enable(run, None)
    model(images).permute(0, 2, 3, 1).view(-1, 8)
    model(images.contiguous()).view(4, -1)
    strategy.disable(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_this_order_is_left_as_it_is(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3)).to(dtype)
    run: Any = SimpleNamespace(
        model=model, has_module=lambda *kinds: True, observed=SimpleNamespace(conv_input=True), gate=None
    )
    assert ChannelsLast().refusal(run) == ""
    model.to(memory_format=torch.channels_last)
    assert "already" in ChannelsLast().refusal(run)

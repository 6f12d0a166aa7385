"""What the strategy may not hide from the loop: what a model writes to its arguments, and how its outputs lie."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.profiler.trees import tensors
from accel.run.context import Observed
from accel.run.gate import Gate
from accel.run.layouts import order
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
    return SimpleNamespace(model=model, gate=Gate(model, ["channels_last"]), observed=Observed())


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


class IntoTheBatch(InPlace):
    """Writes what it has normalised into the dict that it is given."""

    def forward(self, batch: Any) -> Any:
        batch["x"] = (batch["x"] - batch["x"].mean()) / batch["x"].std()
        return self.layers(batch["x"])


def losses(kind: type[InPlace], name: str = "") -> tuple[list[float], str]:
    """Train under one strategy, or none; return the losses, and why it was undone."""
    torch.manual_seed(0)
    images = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model: Any = kind()
    loader: Any = DataLoader(TensorDataset(images), batch_size=8)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.05)
    if name:
        own = accel.search.plan.fingerprint(model)
        plan = accel.Plan(fingerprint=own, model=kind.__name__, strategies={name: None})
        model, loader, optimizer = accel.optimize(model, loader, optimizer, plan=plan, enable=(name,))
    curve = []
    for _ in range(8):
        for (x,) in loader:
            batch = {"x": x}
            optimizer.zero_grad()
            outputs = model(batch if kind is IntoTheBatch else x)
            loss = nn.functional.mse_loss(outputs, batch["x"])
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    row = {row.name: row for row in accel.explain(model).rows}[name] if name else None
    accel.undo(model)
    return curve, "" if row is None else f"{row.status}: {row.why}"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("channels_last", "undone: the model writes to its input"),
        ("amp_o2", "not tried: the guard could compare nothing: the model writes to its arguments"),
    ],
)
def test_a_run_whose_model_writes_to_its_input_has_the_plain_losses(name: str, why: str) -> None:
    curve, found = losses(InPlace, name)
    assert curve == losses(InPlace)[0] and found.startswith(why)


def test_a_run_whose_model_writes_into_its_batch_has_the_plain_losses() -> None:
    curve, found = losses(IntoTheBatch, "channels_last")
    assert "it puts other" not in found
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(losses(IntoTheBatch)[0]), rtol=1e-3, atol=0)


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


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, 2, 1), nn.LeakyReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.LeakyReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 4 * 4, 1))


@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_of_inputs_have_the_layout_of_plain_ones(is_leaf: bool) -> None:
    """As in WGAN-GP, which goes backward through them."""
    model, real = critic(), torch.randn(2, 3, 16, 16).requires_grad_()

    def penalty() -> list[Tensor]:
        images = real.detach().requires_grad_() if is_leaf else real / 2
        model.zero_grad()
        (gradient,) = torch.autograd.grad(model(images).sum(), images, create_graph=True)
        size = gradient.view(len(gradient), -1).norm(dim=1)
        size.square().mean().backward()
        return [size.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = penalty()
    run, strategy = run_of(model), ChannelsLast()
    strategy.enable(run, None)
    actual = penalty()
    strategy.disable(run)
    for wanted, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, wanted)


class Shaped(nn.Module):
    """Returns features in another shape."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.layer, self.shape = nn.Conv2d(3, 8, 3, padding=1), shape

    def forward(self, x: Tensor) -> Any:
        return self.shape(self.layer(x))


SHAPES = {
    "as they are": lambda h: h,
    "tokens": lambda h: h.flatten(2).transpose(1, 2),
    "flat": lambda h: h.flatten(2),
    "anchors": lambda h: h.view(len(h), 2, 4, *h.shape[2:]),
    "channels at the end": lambda h: h.permute(0, 2, 3, 1),
    "mean of rows": lambda h: h.mean(2),
    "mean of rows of all": lambda h: h.mean((0, 2)),
    "similarities": lambda h: {"a": h.flatten(1) @ h.flatten(1).t(), "b": (h.flatten(1) @ h.flatten(1).t()).t()},
    "part": lambda h: h[:, :5],
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("is_evaluation", [False, True])
def test_outputs_of_any_shape_have_the_layout_of_plain_ones(name: str, is_evaluation: bool) -> None:
    model, images = Shaped(SHAPES[name]), torch.randn(2, 3, 6, 4)
    run, strategy = run_of(model), ChannelsLast()
    with torch.set_grad_enabled(not is_evaluation):
        expected = model(images)
        run.observed.note_outputs(expected)
        strategy.enable(run, None)
        actual = model(images)
        strategy.disable(run)
    for wanted, got in zip(tensors(expected), tensors(actual), strict=True):
        torch.testing.assert_close(got, wanted)
        assert order(got) == order(wanted)
        assert got.is_contiguous() or not wanted.is_contiguous()


def test_without_a_plain_call_outputs_are_laid_out_in_the_order_of_their_dimensions() -> None:
    model, strategy = Shaped(SHAPES["flat"]), ChannelsLast()
    run = run_of(model)
    strategy.enable(run, None)
    assert model(torch.randn(2, 3, 6, 4)).is_contiguous()
    strategy.disable(run)


def test_a_model_with_a_hook_of_the_loops_is_left_alone() -> None:
    """What the hook takes out would be in another layout."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(3, 8, 3)), nn.ReLU())
    run, strategy = run_of(model), ChannelsLast()
    run.has_module = lambda *kinds: True
    run.observed.conv_input = True
    assert strategy.refusal(run) == strategy.failure(run) == ""
    handle = model[1].register_forward_hook(lambda module, args, output: None)
    assert "hook" in strategy.refusal(run)
    assert "hook" in strategy.failure(run)
    handle.remove()
    assert strategy.refusal(run) == ""


@pytest.mark.parametrize("wrapped", [lambda image: {"image": image}, lambda image: [image], lambda image: (image,)])
def test_a_call_with_a_container_of_tensors_is_left_as_it_is(wrapped: Callable[[Tensor], Any]) -> None:
    class Holds(nn.Module):
        def forward(self, batch: Any) -> Any:
            (image,) = batch.values() if isinstance(batch, dict) else batch
            assert image.is_contiguous()
            return batch

    batch, run, strategy = wrapped(torch.randn(2, 3, 6, 4)), run_of(Holds()), ChannelsLast()
    strategy.enable(run, None)
    assert run.model(batch) is batch
    assert "container" in strategy.failure(run)
    strategy.disable(run)
    with pytest.raises(NothingHelps, match="container"):
        strategy.enable(run, None)


def test_an_image_that_is_passed_on_is_the_loops_own() -> None:
    class Passes(nn.Module):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Any:
            assert x is z
            return x, y

    image, other = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 4)
    run, strategy = run_of(Passes()), ChannelsLast()
    strategy.enable(run, None)
    first, second = run.model(image, other, z=image)
    strategy.disable(run)
    assert first is image and second is other


class TwoWays(nn.Module):
    """Returns features with their channels at the end, if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor, is_last: bool) -> Tensor:
        return self.layer(x).permute(0, 2, 3, 1) if is_last else self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kinds", [(True, False), (False, True)])
def test_outputs_of_two_kinds_of_calls_have_each_their_own_layout(kinds: tuple[bool, bool]) -> None:
    """That of the last one seen is not that of the call in hand."""
    model, images, strategy = TwoWays(), torch.randn(2, 3, 6, 4), ChannelsLast()
    run = run_of(model)
    expected = [model(images, is_last) for is_last in kinds]
    for outputs in expected:
        run.observed.note_outputs(outputs)
    strategy.enable(run, None)
    actual = [model(images, is_last) for is_last in kinds]
    strategy.disable(run)
    assert list(map(order, actual)) == list(map(order, expected))


def test_only_so_many_kinds_of_outputs_are_remembered() -> None:
    run = run_of(TwoWays())
    for rows in range(1, 100):
        run.observed.note_outputs(torch.ones(2, rows))
    assert len(run.observed.output_orders) <= 64
    assert run.observed.orders_of([torch.ones(2, 99)]) == ((0, 1),)
    assert run.observed.orders_of([torch.ones(3, 3)]) == ((0, 1),)  # as of the latest

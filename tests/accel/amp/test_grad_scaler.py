"""torch.amp.GradScaler with a decorated optimizer: what is unscaled, and how often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.amp import decorate, master_params
from accel.errors import InvalidArgument
from tests.accel.amp.amp_models import OPTIMIZERS, batches, by_hand, cnn, loss_of, mlp

NAMES = ["SGD", "AdamW fused", "FusedSGD"]


def scaled_backward(model: nn.Module, scaler: torch.amp.GradScaler, batch: tuple[Tensor, Tensor]) -> None:
    scaler.scale(loss_of(model(batch[0]), batch[1])).backward()


@pytest.mark.parametrize("has_scaler", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_float32_are_unscaled_once(name: str, has_scaler: bool) -> None:
    """Those of batch normalisation are, in place, where masters are asked for; once again where one is replaced."""
    model: Any = cnn()
    decorate(
        model,
        optimizer := OPTIMIZERS[name](model.parameters()),
        dtype=torch.float16,
        loss_scale=None if has_scaler else 256.0,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=has_scaler)
    (batch,) = batches(1, 3, 8, 8)
    scaled_backward(model, scaler, batch)
    masters = master_params(optimizer, scaler)
    nn.utils.clip_grad_norm_(masters, 0.01)
    expected = [None if m.grad is None else m.grad.clone() for m in masters]
    model[0].weight.grad = None
    again = master_params(optimizer, scaler)
    assert again[0].grad is None
    for own, gradient in zip(again[1:], expected[1:], strict=True):
        assert gradient is not None and own.grad is not None
        assert torch.equal(own.grad, gradient)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("name", NAMES)
def test_masters_that_were_asked_for_without_the_scaler_are_refused(name: str) -> None:
    """Their gradients are still scaled; the step once took them as they were."""
    model: Any = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    decorate(model, optimizer, dtype=torch.float16, loss_scale=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = [p.detach().clone() for p in model.parameters()]
    data = batches(2, 8)
    scaled_backward(model, scaler, data[0])
    master_params(optimizer)
    with pytest.raises(InvalidArgument, match=r"must be given the scaler.*master_params\(optimizer, scaler\)"):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    scaler.update()
    optimizer.zero_grad()
    scaled_backward(model, scaler, data[1])
    master_params(optimizer, scaler)
    scaler.step(optimizer)
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_scaler_that_was_one_too_many_leaves_nothing_behind() -> None:
    model: Any = mlp()
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    (batch,) = batches(1, 8)
    scaled_backward(model, scaler, batch)
    with pytest.raises(InvalidArgument, match="one loss scale is enough"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", ["SGD", "FusedSGD", "FusedAdamW"])
def test_it_steps_at_o3(name: str, clips: bool) -> None:
    """torch's own scaler refuses float16 gradients."""
    model: Any = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    decorate(model, optimizer, level="O3", dtype=torch.float16, loss_scale=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    data = batches(4, 8)
    for batch in data:
        optimizer.zero_grad()
        scaled_backward(model, scaler, batch)
        if clips:
            nn.utils.clip_grad_norm_(master_params(optimizer, scaler), 0.1)
        scaler.step(optimizer)
        scaler.update()
    expected = by_hand(mlp(), OPTIMIZERS[name], data, torch.float16, 256.0, clip=0.1 if clips else None)
    for own, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(own.float(), other, rtol=2e-2, atol=2e-2)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(loss_of(model(data[0][0]), data[0][1]) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128.0
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("clears_first", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_step_that_was_left_out_are_not_taken_for_unscaled(
    name: str, set_to_none: bool, clears_first: bool
) -> None:
    """At O3 there are no masters whose gradients would tell; cleared in place, they are the same tensors."""
    model: Any = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    decorate(model, optimizer, level="O3", dtype=torch.float16, loss_scale=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    data = batches(2, 8)
    scaled_backward(model, scaler, data[0])
    master_params(optimizer, scaler)
    if clears_first:
        optimizer.zero_grad(set_to_none=set_to_none)
    loss = scaler.scale(loss_of(model(data[1][0]), data[1][1]))
    if not clears_first:
        optimizer.zero_grad(set_to_none=set_to_none)
    loss.backward()
    expected = [p.grad.float() / 256 for p in model.parameters()]
    for own, gradient in zip(master_params(optimizer, scaler), expected, strict=True):
        torch.testing.assert_close(own.grad.float(), gradient, rtol=1e-3, atol=1e-6)  # type: ignore[union-attr]

"""Mixed precision: loss scales are taken out of the gradients, 16-bit weights have float32 norms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel import amp, optim
from accel.goodput.noise_scale import NoiseSums
from tests.accel.goodput.noise_loops import Kept, meter_for, train, with_meter


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))


def batches() -> Callable[[int], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 12, generator=generator)
        return x, x[:, :5].argmax(1)

    return batch


def plain_sums(steps: int, accumulation: int = 1, **options: Any) -> list[NoiseSums]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    noise = Kept()
    meter = meter_for(model, optimizer, noise=noise, **options)
    for _ in train(meter, model, optimizer, batches(), F.cross_entropy, steps=steps, accumulation=accumulation):
        pass
    return noise.all


def agree(sums: list[NoiseSums], expected: list[NoiseSums], rel: float) -> None:
    assert len(sums) == len(expected) > 3
    for column in ("mean_square", "part_square"):
        ratio = sum(getattr(each, column) for each in sums) / sum(getattr(each, column) for each in expected)
        assert ratio == pytest.approx(1, rel=rel)
    assert sums[0].samples == expected[0].samples


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_o2_has_the_noise_of_the_plain_model(dtype: torch.dtype, clips: bool, accumulation: int) -> None:
    """Clipping by `master_params` has moved the gradients to the masters before the replay."""
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.0)
    scale = amp.DynamicLossScale(init_scale=1024.0, growth_interval=3) if dtype == torch.float16 else None
    model, optimizer = amp.decorate(model, optimizer, dtype=dtype, loss_scale=scale)
    noise = Kept()
    meter = meter_for(model, optimizer, noise=noise)

    def between() -> None:
        if clips:
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)

    for _ in train(
        meter, model, optimizer, batches(), F.cross_entropy, steps=20, accumulation=accumulation, between=between
    ):
        assert not meter.reason
    agree(noise.all, plain_sums(20, accumulation), rel=0.05)
    if scale is not None:
        scale.settle()
        assert float(scale.value) == 1024.0 * 2**6  # every three of 20 steps, as without a meter


def test_o2_learns_the_same_with_and_without_a_meter() -> None:
    weights = []
    for metered in (False, True):
        model = net()
        optimizer: Any = optim.FusedAdamW(model.parameters(), 0.01)
        scale = amp.DynamicLossScale(init_scale=2.0**15, growth_interval=4)
        model, optimizer = amp.decorate(model, optimizer, dtype=torch.float16, loss_scale=scale)
        meter = meter_for(model, optimizer)
        if not metered:
            meter.close()

        def loss(output: Tensor, y: Tensor) -> Tensor:
            return 30 * F.cross_entropy(output, y)  # overflows now and then

        for _ in train(meter, model, optimizer, batches(), loss, steps=40):
            pass
        assert (meter.noise.measured > 3) == metered
        weights.append([*model.state_dict().values(), scale.value.clone()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_fused_adam_at_o2_is_measured_in_its_coordinates() -> None:
    model = net()
    optimizer: Any = optim.FusedAdamW(model.parameters(), 1e-6)
    model, optimizer = amp.decorate(model, optimizer, dtype=torch.bfloat16)
    noise, plain = Kept(), Kept()
    meter = meter_for(model, optimizer, noise=noise)
    for _ in train(meter, model, optimizer, batches(), F.cross_entropy, steps=20):
        pass
    other = net()
    adam = torch.optim.AdamW(other.parameters(), 1e-6)
    for _ in train(meter_for(other, adam, noise=plain), other, adam, batches(), F.cross_entropy, steps=20):
        pass
    agree(noise.all, plain.all, rel=0.15)
    assert noise.all[0].mean_square > 10 * plain_sums(20)[0].mean_square  # preconditioned


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("unscales", [False, True])
def test_grad_scaler_is_taken_out(unscales: bool, accumulation: int) -> None:
    """The scale doubles every three steps, and the gradients that are measured stay as they are."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    noise = Kept()
    meter = meter_for(model, optimizer, noise=noise, scaler=scaler)
    optimizer.register_step_pre_hook(lambda own, args, kwargs: meter.before_update(own))

    def update() -> None:
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()

    def backward(loss: Tensor) -> None:
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    how: dict[str, Any] = {"accumulation": accumulation, "backward": backward, "update": update}
    for _ in train(meter, model, optimizer, batches(), F.cross_entropy, steps=20, **how):
        assert not meter.reason
    assert scaler.get_scale() > 2.0**14
    agree(noise.all, plain_sums(20, accumulation), rel=1e-4)


def test_step_that_a_grad_scaler_leaves_out_says_nothing() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    noise = Kept()
    meter = meter_for(model, optimizer, noise=noise, scaler=scaler)
    optimizer.register_step_pre_hook(lambda own, args, kwargs: meter.before_update(own))
    made = itertools.count()

    def backward(loss: Tensor) -> None:
        scaler.scale(loss * (math.inf if 8 < next(made) < 30 else 1)).backward()  # type: ignore[no-untyped-call]

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()

    how: dict[str, Any] = {"backward": backward, "update": update}
    for _ in train(meter, model, optimizer, batches(), F.cross_entropy, steps=60, **how):
        assert not any(p._backward_hooks for p in model.parameters())
    assert not meter.refusal
    assert noise.measured > 5


def test_autocast_of_the_loop_is_replayed() -> None:
    dtypes: list[torch.dtype] = []
    model = net()

    class Noted(type(model)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = super().forward(x)
            dtypes.append(output.dtype)
            return output

    model.__class__ = Noted
    optimizer, noise, meter = with_meter(model)
    around = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    for _ in train(
        meter, model, optimizer, batches(), lambda out, y: F.cross_entropy(out.float(), y), steps=20, around=around
    ):
        assert not meter.reason
    assert set(dtypes) == {torch.bfloat16}
    assert len(dtypes) > 20
    agree(noise.all, plain_sums(20), rel=0.05)


def test_weights_of_16_bits_have_float32_norms() -> None:
    """In float16 the squares of these gradients would be 0."""
    model = nn.Linear(400, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    noise = Kept()
    generator = torch.Generator().manual_seed(0)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return (1e-3 * torch.randn(16, 400, generator=generator)).half(), torch.zeros(16, dtype=torch.long)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return output.float().mean()

    for _ in train(meter_for(model, optimizer, noise=noise), model, optimizer, batch, loss, steps=20):
        pass
    assert len(noise.all) > 3
    variance = sum(each.variance for each in noise.all) / len(noise.all)
    assert variance == pytest.approx(400 * 1e-6, rel=0.15)

"""Weights that others write between steps at O2, steps that a loop skips, and masters of another time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.amp import DynamicLossScale, decorate, master_params, undecorate
from accel.errors import InvalidArgument
from accel.graphs import capture
from tests.accel.amp.amp_models import OPTIMIZERS, batches, loss_of, mlp
from tests.accel.graphs.tape import TapeRecorder


def step(model: nn.Module, optimizer: Any, x: Tensor, target: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x), target).backward()
    optimizer.step()


def made(name: str = "SGD", dtype: torch.dtype = torch.bfloat16, scale: Any = "dynamic", seed: int = 0) -> Any:
    model = mlp(seed)
    return decorate(model, OPTIMIZERS[name](model.parameters()), dtype=dtype, loss_scale=scale)


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.clamp_(-0.0625, 0.0625)


@pytest.mark.parametrize("name", ["SGD", "AdamW fused", "FusedSGD", "FusedAdamW"])
def test_weights_that_are_clamped_between_steps_stay_so(name: str) -> None:
    """As those of the critic of a Wasserstein GAN; the step once wrote its own master weights over them."""
    model, optimizer = made(name)
    data = batches(3, 8)
    step(model, optimizer, *data[0])
    fine = [m.clone() for m in master_params(optimizer)]
    clamp(model)
    state = model.state_dict()
    for value, p, before in zip(state.values(), model.parameters(), fine, strict=True):
        inside = p.abs() < 0.0625
        assert torch.equal(value.bfloat16(), p)
        assert torch.equal(value[inside], before[inside])  # bits that 16 have no room for
    optimizer.zero_grad()
    loss_of(model(data[1][0]), data[1][1]).backward()
    for p in model.parameters():
        p.grad.zero_()  # type: ignore[union-attr]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert all(float(p.detach().abs().max()) <= 0.0625 for p in model.parameters())
    assert all(float(m.abs().max()) <= 0.0628 for m in master_params(optimizer))


def test_what_was_written_is_there_after_mixed_precision() -> None:
    model, _optimizer = made()
    clamp(model)
    undecorate(model)
    assert all(float(p.detach().abs().max()) <= 0.0628 for p in model.parameters())


@pytest.mark.parametrize("name", ["SGD", "FusedSGD"])
def test_what_is_written_after_clipping_is_taken_over(name: str) -> None:
    model, optimizer = made(name)
    (x, target), *_ = batches(1, 8)
    loss_of(model(x), target).backward()
    nn.utils.clip_grad_norm_(master_params(optimizer), 1e-6)
    clamp(model)
    optimizer.step()
    assert all(float(p.detach().abs().max()) <= 0.0628 for p in model.parameters())


@pytest.mark.parametrize("name", ["SGD", "FusedSGD"])
def test_a_captured_step_takes_over_what_was_written(name: str) -> None:
    def outcome(captured: bool) -> list[Tensor]:
        model, optimizer = made(name)

        def whole(x: Tensor, target: Tensor) -> None:
            step(model, optimizer, x, target)

        run: Any = whole
        if captured:
            run = capture(whole, modules=[model], optimizers=[optimizer], warmup=2)
            run._recorder = TapeRecorder()
        for number, (x, target) in enumerate(batches(9, 8)):
            if number >= 6:  # when the step was captured nobody wrote
                clamp(model)
            run(x, target)
        clamp(model)
        assert not captured or run.replays >= 4
        return [*model.state_dict().values()]

    found, expected = outcome(True), outcome(False)
    assert all(map(torch.equal, found, expected))
    assert all(float(value.abs().max()) < 0.0628 for value in found)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["SGD", "AdamW fused", "FusedAdamW"])
def test_a_loop_may_skip_a_step_after_it_has_clipped(name: str, set_to_none: bool) -> None:
    scale = DynamicLossScale(initial=64.0)
    model, optimizer = made(name, torch.float16, scale)
    done = 0
    for number, (x, target) in enumerate(batches(7, 8)):
        loss = loss_of(model(x), target)
        (loss * torch.inf if number in (2, 3, 4) else loss).backward()
        norm = nn.utils.clip_grad_norm_(master_params(optimizer), 1.0)
        if not norm.isfinite():
            optimizer.zero_grad(set_to_none=set_to_none)
            continue
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        done += 1
    assert done == 4
    assert scale.state_dict()["scale"] == 8.0  # the steps that the loop skipped for it count as overflows
    loss_of(model(x), target).backward()
    master_params(optimizer)
    with pytest.raises(InvalidArgument, match="after the last backward pass"):
        loss_of(model(x), target).backward()


def test_a_gradient_that_comes_in_the_place_of_another_is_a_new_one() -> None:
    """Its address may be that of the one before; master weights once kept their gradients from a skipped step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.bfloat16)
    for x, target in batches(8, 8):
        loss_of(model(x), target).backward()
        (master,) = master_params(optimizer)
        assert torch.equal(master.grad, model.weight.grad.float())  # type: ignore[arg-type, union-attr]
        optimizer.zero_grad()


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("level", ["O0", None])
def test_masters_of_another_time_do_not_come_back(level: str | None, model_first: bool) -> None:
    """A run at O2 goes on in float32, where torch.optim keeps master weights that nobody updates, and at O2 again."""
    data = batches(6, 8)
    model, optimizer = made("Adam")
    step(model, optimizer, *data[0])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    plain: Any = mlp()
    second = OPTIMIZERS["Adam"](plain.parameters())
    if level is not None:
        decorate(plain, second, level=level)
    plain.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    assert any("master" in own for own in second.state.values()) == (level is None)
    for x, target in data[1:4]:
        step(plain, second, x, target)
    saved = copy.deepcopy((plain.state_dict(), second.state_dict()))
    again, third = made("Adam", seed=1)
    parts: list[Any] = [(again, saved[0]), (third, saved[1])]
    for what, state in parts if model_first else reversed(parts):
        what.load_state_dict(state)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in saved[0].items())
    step(again, third, *data[4])
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(again.parameters(), master_params(third), strict=True))


@pytest.mark.parametrize("name", ["Adam", "FusedAdamW"])
def test_masters_of_a_state_fit_weights_that_are_put_there_afterwards(name: str) -> None:
    """Going back to an earlier moment: the state first, then the 16-bit weights, tensor by tensor."""
    model, optimizer = made(name)
    data = batches(6, 8)
    for x, target in data[:2]:
        step(model, optimizer, x, target)
    kept = copy.deepcopy(([p.detach() for p in model.parameters()], optimizer.state_dict()))
    outcomes = []
    for _ in range(2):
        for x, target in data[2:]:
            step(model, optimizer, x, target)
        outcomes.append([m.clone() for m in master_params(optimizer)])
        optimizer.load_state_dict(copy.deepcopy(kept[1]))
        with torch.no_grad():
            for p, value in zip(model.parameters(), kept[0], strict=True):
                p.copy_(value)
    assert all(map(torch.equal, *outcomes))

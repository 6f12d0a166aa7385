"""A decorated optimizer's step: masters, loss scale, skipped steps, against the same written out by hand."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accel
from accel.amp import DynamicLossScale, decorate, master_params
from accel.errors import InvalidArgument
from tests.accel.amp.amp_models import OPTIMIZERS, batches, by_hand, cnn, loss_of, mlp

HALVES = (torch.float16, torch.bfloat16)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(x), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("make", "shape"), [(mlp, (8,)), (cnn, (3, 8, 8))])
def test_masters_are_what_they_are_by_hand(
    make: Callable[[], nn.Module], shape: tuple[int, ...], name: str, dtype: torch.dtype
) -> None:
    data = batches(8, *shape)
    expected = by_hand(make(), OPTIMIZERS[name], data, dtype, 1024.0)

    model = make()
    model, optimizer = decorate(model, OPTIMIZERS[name](model.parameters()), dtype=dtype, loss_scale=1024.0)
    for x, target in data:
        step(model, optimizer, x, target)

    masters = master_params(optimizer)
    assert {m.dtype for m in masters} == {torch.float32}
    assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(model.parameters(), masters, strict=True))
    for own, other in zip(masters, expected, strict=True):
        if name.startswith("Fused"):
            torch.testing.assert_close(own, other, rtol=2e-5, atol=2e-6)
        else:
            assert torch.equal(own, other)


@pytest.mark.parametrize("name", ["SGD", "AdamW fused", "FusedAdamW"])
def test_a_loss_scale_of_a_power_of_two_changes_no_bit_of_bfloat16(name: str) -> None:
    results = []
    for scale in (None, 256.0):
        model = mlp()
        model, optimizer = decorate(model, OPTIMIZERS[name](model.parameters()), dtype=torch.bfloat16, loss_scale=scale)
        for x, target in batches(5, 8):
            step(model, optimizer, x, target)
        results.append([m.clone() for m in master_params(optimizer)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_overflows_changes_nothing_and_halves_the_scale(name: str) -> None:
    model, scale = mlp(), DynamicLossScale(initial=2.0**10)
    model, optimizer = decorate(model, OPTIMIZERS[name](model.parameters()), dtype=torch.float16, loss_scale=scale)
    data = batches(6, 8)
    for x, target in data[:2]:
        step(model, optimizer, x, target)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    optimizer.zero_grad()
    (loss_of(model(data[2][0]), data[2][1]) * torch.inf).backward()
    optimizer.step()
    after = (model.state_dict(), optimizer.state_dict()["state"])
    assert scale.state_dict()["scale"] == 2.0**9  # its value halves when the next backward pass begins
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    for key, own in before[1].items():
        for entry, value in own.items():
            same = (
                torch.equal(value, after[1][key][entry]) if isinstance(value, Tensor) else value == after[1][key][entry]
            )
            assert same, (key, entry)
    losses = [step(model, optimizer, x, target) for x, target in data[3:]]
    assert all(map(torch.isfinite, losses))
    assert optimizer.state_dict()["loss_scale"]["scale"] == 2.0**9


@pytest.mark.parametrize("name", ["SGD", "FusedSGD"])
def test_the_scale_grows_after_good_steps(name: str) -> None:
    model, scale = mlp(), DynamicLossScale(initial=8.0, interval=3, most=16.0)
    model, optimizer = decorate(model, OPTIMIZERS[name](model.parameters()), dtype=torch.float16, loss_scale=scale)
    seen = []
    for x, target in batches(8, 8):
        step(model, optimizer, x, target)
        scale.settle()
        seen.append(float(scale.value))
    assert seen == [8.0, 8.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW fused", "FusedAdamW"])
@pytest.mark.parametrize(("make", "shape"), [(mlp, (8,)), (cnn, (3, 8, 8))])
def test_gradients_are_clipped_on_the_masters(make: Callable[[], nn.Module], shape: tuple[int, ...], name: str) -> None:
    data = batches(5, *shape)
    expected = by_hand(make(), OPTIMIZERS[name], data, torch.float16, 512.0, clip=0.1)
    model = make()
    model, optimizer = decorate(model, OPTIMIZERS[name](model.parameters()), dtype=torch.float16, loss_scale=512.0)
    for x, target in data:
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        norm = nn.utils.clip_grad_norm_(master_params(optimizer), 0.1)
        assert 0.1 < norm < 10
        optimizer.step()
    for own, other in zip(master_params(optimizer), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["SGD", "FusedSGD"])
def test_clipping_scaled_gradients_is_refused(name: str) -> None:
    model = mlp()
    model, optimizer = decorate(model, OPTIMIZERS[name](model.parameters()), dtype=torch.float16, loss_scale=512.0)
    (x, target), *_ = batches(1, 8)
    loss_of(model(x), target).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InvalidArgument, match=r"must not be changed while they are scaled, by 512 now.*master_params"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW fused", "FusedSGD", "FusedAdamW"])
@pytest.mark.parametrize("clips", [False, True])
def test_the_native_grad_scaler_needs_no_change(name: str, clips: bool) -> None:
    data = batches(6, 8)
    expected = by_hand(mlp(), OPTIMIZERS[name], data, torch.float16, 256.0, clip=0.1 if clips else None)
    model = mlp()
    model, optimizer = decorate(model, OPTIMIZERS[name](model.parameters()), dtype=torch.float16, loss_scale=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10**6)
    for x, target in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model(x), target)
        scaler.scale(loss).backward()
        if clips:
            nn.utils.clip_grad_norm_(master_params(optimizer, scaler), 0.1)
        scaler.step(optimizer)
        scaler.update()
    for own, other in zip(master_params(optimizer), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=5e-4, atol=5e-5)
    before = [m.clone() for m in master_params(optimizer)]
    optimizer.zero_grad()
    scaler.scale(loss_of(model(data[0][0]), data[0][1]) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128.0
    assert all(map(torch.equal, before, master_params(optimizer)))


def test_a_scale_that_the_loop_has_set_itself_stays() -> None:
    model = mlp()
    model, optimizer = decorate(model, OPTIMIZERS["FusedSGD"](model.parameters()), dtype=torch.float16, loss_scale=None)
    optimizer.grad_scale = torch.tensor(64.0)
    for x, target in batches(2, 8):
        optimizer.zero_grad()
        (loss_of(model(x), target) * 64).backward()
        optimizer.step()
        assert float(optimizer.grad_scale) == 64.0


def test_two_scales_are_one_too_many() -> None:
    model = mlp()
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    (x, target), *_ = batches(1, 8)
    scaler.scale(loss_of(model(x), target)).backward()
    with pytest.raises(InvalidArgument, match="one loss scale is enough"):
        scaler.step(optimizer)


def test_gradients_accumulate_over_backward_passes() -> None:
    data = batches(4, 8)
    results = []
    for parts in (1, 2):
        model = mlp()
        model, optimizer = decorate(
            model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.bfloat16, loss_scale=64.0
        )
        for x, target in data:
            optimizer.zero_grad()
            for part in range(parts):
                rows = slice(part * 6 // parts, (part + 1) * 6 // parts)
                (loss_of(model(x[rows]), target[rows]) / parts).backward()
            optimizer.step()
        results.append([m.clone() for m in master_params(optimizer)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=3e-3)


def _two_passes(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model(x).square().mean().backward()
    model(y).abs().mean().backward()


def _two_losses_of_one_output(model: nn.Module, x: Tensor, y: Tensor) -> None:
    output = model(x)
    output.square().mean().backward(retain_graph=True)
    output.abs().mean().backward()


def _two_roots(model: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.autograd.backward([model(x).square().mean(), model(y).abs().mean()])


def _by_hand(model: nn.Module, x: Tensor, y: Tensor) -> None:
    gradients = torch.autograd.grad(model(x).square().mean() + model(y).abs().mean(), list(model.parameters()))
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient


@pytest.mark.parametrize("losses", [_two_passes, _two_losses_of_one_output, _two_roots, _by_hand])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["SGD", "AdamW fused", "FusedSGD"])
def test_several_losses_and_gradients_by_hand_train_as_in_float32(name: str, dtype: torch.dtype, losses: Any) -> None:
    """Gradients that a loop takes by autograd.grad once left the masters as they were, without a word."""
    plain, model = mlp(), mlp()
    first = plain[0].weight.detach().clone()
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (plain, model)]
    decorate(model, optimizers[1], dtype=dtype)
    for (x, _), (y, _) in zip(batches(5, 8), batches(10, 8)[5:], strict=True):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            losses(each, x, y)
            optimizer.step()
    there = plain[0].weight.detach()
    moved, off = float((there - first).norm()), float((there - master_params(optimizers[1])[0]).norm())
    # Adam moves by the sign of small gradients, which bfloat16 does not know.
    assert off < (0.02 if dtype == torch.float16 else 0.4) * moved


def test_a_penalty_on_weights_in_the_loss_is_refused() -> None:
    model = mlp()
    model, _optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16)
    (x, target), *_ = batches(1, 8)
    penalty = sum(p.float().square().sum() for p in model.parameters())
    with pytest.raises(InvalidArgument, match="must get their gradients through its output"):
        (loss_of(model(x), target) + 0.01 * penalty).backward()


def test_a_part_of_the_model_that_is_called_by_itself_is_refused() -> None:
    model = mlp()
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16)
    (x, target), *_ = batches(1, 8)
    loss_of(model[2](model[1](model[0](x.half()))).float(), target).backward()
    with pytest.raises(InvalidArgument, match="must come through the output of the decorated model"):
        optimizer.step()


def test_a_model_that_is_fed_with_its_output_has_its_gradients_scaled_once() -> None:
    grads = []
    for scale in (None, 2.0**7):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        model, optimizer = decorate(
            model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.bfloat16, loss_scale=scale
        )
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
        model(model(x)).square().sum().backward()
        grads.append([m.grad.clone() for m in master_params(optimizer)] + [x.grad])  # type: ignore[union-attr]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("name", ["SGD", "FusedSGD"])
def test_a_gan_s_two_models_and_optimizers_train_as_without_a_scale(name: str) -> None:
    results = []
    for scale in (None, 32.0):
        torch.manual_seed(0)
        make, critic = nn.Linear(4, 8), nn.Linear(8, 1)
        (make, critic), (first, second) = decorate(
            [make, critic],
            [OPTIMIZERS[name](make.parameters()), OPTIMIZERS[name](critic.parameters())],
            dtype=torch.bfloat16,
            loss_scale=scale,
        )
        for x, _ in batches(4, 8):
            noise = x[:, :4]
            second.zero_grad()
            (critic(make(noise).detach()).mean() - critic(x).mean()).backward()
            second.step()
            first.zero_grad()
            (-critic(make(noise)).mean()).backward()
            first.step()
        results.append([m.clone() for each in (first, second) for m in master_params(each)])
    assert all(map(torch.equal, *results))


def test_schedulers_and_zero_grad_work_as_ever() -> None:
    model = mlp()
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, target in batches(3, 8):
            step(model, optimizer, x, target)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())  # type: ignore[union-attr]


def gradients_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(x), target)
    loss.backward()
    return loss


@pytest.mark.parametrize("name", ["SGD", "AdamW fused", "RMSprop", "FusedAdamW"])
def test_a_closure_without_a_scale_is_as_none(name: str) -> None:
    results = []
    for has_closure in (False, True):
        model = mlp()
        model, optimizer = decorate(model, OPTIMIZERS[name](model.parameters()), dtype=torch.bfloat16)
        losses = []
        for x, target in batches(6, 8):
            closure = partial(gradients_of, model, optimizer, x, target)
            if has_closure:
                losses.append(optimizer.step(closure).detach())
            else:
                losses.append(closure().detach())
                optimizer.step()
        results.append([*losses, *(m.detach().clone() for m in master_params(optimizer))])
    assert all(map(torch.equal, *results))


def test_a_closure_of_scaled_gradients_is_refused() -> None:
    model = mlp()
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16)
    with pytest.raises(InvalidArgument, match="takes no closure where its gradients are scaled"):
        optimizer.step(lambda: torch.tensor(0.0))


def test_lbfgs_has_no_masters() -> None:
    model = mlp()
    with pytest.raises(InvalidArgument, match=r"LBFGS can't have master weights.* Use O1"):
        decorate(model, torch.optim.LBFGS(model.parameters()), dtype=torch.bfloat16)
    assert model[0].weight.dtype == torch.float32


def test_masters_are_asked_for_after_the_last_backward_pass() -> None:
    model = mlp()
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16)
    (x, target), *_ = batches(1, 8)
    loss_of(model(x), target).backward()
    master_params(optimizer)
    with pytest.raises(InvalidArgument, match="after the last backward pass"):
        loss_of(model(x), target).backward()


def test_parameters_added_later_get_masters_too() -> None:
    model = mlp()
    optimizer: Any = torch.optim.SGD(model[0].parameters(), 0.1)
    model, optimizer = decorate(model, optimizer, dtype=torch.bfloat16)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    for x, target in batches(2, 8):
        step(model, optimizer, x, target)
    assert all(m.dtype == torch.float32 for m in master_params(optimizer))


def test_an_optimizer_that_is_not_decorated_has_its_parameters() -> None:
    model = mlp()
    params = list(model.parameters())
    assert all(a is b for a, b in zip(master_params(torch.optim.SGD(params, 0.1)), params, strict=True))


@pytest.mark.parametrize("name", ["AdamW fused", "FusedAdamW", "FusedSGD"])
def test_nothing_of_a_step_waits_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    model, optimizer = decorate(model, OPTIMIZERS[name](model.parameters()), dtype=torch.float16)
    (x, target), *more = batches(4, 8)
    step(model, optimizer, x, target)

    def noticing(own: Any) -> Any:
        def read(tensor: Tensor, *rest: Any) -> Any:
            # On a CPU, where nothing waits, the optimizers themselves may look.
            assert "/amp/" not in sys._getframe(1).f_code.co_filename, "a number was read from the device"
            return own(tensor, *rest)

        return read

    for how in ("item", "__bool__", "__float__", "__int__", "tolist"):
        monkeypatch.setattr(Tensor, how, noticing(getattr(Tensor, how)))
    for x, target in more:
        step(model, optimizer, x, target)
    model = mlp()
    model, optimizer = decorate(model, OPTIMIZERS["SGD"](model.parameters()), dtype=torch.float16)
    with pytest.raises(AssertionError, match="a number was read"):
        step(model, optimizer, x, target)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["AdamW foreach", "FusedAdamW"])
def test_accel_optimize_goes_with_it(name: str, dtype: torch.dtype) -> None:
    results = []
    for optimized in (False, True):
        model: Any = mlp()
        model, optimizer = decorate(model, OPTIMIZERS[name](model.parameters()), dtype=dtype)
        loader: Any = batches(6, 8)
        if optimized:
            model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=60.0, cache=False)
        for _ in range(40):
            for x, target in loader:
                step(model, optimizer, x, target)
        if optimized:
            accel.undo(model)
        results.append([m.clone() for m in master_params(optimizer)])
    assert all(map(torch.equal, *results))


def test_a_step_that_fails_leaves_the_model_as_it_was() -> None:
    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("on purpose")
            return super().step(closure)

    model: Any = mlp()
    model, optimizer = decorate(model, Fails(model.parameters(), 0.1, momentum=0.9), dtype=torch.bfloat16)
    data = batches(3, 8)
    step(model, optimizer, *data[0])
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        step(model, optimizer, *data[1])
    optimizer.fails = False
    assert all(map(torch.equal, before, model.parameters()))
    step(model, optimizer, *data[2])
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_sparse_gradients_are_unscaled(level: str) -> None:
    results = []
    for scale in (None, 64.0):
        torch.manual_seed(0)
        model = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
        model, optimizer = decorate(
            model, torch.optim.SGD(model.parameters(), 0.1), level=level, dtype=torch.bfloat16, loss_scale=scale
        )
        for words in ([[1, 2, 2]], [[3, 2, 0]]):
            optimizer.zero_grad()
            model(torch.tensor(words)).square().sum().backward()
            optimizer.step()
        results.append([m.detach().clone() for m in master_params(optimizer)])
    assert all(map(torch.equal, *results))

"""float16 with a loss scale: steps that overflow are skipped, and the scale learns from them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel import optim
from accel.amp import DynamicLossScale, decorate
from accel.errors import InvalidArgument
from tests.accel.amp.amp_models import OPTIMIZERS, batches, loss_of, mlp, train

NAMES = ["SGD", "AdamW fused", "FusedSGD", "FusedAdamW"]


def scaled(name: str, scale: Any) -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    decorate(model, optimizer, dtype=torch.float16, loss_scale=scale)
    return model, optimizer


def overflow(model: nn.Module, optimizer: Any) -> None:
    (x, target), *_ = batches(1, 8)
    optimizer.zero_grad()
    (loss_of(model(x), target) * torch.inf).backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_overflows_changes_nothing_and_halves_the_scale(name: str) -> None:
    scale = DynamicLossScale(init_scale=2.0**10)
    model, optimizer = scaled(name, scale)
    train(model, optimizer, batches(2, 8))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    overflow(model, optimizer)
    after = (model.state_dict(), optimizer.state_dict()["state"])
    assert scale.state_dict()["scale"] == optimizer.state_dict()["loss_scale"]["scale"] == 2.0**9
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    for key, own in before[1].items():
        for entry, value in own.items():
            other = after[1][key][entry]
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, (key, entry)
    assert all(p.grad is not None for p in model.parameters())  # a loop may log them
    assert all(p.isfinite().all() for p in train(model, optimizer, batches(3, 8)))


@pytest.mark.parametrize("name", NAMES)
def test_a_first_step_that_overflows_leaves_no_trace(name: str) -> None:
    """torch's fused SGD leaves momentum unwritten then."""
    results = []
    for first in (False, True):
        model, optimizer = scaled(name, 1024.0)
        if first:
            overflow(model, optimizer)
        results.append(train(model, optimizer, batches(3, 8)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("damped", [0.0, 0.5])
def test_the_momentum_of_fused_sgd_begins_right(damped: float) -> None:
    results = []
    for first in (False, True):
        model = mlp()
        options: dict[str, Any] = {"momentum": 0.9, "dampening": damped, "fused": True}
        optimizer = torch.optim.SGD(model.parameters(), 0.05, **options)
        decorate(model, optimizer, dtype=torch.float16, loss_scale=1024.0)
        if first:
            overflow(model, optimizer)
        results.append(train(model, optimizer, batches(3, 8)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", ["SGD", "FusedSGD"])
def test_the_scale_grows_after_good_steps(name: str) -> None:
    scale = DynamicLossScale(init_scale=8.0, growth_interval=3, max_scale=16.0)
    model, optimizer = scaled(name, scale)
    seen = []
    for each in batches(8, 8):
        train(model, optimizer, [each])
        seen.append(scale.state_dict()["scale"])
    assert seen == [8.0, 8.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0]


@pytest.mark.parametrize("name", NAMES)
def test_only_an_optimizer_s_own_gradients_decide(name: str) -> None:
    """As of a GAN's two models, of which one overflows in the pass of the other, and is cleared before its step."""
    scale = DynamicLossScale(init_scale=8.0)
    models = [nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    decorate(models, optimizers, dtype=torch.float16, loss_scale=scale)
    before = [model.weight.detach().clone() for model in models]
    (models[1](models[0](torch.ones(3, 4))).sum() * torch.inf).backward()
    optimizers[0].zero_grad()
    models[0](torch.ones(3, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not torch.equal(models[0].weight, before[0])
    assert torch.equal(models[1].weight, before[1])
    assert scale.state_dict()["scale"] == 4.0


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_the_loop_leaves_out_holds_nothing(name: str) -> None:
    model, optimizer = scaled(name, DynamicLossScale(init_scale=8.0))
    (x, target), *_ = batches(1, 8)
    (loss_of(model(x), target) * torch.inf).backward()
    optimizer.zero_grad()  # it looked at the norm, say
    before = model[0].weight.detach().clone()
    train(model, optimizer, batches(1, 8))
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_a_hook_mends_before_the_step_count(name: str) -> None:
    model, optimizer = scaled(name, DynamicLossScale(init_scale=8.0))
    (x, target), *_ = batches(1, 8)
    (loss_of(model(x), target) * torch.inf).backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_may_step_within_the_backward_pass(name: str) -> None:
    def trained(inside: bool) -> list[Tensor]:
        model = mlp()
        optimizers = {p: OPTIMIZERS[name]([p]) for p in model.parameters()}
        scale = DynamicLossScale(init_scale=2.0**10, growth_interval=2)
        decorate(model, list(optimizers.values()), dtype=torch.float16, loss_scale=scale)

        def update(p: Tensor) -> None:
            optimizers[p].step()  # type: ignore[index]
            p.grad = None

        for p in model.parameters() if inside else ():
            p.register_post_accumulate_grad_hook(update)
        for number, (x, target) in enumerate(batches(6, 8)):
            (loss_of(model(x), target) * (torch.inf if number == 3 else 1.0)).backward()
            for p in model.parameters() if not inside else ():
                update(p)
        assert scale.state_dict()["scale"] == 2.0**11  # grown once, fallen once, grown once
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, trained(False), trained(True)))


@pytest.mark.parametrize("name", NAMES)
def test_clipping_by_value_hides_no_overflow(name: str) -> None:
    """It turns infinity into a number, but NaN stays."""
    model, optimizer = scaled(name, DynamicLossScale(init_scale=8.0))
    (x, target), *_ = batches(1, 8)
    before = [p.detach().clone() for p in model.parameters()]
    (loss_of(model(x), target) * 1e7).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_weights_that_stood_in_for_others_in_the_last_call_change_nothing() -> None:
    model, optimizer = scaled("SGD", DynamicLossScale(init_scale=8.0))
    (x, target), *_ = batches(1, 8)
    (loss_of(model(x), target) * torch.inf).backward()
    with torch.no_grad():
        noisy = {name: p + 0.1 for name, p in model.named_parameters()}
    torch.func.functional_call(model, noisy, (x,)).sum()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


class Calls(torch.optim.SGD):
    """A class that calls its base's step, whose hooks are called twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_class_that_calls_its_base_s_step() -> None:
    model, scale = mlp(), DynamicLossScale(init_scale=8.0, growth_interval=2)
    optimizer = Calls(model.parameters(), 0.1)
    decorate(model, optimizer, dtype=torch.float16, loss_scale=scale)
    before = [p.detach().clone() for p in model.parameters()]
    overflow(model, optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    assert scale.state_dict()["scale"] == 4.0
    train(model, optimizer, batches(2, 8))
    assert scale.state_dict()["scale"] == 8.0


class FailsOnce(torch.optim.SGD):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise RuntimeError("once")
        return super().step(closure)


@pytest.mark.parametrize("bad", [False, True])
def test_a_step_that_fails_can_be_tried_again(bad: bool) -> None:
    model = mlp()
    optimizer = FailsOnce(model.parameters(), 0.1, fused=True)
    decorate(model, optimizer, dtype=torch.float16)
    (x, target), *_ = batches(1, 8)
    (loss_of(model(x), target) * (torch.inf if bad else 1.0)).backward()
    with pytest.raises(RuntimeError, match="once"):
        optimizer.step()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].weight, before) == bad
    train(model, optimizer, batches(1, 8))


def test_what_a_loss_scale_refuses() -> None:
    model, optimizer = scaled("AdamW fused", "dynamic")
    (x, target), *_ = batches(1, 8)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model(x), target)).backward()
    with pytest.raises(InvalidArgument, match="one loss scale is enough"):
        scaler.step(optimizer)
    with pytest.raises(InvalidArgument, match="takes no closure where a loss scale may skip it"):
        optimizer.step(lambda: loss_of(model(x), target))
    other, own = mlp(), None
    own = torch.optim.SGD(other.parameters(), 0.1)
    decorate(other, own, dtype=torch.bfloat16)

    def closure() -> Tensor:
        own.zero_grad()
        loss = loss_of(other(x), target)
        loss.backward()
        return loss

    assert own.step(closure).isfinite()


def test_others_steps_are_left_alone() -> None:
    model, optimizer = scaled("SGD", "dynamic")
    train(model, optimizer, batches(1, 8))
    plain = nn.Linear(2, 2)
    own = optim.FusedSGD(plain.parameters(), 0.1)
    (plain(torch.ones(1, 2)).sum() * torch.inf).backward()
    own.step()
    assert not plain.weight.isfinite().any()


class Leaks(nn.Module):
    """Leaves a loss in an attribute, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.balance = y.square().mean()
        return y


@pytest.mark.parametrize("late", [0, 100])
def test_a_loss_that_does_not_come_out_of_the_model_is_refused(late: int) -> None:
    """Its gradients were divided by a scale that they never had, without a word."""
    model = Leaks()
    decorate(model, dtype=torch.float16)
    x = torch.randn(2, 8)

    def step(leaks: bool) -> None:
        y = model(x).mean()
        (y + model.balance.float() if leaks else y).backward()

    def steps() -> None:
        for number in range(late + 65):
            step(number >= late)

    with pytest.raises(InvalidArgument, match="get into a decorated model by its output"):
        steps()


@pytest.mark.parametrize("where", ["a list", "another module", "another model's output"])
def test_gradients_that_would_leave_with_the_scale_are_refused(where: str) -> None:
    class Finds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.found: list[Any] = [nn.Parameter(torch.ones(4))]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y * (self.found[0].weight[0] if isinstance(self.found[0], nn.Module) else self.found[0])

    model = decorate(Finds(), dtype=torch.float16)
    if where == "another module":
        model.found = [nn.Linear(4, 4)]
    elif where == "another model's output":
        model.found = [decorate(nn.Linear(8, 4), dtype=torch.float16)(torch.ones(8))]
    with pytest.raises(InvalidArgument, match="must leave a decorated model by its weights and inputs"):
        model(torch.randn(2, 8)).mean().backward()


def test_a_penalty_on_weights_needs_nothing() -> None:
    model, plain = mlp(), mlp()
    decorate(model, dtype=torch.float16)
    (x, target), *_ = batches(1, 8)
    for each in (model, plain):
        penalty = sum(p.square().sum() for p in each.parameters())
        (loss_of(each(x), target) + 0.1 * penalty).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, None), (torch.float16, 64.0), (torch.float16, 4096.0)])
def test_a_penalty_on_gradients_is_that_of_float32(dtype: torch.dtype, scale: float | None) -> None:
    """Gradients of gradients come by the model's inputs and outputs the other way: the scale is in them once."""

    def gradients(decorated: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        if decorated:
            decorate(model, dtype=dtype, loss_scale=scale)
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (own,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ((own.norm(dim=1) - 1).square().mean() + 0.1 * model(x).mean()).backward()
        return torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
        )

    plain = gradients(False)
    assert float((gradients(True) - plain).norm()) < 0.02 * float(plain.norm())


def test_a_model_that_is_fed_with_its_output_is_scaled_once() -> None:
    results = []
    for decorated in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        if decorated:
            decorate(model, dtype=torch.float16, loss_scale=1024.0)
        x = torch.ones(2, 8, requires_grad=True)
        model(model(x)).mean().backward()
        results.append(torch.cat([model.weight.grad.flatten(), x.grad.flatten()]))
    assert float((results[1] - results[0]).norm()) < 0.01 * float(results[0].norm())

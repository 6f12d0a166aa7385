"""One loss scale of several optimizers: which gradients wait for their step, also where each steps within the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel.amp import DynamicLossScale, decorate, master_params, undecorate
from accel.errors import InvalidArgument
from tests.accel.amp.amp_models import OPTIMIZERS, batches, loss_of, mlp

NAMES = ["SGD", "AdamW fused", "FusedSGD"]


def pair(name: str, level: str, scale: DynamicLossScale) -> tuple[list[Any], list[Any]]:
    """Return two models and their optimizers, decorated together."""
    models = [nn.Linear(4, 2, bias=False) for _ in range(2)]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    decorate(models, optimizers, level=level, dtype=torch.float16, loss_scale=scale)
    return models, optimizers


def train(model: Any, optimizer: Any, factor: float, *, set_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)
    (model(torch.ones(3, 4)).sum() * factor).backward()
    optimizer.step()


def leave(optimizer: Any) -> None:
    pass


def zero(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("afterwards", [leave, zero])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_an_earlier_phase_do_not_hold_the_scale(
    name: str, level: str, afterwards: Callable[[Any], None]
) -> None:
    """They once counted as waiting from the next backward pass on: after an overflow no step came through any more."""
    scale = DynamicLossScale(initial=2.0**16)
    (first, second), (own, other) = pair(name, level, scale)
    train(second, other, 1e-4)
    afterwards(other)
    before = first.weight.detach().clone()
    for _ in range(12):
        train(first, own, 100.0)
    assert not torch.equal(first.weight, before)
    scale.settle()
    assert 2.0**4 < float(scale.value) < 2.0**10  # 3 rows, each 100
    undecorate(first)
    assert second.weight.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_are_zeroed_do_not_hold_the_scale(name: str) -> None:
    """As in a GAN whose critic gets gradients from the generator's pass, and whose gradients are zeroed in place."""
    scale = DynamicLossScale(initial=8.0, interval=1, most=2.0**10)
    (make, critic), (first, second) = pair(name, "O2", scale)
    both = nn.Linear(2, 4).requires_grad_(False)
    for _ in range(6):
        second.zero_grad(set_to_none=False)
        critic(both(make(torch.ones(3, 4)).detach())).sum().backward()
        second.step()
        first.zero_grad(set_to_none=False)
        critic(both(make(torch.ones(3, 4)))).sum().backward()
        first.step()
    scale.settle()
    assert float(scale.value) >= 2.0**8


def zero_unseen(optimizer: Any) -> None:
    """Clear gradients as zero_grad(set_to_none=False) of many at once does it on CUDA: that counts no writes."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None:
            p.grad.data.zero_()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_are_zeroed_unseen_do_not_hold_the_scale(name: str) -> None:
    """Each model gets gradients from the pass of the other; where the first ones overflowed, nothing ever trained."""
    scale = DynamicLossScale(initial=2.0**20)
    (make, critic), (first, second) = pair(name, "O2", scale)
    both = nn.Linear(2, 4).requires_grad_(False)
    before = [each.weight.detach().clone() for each in (make, critic)]
    for _ in range(10):
        for optimizer in (second, first):
            zero_unseen(optimizer)
            critic(both(make(torch.ones(3, 4)))).sum().backward()
            optimizer.step()
    assert not any(map(torch.equal, before, (make.weight, critic.weight)))
    scale.settle()
    assert float(scale.value) <= 2.0**15
    with pytest.raises(InvalidArgument, match="gradients that wait"):
        undecorate(critic)
    zero_unseen(second)
    undecorate(critic)
    assert critic.weight.dtype == torch.float32


@pytest.mark.parametrize("at", ["before", "after"])
def test_gradients_that_wait_hold_the_scale(at: str) -> None:
    """Another optimizer overflows meanwhile; what waits is divided by what it was multiplied by."""
    scale = DynamicLossScale(initial=2.0**10)
    (first, second), (own, other) = pair("SGD without momentum", "O2", scale)
    before = master_params(own)[0].clone()
    if at == "after":
        train(second, other, torch.inf)
    first(torch.ones(3, 4)).sum().backward()
    for _ in range(3):
        train(second, other, torch.inf)
    assert float(scale.value) == 2.0 ** (10 if at == "before" else 9)
    own.step()
    torch.testing.assert_close(master_params(own)[0], before - 0.05 * 3)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_may_step_within_the_backward_pass(name: str, level: str, set_to_none: bool) -> None:
    """One for each parameter, as soon as its gradient is there; all but the first to step once were refused."""
    outcomes, scales = [], []
    for within in (False, True):
        model, scale = mlp(), DynamicLossScale(initial=2.0**8, interval=2)
        optimizers = [OPTIMIZERS[name]([p]) for p in model.parameters()]
        decorate(model, optimizers, level=level, dtype=torch.float16, loss_scale=scale)
        for p, optimizer in zip(model.parameters(), optimizers, strict=True) if within else ():
            p.register_post_accumulate_grad_hook(stepping(optimizer, set_to_none))
        for number, (x, target) in enumerate(batches(7, 8)):
            loss = loss_of(model(x), target)
            (loss * torch.inf if number == 3 else loss).backward()
            for optimizer in () if within else optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            assert not scale.came_through
        scale.settle()
        scales.append(scale.state_dict())
        outcomes.append([m.detach().clone() for optimizer in optimizers for m in master_params(optimizer)])
    assert all(map(torch.equal, *outcomes))
    assert scales[0] == scales[1]
    assert scales[0]["scale"] == 2.0**9  # twice larger after 2 steps, half of that, and twice larger again


class Checkpointed(nn.Module):
    """Two layers of three whose activations may be computed again within the backward pass, in a task of its own."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.inner, x, use_reentrant=True) if self.checkpoints else self.inner(x)
        y: Tensor = self.last(x)
        return y


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_may_step_within_a_checkpointed_part_s_backward_pass(name: str) -> None:
    """That is a pass within the pass, where the second to step was refused."""
    outcomes = []
    for checkpoints in (False, True):
        model, scale = Checkpointed(checkpoints), DynamicLossScale(initial=2.0**8, interval=2)
        optimizers = [OPTIMIZERS[name]([p]) for p in model.parameters()]
        decorate(model, optimizers, dtype=torch.float16, loss_scale=scale)
        for p, optimizer in zip(model.parameters(), optimizers, strict=True):
            p.register_post_accumulate_grad_hook(stepping(optimizer, set_to_none=True))
        for x, target in batches(4, 8):
            loss_of(model(x), target).backward()
            assert not scale.came_through
        outcomes.append([scale.get_scale(), *(master_params(optimizer)[0].clone() for optimizer in optimizers)])
    assert outcomes[0][0] == outcomes[1][0]
    assert all(map(torch.equal, outcomes[0][1:], outcomes[1][1:]))


def stepping(optimizer: Any, set_to_none: bool) -> Callable[[Tensor], None]:
    def step(p: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    return step


@pytest.mark.parametrize(("level", "has_scaler"), [("O1", False), ("O2", False), ("O2", True)])
def test_a_first_step_that_overflows_leaves_no_momentum(level: str, has_scaler: bool) -> None:
    """torch's fused SGD makes the buffers all the same, and once left in them what lay in that memory."""
    outcomes = []
    for overflows in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True)
        decorate(model, optimizer, level=level, dtype=torch.float16, loss_scale=None if has_scaler else 64.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=has_scaler)
        for number, (x, target) in enumerate(batches(4, 8)):
            if number == 0 and not overflows:
                continue
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model(x), target))
            (loss * torch.inf if number == 0 else loss).backward()
            scaler.step(optimizer)
            scaler.update(64.0)
            if number == 0:
                assert not any("momentum_buffer" in own for own in optimizer.state.values())
        outcomes.append([m.detach().clone() for m in master_params(optimizer)])
    assert all(map(torch.equal, *outcomes))


def normed() -> nn.Sequential:
    """Return a network whose halves have weights of 16 bits and of 32 at O2."""
    torch.manual_seed(0)
    first = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def halves(model: nn.Sequential, name: str, **options: Any) -> tuple[Any, list[Any]]:
    """Return a model, and an optimizer for each half of its parameters, decorated together."""
    params = list(model.parameters())
    optimizers = [OPTIMIZERS[name](params[:4]), OPTIMIZERS[name](params[4:])]
    return decorate(model, optimizers, **options)  # type: ignore[no-any-return]


def share_memory(model: nn.Module) -> None:
    """Let gradients be views of one tensor, as DistributedDataParallel(gradient_as_bucket_view=True) does."""
    for dtype in {p.dtype for p in model.parameters()}:
        own = [p for p in model.parameters() if p.dtype == dtype]
        parts = torch.zeros(sum(p.numel() for p in own), dtype=dtype).split([p.numel() for p in own])
        for p, part in zip(own, parts, strict=True):
            p.grad = part.view_as(p)


def clip_each(optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        nn.utils.clip_grad_norm_(master_params(optimizer), 0.1)


@pytest.mark.parametrize("clip", [leave, clip_each])
@pytest.mark.parametrize("clear", [leave, zero])
@pytest.mark.parametrize(
    ("level", "dtype"), [("O1", torch.float16), ("O2", torch.float16), ("O2", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_one_memory_are_each_optimizer_s_own(
    name: str, level: str, dtype: torch.dtype, clear: Callable[[Any], None], clip: Callable[[Any], None]
) -> None:
    """Views count their writes together: of two that were clipped the second step was refused, or lost its clipping."""
    outcomes: list[Any] = []
    for shares in (False, True):
        scale = DynamicLossScale(initial=2.0**8, interval=2) if dtype == torch.float16 else None
        model, optimizers = halves(normed(), name, level=level, dtype=dtype, loss_scale=scale)
        if shares:
            share_memory(model)
        for number, (x, target) in enumerate(batches(6, 8)):
            loss = loss_of(model(x), target)
            (loss * torch.inf if number == 3 and scale is not None else loss).backward()
            clip(optimizers)
            for optimizer in optimizers:
                optimizer.step()
                clear(optimizer)
            for optimizer in optimizers:
                zero(optimizer)
        masters = [m.detach().clone() for optimizer in optimizers for m in master_params(optimizer)]
        outcomes.append((masters, scale and scale.state_dict()))
    assert all(map(torch.equal, outcomes[0][0], outcomes[1][0]))
    assert outcomes[0][1] == outcomes[1][1]


def test_clipping_scaled_gradients_in_one_memory_is_refused() -> None:
    model, optimizers = halves(normed(), "SGD", level="O1", dtype=torch.float16, loss_scale=64.0)
    share_memory(model)
    (x, target), *_ = batches(1, 8)
    loss_of(model(x), target).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(InvalidArgument, match="must not be changed while they are scaled"):
        optimizers[0].step()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_the_loop_leaves_out_counts_once(name: str) -> None:
    """The scale fell once for each optimizer that had clipped."""
    scale = DynamicLossScale(initial=2.0**10)
    model, optimizers = halves(normed(), name, dtype=torch.float16, loss_scale=scale)
    for number, (x, target) in enumerate(batches(5, 8)):
        loss = loss_of(model(x), target)
        (loss * torch.inf if number in (1, 3) else loss).backward()
        norms = [nn.utils.clip_grad_norm_(master_params(optimizer), 1.0) for optimizer in optimizers]
        if all(norm.isfinite() for norm in norms):
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()
    assert float(scale.value) == 2.0**8


@pytest.mark.parametrize("clip", [leave, clip_each])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_several_by_autograd_grad(name: str, clip: Callable[[Any], None]) -> None:
    """After the first step the other was refused: nothing seemed to have come through the scale."""
    outcomes = []
    for by_hand in (False, True):
        model, optimizers = halves(normed(), name, dtype=torch.float16, loss_scale=256.0)
        for x, target in batches(3, 8):
            model.zero_grad()
            loss = loss_of(model(x), target)
            if by_hand:
                params = list(model.parameters())
                for p, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
                    p.grad = gradient
            else:
                loss.backward()
            for optimizer in optimizers:
                clip([optimizer])
                optimizer.step()
        outcomes.append([m.detach().clone() for optimizer in optimizers for m in master_params(optimizer)])
    assert all(map(torch.equal, *outcomes))

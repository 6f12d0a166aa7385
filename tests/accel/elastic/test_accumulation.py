"""Several of a loop's batches as one step of its optimizer: as if they had been one batch."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from accel.elastic.batch_size.accumulation import GradientAccumulation
from accel.profiler.loop import backward
from tests.sampling import examples

Loop = Callable[[nn.Module, Optimizer, Tensor, Tensor], None]


class Net(nn.Module):
    """Of double precision, so that only the order of sums differs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
        self.seldom = nn.Parameter(torch.ones(1, dtype=torch.float64))
        """Used by batches of an even number of samples only."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y * self.seldom if len(x) % 2 == 0 else y


def plainly(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()


def cleared_afterwards(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def two_losses(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    output = model(x)
    (0.5 * mse_loss(output, y)).backward(retain_graph=True)
    (0.5 * mse_loss(output, y)).backward()
    optimizer.step()


def by_grad(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    given = list(model.parameters())
    gradients = torch.autograd.grad(mse_loss(model(x), y), given, allow_unused=True)
    for parameter, gradient in zip(given, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def clipped_by_data(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.clamp_(-0.01, 0.01)
    optimizer.step()


LOOPS = [plainly, cleared_afterwards, clipped, clipped_by_data]
OPTIMIZERS: list[Callable[[Any], Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
]


def batches(sizes: Sequence[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    pairs = [(torch.randn(n, 3, generator=draw).double(), torch.randn(n, 1, generator=draw).double()) for n in sizes]
    return pairs


def joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def made(make: Callable[[Any], Optimizer] = OPTIMIZERS[0]) -> tuple[Net, Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, make(model.parameters())


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    for earlier in backward._MARK.listeners:  # a loop of another test has left batches that nothing was trained on
        backward.forget(earlier)
    before = torch.autograd.backward
    yield
    assert torch.autograd.backward is before


def accumulated(
    loop: Loop, model: nn.Module, optimizer: Optimizer, steps: Sequence[Sequence[tuple[Tensor, Tensor]]]
) -> None:
    accumulation = GradientAccumulation(model, [optimizer])
    for step in steps:
        for x, y in step:
            # Only the step's first batch says how many it has.
            accumulation.begin_batch([len(each) for each, _ in step])
            loop(model, optimizer, x, y)
    accumulation.close()


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["SGD", "AdamW", "fused Adam"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_batches_of_any_sizes_are_as_one_batch(loop: Loop, make: Callable[[Any], Optimizer]) -> None:
    for seed in range(examples(10)):
        draw = random.Random(seed)
        steps = []
        for number in range(12):
            # All of one parity: `seldom` has a gradient from each of a step's batches, or from none.
            size = draw.randint(1, 6)
            others = [draw.randrange(size % 2 or 2, 7, 2) for _ in range(draw.randint(0, 3))]
            steps.append(batches([size, *others], seed=100 * seed + number))
        model, optimizer = made(make)
        accumulated(loop, model, optimizer, steps)

        expected, own = made(make)
        for step in steps:
            x, y = joined(step)
            whole = Odd(expected) if len(step[0][0]) % 2 else expected
            loop(whole, own, x, y)
        assert_alike(model, expected)


class Odd(nn.Module):
    """Calls a Net as if its batch were odd."""

    def __init__(self, inner: Net) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner.second(self.inner.first(x).tanh())
        return y


def test_one_batch_a_step_is_the_loops_own_bit_for_bit() -> None:
    given = batches([4] * 20)
    model, optimizer = made()
    accumulated(plainly, model, optimizer, [[each] for each in given])
    expected, own = made()
    for x, y in given:
        plainly(expected, own, x, y)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_what_is_left_out_calls_no_hooks_and_returns_none() -> None:
    model, optimizer = made()
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    accumulation = GradientAccumulation(model, [optimizer])
    for x, y in batches([2, 2, 2]):
        accumulation.begin_batch([2, 2, 2])
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        assert optimizer.step() is None
        called.append(f"open: {accumulation.present.taken > 0}")
    assert called == ["open: True", "open: True", "before", "after", "open: False"]
    accumulation.close()


def finite_only(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
        optimizer.step()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_gradient_that_is_not_finite_leaves_out_the_whole_step(at: int) -> None:
    model, optimizer = made()
    accumulation = GradientAccumulation(model, [optimizer])
    for number in range(8):
        for place, (x, y) in enumerate(batches([2, 2, 2], seed=number)):
            accumulation.begin_batch([2, 2, 2])
            finite_only(model, optimizer, x * torch.nan if number % 2 and place == at else x, y)
    accumulation.close()
    expected, own = made()
    for number in range(0, 8, 2):
        finite_only(expected, own, *joined(batches([2, 2, 2], seed=number)))
    assert_alike(model, expected)


def test_a_batch_whose_step_the_loop_leaves_out_is_counted() -> None:
    """All ranks take as many batches for a step, whatever each of them leaves out."""
    model, optimizer = made()
    accumulation = GradientAccumulation(model, [optimizer])
    for number in range(6):
        for place, (x, y) in enumerate(batches([2, 2, 2], seed=number)):
            accumulation.begin_batch([2, 2, 2])
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            if place != number % 2:
                optimizer.step()
    accumulation.close()
    expected, own = made()
    for number in range(6):
        plainly(expected, own, *joined(batches([2, 2, 2], seed=number)))
    assert_alike(model, expected)


def test_undo_in_the_midst_of_a_step_gives_the_loop_its_own_steps_back() -> None:
    for left_after in (0, 1, 2, 3):
        model, optimizer = made()
        accumulation = GradientAccumulation(model, [optimizer])
        for x, y in batches([2, 2, 2, 2], seed=1)[:left_after]:
            accumulation.begin_batch([2, 2, 2, 2])
            plainly(model, optimizer, x, y)
        expected, own = made()  # no step has been taken yet
        accumulation.close()
        for x, y in batches([2] * 5, seed=2):
            plainly(model, optimizer, x, y)
            plainly(expected, own, x, y)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
        assert "step" not in optimizer.__dict__


def test_a_pass_that_is_left_takes_its_open_step_with_it() -> None:
    model, optimizer = made()
    accumulation = GradientAccumulation(model, [optimizer])
    x, y = batches([2])[0]
    accumulation.begin_batch([2, 2, 2])
    plainly(model, optimizer, x, y)
    accumulation.drop()
    assert accumulation.present.taken == 0
    expected, own = made()
    step = batches([2, 2], seed=3)
    for x, y in step:
        accumulation.begin_batch([2, 2])
        plainly(model, optimizer, x, y)
    plainly(expected, own, *joined(step))
    accumulation.close()
    assert_alike(model, expected)


def test_a_batch_that_raises_is_taken_again() -> None:
    model, optimizer = made()
    accumulation = GradientAccumulation(model, [optimizer])
    step = batches([2, 2], seed=1)

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise RuntimeError("boom")

    for x, y in step:
        accumulation.begin_batch([2, 2])
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="boom"):
            mse_loss(model(x) + Boom.apply(model(x)), y).backward()  # type: ignore[no-untyped-call]
        plainly(model, optimizer, x, y)
    expected, own = made()
    plainly(expected, own, *joined(step))
    accumulation.close()
    assert_alike(model, expected)


def closure_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def twice(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    plainly(model, optimizer, x, y)
    plainly(model, optimizer, x, y)


SCALER = torch.amp.GradScaler("cpu", init_scale=4.0)


def scaled(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    SCALER.scale(mse_loss(model(x), y)).backward()
    SCALER.step(optimizer)
    SCALER.update()


OTHER = nn.Linear(3, 1).double()


def other_model(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """As of a GAN, whose other model has an optimizer of its own."""
    OTHER(x).sum().backward()
    plainly(model, optimizer, x, y)


def other_model_afterwards(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    plainly(model, optimizer, x, y)
    (model(x).mean() * OTHER(x).mean()).backward()


def other_optimizer(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    plainly(model, optimizer, x, y)
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def held() -> Loop:
    """Return a loop that has got hold of the optimizer's step before anything was put in its place."""
    steps: dict[int, Any] = {}

    def holds_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        step = steps.setdefault(id(optimizer), types.MethodType(type(optimizer).step, optimizer))
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        step()

    return holds_step


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        (closure_step, "takes a closure"),
        (twice, "no batch of its own comes before"),
        (scaled, "GradScaler"),
        (held(), "own step"),
        (two_losses, "several backward passes"),
        (by_grad, "without a backward pass"),
        (other_model, "several backward passes"),
        (other_model_afterwards, "backward pass that no batch"),
        (other_optimizer, "another optimizer"),
    ],
)
def test_what_can_not_be_accumulated_is_seen_before_it_is(loop: Loop, why: str) -> None:
    model, optimizer = made()
    expected, own = made()
    accumulation = GradientAccumulation(model, [optimizer])
    for x, y in batches([2, 2]):
        accumulation.begin_batch([2])
        loop(model, optimizer, x, y)
        loop(expected, own, x, y)
    assert why in accumulation.refusal
    for x, y in batches([2, 2, 2, 2]):
        accumulation.begin_batch([2])
        loop(model, optimizer, x, y)
        loop(expected, own, x, y)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    accumulation.close()
    assert "step" not in optimizer.__dict__


def test_what_is_refused_from_the_beginning() -> None:
    model, optimizer = made()
    assert "2 optimizers" in GradientAccumulation(model, [optimizer, optimizer]).refusal
    assert "GradScaler" in GradientAccumulation(model, [optimizer], SCALER).refusal
    off = torch.amp.GradScaler("cpu", enabled=False)
    allowed = GradientAccumulation(model, [optimizer], off)
    assert not allowed.refusal
    allowed.close()


@pytest.mark.parametrize("first", [True, False])
def test_schedulers_made_before_and_after(first: bool, recwarn: pytest.WarningsRecorder) -> None:
    def train(accumulates: bool) -> tuple[list[float], Net]:
        model, optimizer = made()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if first else None
        accumulation = GradientAccumulation(model, [optimizer]) if accumulates else None
        schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)  # a second one
        rates = []
        for x, y in batches([2] * 4):
            if accumulation is not None:
                accumulation.begin_batch([2])
            plainly(model, optimizer, x, y)
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        if accumulation is not None:
            accumulation.close()
        plainly(model, optimizer, *batches([2], seed=5)[0])
        return rates, model

    (rates, model), (expected, plain) = train(True), train(False)
    assert rates == expected
    assert_alike(model, plain)
    assert not [str(warning.message) for warning in recwarn if "lr_scheduler" in str(warning.message)]

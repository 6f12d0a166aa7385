"""Fused attention draws within its kernel, others for another dtype: replays leave that out, and compare the rest.

Attention on a CPU draws its dropout as any other operator does, so the kernels are played: operators with the arguments
of torch's fused ones, of which the one for bfloat16 draws other numbers, and fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel import entry, strategies
from accel.guard.draws import ReplayedDraws, by_other_kernels, leave_out_alike
from accel.guard.guard import Comparison
from accel.run import Run
from accel.run.gate import Call
from accel.strategies.base import Exactness
from tests.accel.guard_replays import Acting


def weights(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q.float() @ k.float().transpose(-2, -1) / q.shape[-1] ** 0.5, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((weights(q, k) * mask) @ v.float()).to(q.dtype)


def mask_of(seed: Tensor, dropout_p: float, q: Tensor) -> Tensor:
    shape = (*q.shape[:-1], q.shape[-2])
    if not dropout_p:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(int(seed))
    return (torch.rand(shape, generator=generator) >= dropout_p) / (1 - dropout_p)


def kernel(name: str, numbers: int) -> Any:
    """Make a fused attention that moves the generator on by so many numbers, and its backward pass."""

    @torch.library.custom_op(f"accel_tests::{name}", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
    def fused(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
        seed = torch.randint(2**40, (numbers,))[:1].clone() if dropout_p else torch.zeros(1, dtype=torch.int64)
        return attend(query, key, value, mask_of(seed, dropout_p, query)), seed

    @torch.library.custom_op(f"accel_tests::{name}_backward", mutates_args=())
    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, seed: Tensor, dropout_p: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask, of_keys, root = mask_of(seed, dropout_p, query), weights(query, key), query.shape[-1] ** 0.5
        for_weights = (grad_out.float() @ value.float().transpose(-2, -1)) * mask
        scores = of_keys * (for_weights - (for_weights * of_keys).sum(-1, keepdim=True)) / root
        gradients = scores @ key.float(), scores.mT @ query.float(), (of_keys * mask).mT @ grad_out.float()
        q, k, v = (gradient.to(query.dtype) for gradient in gradients)
        return q, k, v

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.dropout_p = inputs
        ctx.save_for_backward(*tensors, output[1])

    def differentiate(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Any, ...]:
        return (*backward(grad_out, *ctx.saved_tensors, ctx.dropout_p), None)

    fused.register_autograd(differentiate, setup_context=keep)
    return fused


WIDE, NARROW = kernel("wide", 7), kernel("narrow", 1)


class Attention(nn.Module):
    """Attention with dropout, and a dropout after it: by another kernel where it is called in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.p = nn.Linear(16, 48), nn.Linear(16, 16), 0.5
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        p = self.p if self.training else 0.0
        attended, _ = (NARROW if q.dtype == torch.bfloat16 else WIDE)(q, k, v, p)
        return self.out(self.dropout(functional.gelu(attended)))  # type: ignore[no-any-return]


class Reduced(Acting):
    """Calls the model under autocast, and does what is injected."""

    name = "reduced"
    exactness = Exactness.REDUCED
    p: float | None = None
    scale = 1.0

    def enable(self, run: Run, setting: Any) -> None:
        def wrap(call: Call) -> Call:
            def run_call(*args: Any) -> Any:
                model: Any = run.model
                before = model.p
                model.p = before if self.p is None else self.p
                try:
                    with torch.autocast("cpu", torch.bfloat16):
                        return call(*args).float() * self.scale
                finally:
                    model.p = before

            return run_call

        run.gate.add(self.name, wrap)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(strategies, "REGISTRY", [Reduced])
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8, 16), torch.randn(32, 8, 16))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=8)
    model: Any = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, budget=60, cache=False, allow="reduced")
    guard = entry.MODELS[model].session.events.calls.check

    def check() -> Comparison:
        guard.expect({"reduced": None})
        guard.recorded((torch.randn(8, 8, 16),), {}).square().mean().backward()
        guard.check({"reduced": None})
        finding = guard.take_finding()
        assert finding is not None
        return finding

    yield check
    accel.undo(model)


def test_another_kernel_that_draws_otherwise_is_right(checked: Any) -> None:
    """By the numbers of its own kernel attention in bfloat16, and each dropout after it, was far from the plain one."""
    finding = checked()
    assert (finding.problem, finding.unsure, finding.other_draws) == ("", "", True)
    assert finding.output_error < 2e-2


@pytest.mark.parametrize("p", [0.0, 0.45])
def test_another_probability_is_wrong(checked: Any, monkeypatch: pytest.MonkeyPatch, p: float) -> None:
    monkeypatch.setattr(Reduced, "p", p)
    assert "random draw" in checked().problem


def test_another_result_is_wrong(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reduced, "scale", 1.1)
    assert checked().problem


def replayed(x: Tensor, **options: Any) -> tuple[Tensor, Tensor, ReplayedDraws]:
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    with ReplayedDraws(**options) as draws:
        out, _ = WIDE(x, x, x, 0.5)
        out.sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, draws


def test_forward_and_backward_pass_leave_out_the_same() -> None:
    x = torch.randn(2, 8, 4)
    out, gradient, draws = replayed(x, canonical=True)
    plain = x.clone().requires_grad_()
    expected = attend(plain, plain, plain, torch.ones(2, 8, 8))
    expected.sum().backward()
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(gradient, plain.grad)
    assert len(draws.noted) == 1


@pytest.mark.parametrize("options", [{"canonical": False}, {"canonical": True, "with_attention": True}])
def test_what_is_compared_as_it_draws_leaves_out_nothing(options: dict[str, bool]) -> None:
    """The exact, and what is compared with compiled code, whose kernels run under no mode."""
    x = torch.randn(2, 8, 4)
    out, gradient, _ = replayed(x, **options)
    torch.manual_seed(0)
    plain = x.clone().requires_grad_()
    expected, _ = WIDE(plain, plain, plain, 0.5)
    expected.sum().backward()
    assert torch.equal(out, expected.detach())
    assert torch.equal(gradient, plain.grad)  # type: ignore[arg-type]


def test_a_dropout_by_name_alone_is_left_out_too() -> None:
    @torch.library.custom_op("accel_tests::by_name", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
    def by_name(query: Tensor, *, dropout_p: float = 0.0) -> list[Tensor]:
        return [query * (torch.rand_like(query) >= dropout_p) / (1 - dropout_p)]

    x = torch.randn(2, 8, 4)
    with ReplayedDraws(canonical=True) as draws:
        (out,) = by_name(x, dropout_p=0.5)
    assert torch.equal(out, x)
    assert [parameters for _, _, parameters in draws.noted] == [(0.5,)]


def test_what_is_no_number_is_left_as_it_is() -> None:
    @torch.library.custom_op("accel_tests::by_tensor", mutates_args=())
    def by_tensor(query: Tensor, dropout_p: Tensor) -> Tensor:
        return query * dropout_p

    x = torch.randn(2, 8, 4)
    with ReplayedDraws(canonical=True) as draws:
        assert torch.equal(by_tensor(x, torch.tensor(0.5)), 0.5 * x)
    assert not draws.noted


def test_what_was_left_out_is_compared() -> None:
    one = [("left out: wide", (2, 8, 4), (0.5,)), ("bernoulli_", (2, 8), (0.5,))]
    other = [("left out: narrow", (2, 8, 4), (0.5,)), ("bernoulli_", (2, 8), (0.4,))]
    assert leave_out_alike(one, other) and leave_out_alike([], [])  # type: ignore[arg-type]
    assert by_other_kernels(one, other) and not by_other_kernels(one, one)  # type: ignore[arg-type]
    assert not leave_out_alike(one, one[1:])  # type: ignore[arg-type]
    assert not leave_out_alike(one, [("left out: wide", (2, 8, 4), (0.4,))])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_float32_and_bfloat16_agree(causal: bool) -> None:
    def drawn(dtype: torch.dtype) -> Tensor:
        torch.cuda.manual_seed(0)
        x = torch.randn(2, 4, 128, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        x = x.to(dtype).requires_grad_()
        with ReplayedDraws(canonical=True) as draws:
            out = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=causal)
            out = functional.dropout(out, 0.5)
            (gradient,) = torch.autograd.grad(out.float().square().sum(), [x])
        assert len(draws.noted) == 2
        return torch.cat((out.detach().float().flatten(), gradient.float().flatten()))

    wide, narrow = drawn(torch.float32), drawn(torch.bfloat16)
    assert float((wide - narrow).norm() / wide.norm()) < 2e-2

"""Muon against torch's: in float64 with torch's own rounding to bfloat16 taken out, in bfloat16, and by states."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.errors import InvalidArgument
from accel.kernels.optimizers import muon as kernel
from accel.optim import FusedAdamW, Muon

# Of one shape and its transpose, a square one, a row, and one that nobody else has.
SHAPES = [(6, 9), (9, 6), (5, 5), (1, 7), (13, 4)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "weight_decay": 0.0},
    {"adjust_lr_fn": "original", "momentum": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
    {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 8},
    {"eps": 0.5, "ns_steps": 1},
    {"lr": torch.tensor(0.02)},
]
NAMES = [", ".join(f"{name}={value}" for name, value in each.items()) or "usual" for each in OPTIONS]


def params_of(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]
    gaps = torch.randn(6, 18, generator=draw, dtype=torch.float64).to(dtype)[:, ::2]
    return [nn.Parameter(x) for x in (*drawn, drawn[0].clone().T, gaps)]


def stepped(optimizer: Any, params: list[nn.Parameter], steps: int, first: int = 0) -> None:
    """Go down a bowl that is moved at every step; one parameter has no gradient in every third."""
    for number in range(first, first + steps):
        draw = torch.Generator().manual_seed(number)
        optimizer.zero_grad()
        for i, p in enumerate(params):
            target = torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)
            p.grad = None if number % 3 == 1 and i == 2 else p.detach() - target
        optimizer.step()


@pytest.fixture
def torch_without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Muon multiplies in bfloat16 whatever the parameters are: as an oracle it is let stay in float64."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_weights_are_torchs_over_200_steps(options: dict[str, Any], torch_without_rounding: None) -> None:
    options = {"lr": 0.02, **options}
    theirs, ours = params_of(), params_of()
    oracle, optimizer = torch.optim.Muon(theirs, **options), Muon(ours, **options, ns_dtype=torch.float64)
    stepped(oracle, theirs, 200)
    stepped(optimizer, ours, 200)
    for a, b in zip(ours, theirs, strict=True):
        # A learning rate that is a tensor makes torch round 1 - lr * weight_decay to its dtype.
        near = 1e-5 if isinstance(options["lr"], Tensor) else 1e-9
        torch.testing.assert_close(a, b, rtol=near, atol=near)
        torch.testing.assert_close(
            optimizer.state[a]["momentum_buffer"], oracle.state[b]["momentum_buffer"], rtol=near, atol=near
        )


@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=NAMES[:4])
def test_it_rounds_as_torch_does(options: dict[str, Any], has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of low rank shows it: without rounding the update differs by 0.4 of its length."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    torch.manual_seed(0)
    for shape in ((16, 24), (24, 16), (16, 16)):
        grad = torch.randn(shape[0], 2) @ torch.randn(2, shape[1]) + 0.01 * torch.randn(shape)
        theirs, ours, finer = (nn.Parameter(torch.zeros(shape)) for _ in range(3))
        for p in (theirs, ours, finer):
            p.grad = grad.clone()
        torch.optim.Muon([theirs], **options).step()
        Muon([ours], **options).step()
        Muon([finer], **options, ns_dtype=torch.float32).step()
        assert (ours - theirs).norm() <= 0.03 * theirs.norm()
        assert (finer - theirs).norm() >= 0.1 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_are_torchs_in_any_dtype(dtype: torch.dtype) -> None:
    theirs, ours = params_of(dtype), params_of(dtype)
    stepped(torch.optim.Muon(theirs, lr=0.02), theirs, 20)
    stepped(Muon(ours, lr=0.02), ours, 20)
    for a, b in zip(ours, theirs, strict=True):  # by 20 steps of 0.02, each known to a few hundredths
        assert (a - b).abs().max() <= 20 * 0.02 * 0.03 + 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_singular_values_are_near_one_in_any_dtype(dtype: torch.dtype) -> None:
    params = [nn.Parameter(torch.zeros(16, 24, dtype=dtype)), nn.Parameter(torch.zeros(24, 16, dtype=dtype))]
    torch.manual_seed(0)
    for p in params:
        p.grad = torch.randn(p.shape).to(dtype)
    Muon(params, lr=1.0, weight_decay=0.0).step()
    for p in params:
        values = torch.linalg.svdvals(p.detach().float()) / kernel.rate_factor(None, p.shape)
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_states_go_both_ways() -> None:
    """Train in one, go on in the other, by a file."""
    theirs, ours = params_of(), params_of()
    options: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.8}
    first, second = torch.optim.Muon(theirs, **options), Muon(ours, **options)
    stepped(first, theirs, 3)
    stepped(second, ours, 3)
    from_torch, from_ours = saved(first), saved(second)
    into_torch, into_ours = torch.optim.Muon(theirs, lr=9.0), Muon(ours, lr=9.0, ns_dtype=torch.float32)
    into_torch.load_state_dict(from_ours)
    into_ours.load_state_dict(from_torch)
    assert into_ours.param_groups[0]["ns_dtype"] == torch.float32  # torch's state says nothing of it
    into_ours.param_groups[0]["ns_dtype"] = torch.bfloat16
    assert into_ours.param_groups[0]["lr"] == 0.02
    stepped(into_torch, theirs, 3, first=3)
    stepped(into_ours, ours, 3, first=3)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        torch.testing.assert_close(
            into_ours.state[a]["momentum_buffer"], into_torch.state[b]["momentum_buffer"], rtol=0.02, atol=0.02
        )


def saved(optimizer: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file)  # weights_only, as by default
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rest_is_adamws(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix, bias, table = (nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((4, 6), (6,), (7, 3)))
    same = [nn.Parameter(p.detach().clone()) for p in (bias, table)]
    alone = nn.Parameter(matrix.detach().clone())
    optimizer = Muon([matrix], lr=0.02)
    optimizer.add_param_group({"params": iter([bias, table]), "use_muon": False, "lr": 0.1, "betas": (0.8, 0.9)})
    others = [Muon([alone], lr=0.02), FusedAdamW(same, lr=0.1, betas=(0.8, 0.9), master_weights=False)]
    for number in range(5):
        for p, q in zip((matrix, bias, table), (alone, *same), strict=True):
            p.grad = torch.full_like(p, number - 1.5) + p.detach()
            q.grad = p.grad.clone()
        optimizer.step()
        for each in others:
            each.step()
        if number == 2:
            before = {name: value.clone() for name, value in optimizer.state[table].items()}
            optimizer.load_state_dict(saved(optimizer))
            assert all(torch.equal(value, before[name]) for name, value in optimizer.state[table].items())
            others[1].load_state_dict(others[1].state_dict())
    assert torch.equal(matrix, alone)
    for p, q in zip((bias, table), same, strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(p, q, rtol=8 * eps, atol=8 * eps)
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        assert float(optimizer.state[p]["step"]) == 5


def test_parts_of_what_is_too_much_at_once_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = params_of(), params_of()
    stepped(Muon(whole, lr=0.1), whole, 2)
    monkeypatch.setattr(kernel, "MOST", 60)
    stepped(Muon(parts, lr=0.1), parts, 2)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_empty_matrices_and_no_gradients_are_fine() -> None:
    params = [nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(3, 0)), nn.Parameter(torch.ones(2, 2))]
    optimizer = Muon(params)
    optimizer.step()
    assert not optimizer.state
    for p in params[:2]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(params[2], torch.ones(2, 2))


def test_closures_copies_and_schedules() -> None:
    weight = nn.Parameter(torch.eye(3))
    optimizer = Muon([weight], lr=1.0, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).detach() == 3.0
    schedule.step()
    assert torch.allclose(weight.diag(), weight[0, 0].expand(3))
    twin = copy.deepcopy(optimizer)
    closure()
    (other,) = twin.param_groups[0]["params"]
    other.grad = weight.grad.clone()  # type: ignore[union-attr]
    optimizer.step()
    twin.step()
    assert torch.equal(weight, other)


def test_a_rate_on_the_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = torch.tensor(0.02, dtype=torch.float64)
    plain, waiting = params_of(), params_of()
    stepped(Muon(plain, lr=0.02), plain, 2)
    optimizer = Muon(waiting, lr=rate)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "__float__", None)
        stepped(optimizer, waiting, 2)
    for a, b in zip(waiting, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_compiled_step_runs_as_it_is() -> None:
    plain, compiled = params_of(), params_of()
    one, other = Muon(plain, lr=0.02), Muon(compiled, lr=0.02)
    stepped(one, plain, 2)
    step = torch.compile(other.step, backend="eager")
    monkey: Any = type("Stepper", (), {"zero_grad": other.zero_grad, "step": staticmethod(step)})
    stepped(monkey, compiled, 2)
    assert all(map(torch.equal, plain, compiled))


@pytest.mark.parametrize(
    ("params", "options", "said"),
    [
        ([torch.ones(3)], {}, r"matrices. Found: \[3\]. Put it in a group with use_muon=False"),
        ([torch.ones(2, 2)], {"lr": -1}, "lr must be at least 0. Found: -1"),
        ([torch.ones(2, 2)], {"lr": torch.ones(2)}, "lr must be a number or a tensor of one"),
        ([torch.ones(2, 2)], {"ns_steps": 100}, "ns_steps must be at least 0 and smaller than 100. Found: 100"),
        ([torch.ones(2, 2)], {"ns_coefficients": (1, 2)}, r"three numbers. Found: \(1, 2\)"),
        ([torch.ones(2, 2)], {"adjust_lr_fn": "mine"}, "adjust_lr_fn must be one of None, original, match_rms_adamw"),
        ([torch.ones(2, 2)], {"ns_dtype": torch.int8}, "ns_dtype must be one of"),
        ([torch.ones(2, 2, dtype=torch.complex64)], {}, "float64. Found: complex64"),
        ([{"params": [torch.ones(2)], "use_muon": False, "betas": (0.9, 1.0)}], {}, r"betas\[1\]"),
    ],
)
def test_refusals(params: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Muon(params, **options)


def test_states_of_others_are_refused_and_nothing_is_changed() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = Muon([weight], lr=0.5)
    for other in (torch.optim.AdamW([weight]), Muon([{"params": [weight], "use_muon": False}])):
        with pytest.raises(InvalidArgument, match="of another optimizer"):
            optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_sparse_gradient_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(InvalidArgument, match="dense"):
        Muon([weight]).step()


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS[:4], ids=NAMES[:4])
def test_on_a_gpu_it_rounds_as_torch_does_and_waits_for_nothing(options: dict[str, Any]) -> None:
    theirs, ours = ([nn.Parameter(p.detach().cuda()) for p in params_of(torch.float32)] for _ in range(2))
    bias = nn.Parameter(torch.ones(5, device="cuda"))
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        torch.manual_seed(i)
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    bias.grad = torch.ones_like(bias)
    options = {"lr": 0.02, **options}
    torch.optim.Muon(theirs, **options).step()
    optimizer = Muon([{"params": ours}, {"params": [bias], "use_muon": False}], **options)
    optimizer.step()  # compiles AdamW's kernel
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b, start in zip(ours, theirs, params_of(torch.float32), strict=True):
        assert (a - b).norm() <= 0.05 * (b - start.cuda()).norm() + 1e-6
    assert float(bias.detach()[0]) < 1

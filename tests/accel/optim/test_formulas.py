"""Every optimizer with every option follows the published formula, on both paths, for 200 steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from tests.accel.optim.cases import OPTIONS, Pair, name_of, tensors

MIXED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


SLOW = pytest.mark.slow
# The path; dtypes, in turn, and shapes; steps, and whether gradients are scaled; which of the cases; marks. The
# interpreter rounds to bfloat16 otherwise: that is for a GPU.
RUNS: dict[str, tuple[str, dict[str, Any], int, bool, slice, Any]] = {
    "200 steps": ("plain", {"shapes": [(3, 5), ()]}, 200, False, slice(None, None, 4), ()),
    "all for 200 steps": ("plain", {"shapes": [(3, 5), ()]}, 200, False, slice(None), SLOW),
    "mixed dtypes": ("plain", {"dtypes": MIXED}, 12, True, slice(2, None, 3), ()),
    "mixed dtypes for 200 steps": ("plain", {"dtypes": MIXED}, 200, True, slice(None), SLOW),
    "kernels": ("kernels", {"shapes": [(), (1030,), (0, 4)]}, 2, False, slice(1, None, 6), ()),
    "mixed dtypes by kernels": ("kernels", {"dtypes": MIXED[:3], "shapes": [(5,)]}, 2, True, slice(4, None, 6), ()),
    "200 steps by kernels": ("kernels", {"shapes": [(5,), ()]}, 200, False, slice(None), SLOW),
    "all shapes and dtypes by kernels": ("kernels", {"dtypes": MIXED[:3]}, 12, True, slice(None), SLOW),
}


@pytest.mark.parametrize(
    ("path", "case", "run"),
    [
        pytest.param(path, case, run, id=f"{run}: {name_of(case)}", marks=marks)
        for run, (path, _, _, _, chosen, marks) in RUNS.items()
        for case in OPTIONS[chosen]
    ],
    indirect=["path"],
)
def test_every_step_is_the_formulas(path: str, case: Any, run: str) -> None:
    _, given, steps, is_scaled, _, _ = RUNS[run]
    pair = Pair(*case, **given)
    for number in range(steps):
        pair.step(number, scale=8.0 if is_scaled else None)
    pair.check(steps, k=4 if steps == 2 else 2 if steps == 12 and path == "kernels" else 1)


def _layouts() -> list[torch.Tensor]:
    """Return channels last, transposed, with gaps, at an odd address, and plain, of the same numbers."""
    plain = tensors([(2, 3, 5, 7)], torch.float32, 5)[0]
    gaps, odd = torch.zeros(2, 3, 5, 14), torch.zeros(plain.numel() + 1)
    return [
        plain.clone(),
        plain.clone().to(memory_format=torch.channels_last),
        plain.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0),
        gaps[..., ::2].copy_(plain),
        odd[1:].view_as(plain).copy_(plain),
    ]


@pytest.mark.parametrize(
    ("kind", "path"),
    [(FusedSGD, "kernels"), *((kind, "plain") for kind in (FusedSGD, FusedAdamW, FusedLAMB, FusedLARS))],
    indirect=["path"],
)
def test_order_in_memory_changes_nothing(kind: Any, path: str) -> None:
    params = [torch.nn.Parameter(x) for x in _layouts()]
    params.append(torch.nn.Parameter(params[0].detach().clone()))
    options = {"momentum": 0.9} if kind is FusedSGD else {}
    optimizer = kind(params, lr=0.1, weight_decay=0.1, **options)
    grad = tensors([(2, 3, 5, 7)], torch.float32, 6)[0]
    for _ in range(2):
        for p in params:
            p.grad = torch.empty_like(p).copy_(grad)
        # A plain parameter whose gradient is in another order.
        params[-1].grad = grad.clone(memory_format=torch.channels_last)
        optimizer.step()
    for p in params[1:]:
        torch.testing.assert_close(p, params[0], rtol=0, atol=3e-7)


def test_kernels_give_the_same_bits_every_time(interpreted: None) -> None:
    runs = []
    for _ in range(2):
        pair = Pair(FusedLAMB, {"lr": 0.1}, shapes=[(8200,)])  # two chunks
        pair.step(1)
        pair.check(1, k=4)
        runs.append([p.detach().clone() for p in pair.params])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_sixteen_bits_without_master_weights(path: str) -> None:
    weight, grad = tensors([(50,), (50,)], torch.float16, 3)
    param = torch.nn.Parameter(weight.clone())
    optimizer = FusedSGD([param], lr=0.125, momentum=0.5, master_weights=False)
    param.grad = grad
    optimizer.step()
    assert torch.equal(param.detach(), (weight.float() - 0.125 * grad.float()).half())
    state = optimizer.state[param]
    assert set(state) == {"momentum_buffer"}
    assert state["momentum_buffer"].dtype == torch.float32


def test_numbers_may_be_tensors(interpreted: None) -> None:
    """Rates that a captured step follows give what numbers give."""
    results = []
    for wrap in (float, torch.tensor):
        param = torch.nn.Parameter(torch.ones(5))
        optimizer = FusedAdamW(
            [param], lr=wrap(0.1), betas=(wrap(0.8), wrap(0.9)), weight_decay=wrap(0.1), max_grad_norm=wrap(0.5)
        )
        for rate in (0.1, 0.01):
            param.grad = torch.arange(5.0)
            group = optimizer.param_groups[0]
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            optimizer.step()
        results.append(param.detach().clone())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=0)


def test_a_published_step_of_lamb_by_hand() -> None:
    """‖w‖ = 5; without moments u = g / |g| + λ w, so each element moves by η 5 / ‖u‖ times that."""
    param = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = FusedLAMB([param], lr=0.1, weight_decay=0.5, eps=0.0, max_grad_norm=None)
    param.grad = torch.tensor([0.2, -0.1])
    optimizer.step()
    u = torch.tensor([1 + 0.5 * 3, -1 + 0.5 * 4])
    torch.testing.assert_close(param.detach(), torch.tensor([3.0, 4.0]) - 0.1 * 5 / u.norm() * u)


def test_two_published_steps_of_lars_by_hand() -> None:
    """The rate of each step is in the momentum: the second step keeps the first one's."""
    param = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = FusedLARS([param], lr=2.0, momentum=0.9, weight_decay=0.5, trust_coefficient=0.01, eps=0.0)
    w, buffer = torch.tensor([3.0, 4.0]), torch.zeros(2)
    for rate in (2.0, 1.0):
        optimizer.param_groups[0]["lr"] = rate
        g = torch.tensor([1.0, 2.0])
        param.grad = g.clone()
        optimizer.step()
        ratio = 0.01 * w.norm() / (g.norm() + 0.5 * w.norm())
        buffer = 0.9 * buffer + rate * ratio * (g + 0.5 * w)
        w = w - buffer
    torch.testing.assert_close(param.detach(), w)


@pytest.mark.parametrize("kind", [FusedSGD, FusedAdamW, FusedLAMB, FusedLARS])
def test_nothing_to_update_and_nothing_to_divide_by(kind: Any, path: str) -> None:
    empty, zero = torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.zeros(3))
    optimizer = kind([empty], weight_decay=0.1, max_grad_norm=1.0)
    optimizer.step()  # no gradient at all
    assert not optimizer.state
    empty.grad, zero.grad = torch.zeros(0), torch.zeros(3)
    optimizer.step()
    assert float(optimizer.grad_norm) == 0.0
    optimizer.add_param_group({"params": [zero]})
    optimizer.add_param_group({"params": []})
    optimizer.step()
    assert zero.tolist() == [0, 0, 0]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has gradients of the same dtype only")
def test_gradients_of_another_dtype() -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    param.grad = torch.tensor([1e-3, 1.0])  # one more digit than bfloat16 has
    optimizer = FusedSGD([param], lr=1.0)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["master"], 1 - param.grad)

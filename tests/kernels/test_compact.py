"""Rows under a mask, padded: values, both gradients, sizes, what is refused, compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accel.kernels import compact as module
from accel.kernels.compact import compact
from tests.kernels.contract import opcheck
from tests.kernels.gradients import same_gradient

# Nothing; one; odd; a power of two; a kernel's block and one more. Trailing shapes: scalar rows, columns, maps, none.
TOTALS = [0, 1, 7, 64, 1025]
TRAILING = [(), (9,), (2, 3), (0,)]


def _inputs(total: int, trailing: tuple[int, ...], share: float = 0.4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(total)
    return torch.randn(total, *trailing), torch.rand(total) < share


def _expected(x: Tensor, mask: Tensor, size: int, pad: float) -> Tensor:
    rows = x[mask][:size]
    return torch.cat((rows, rows.new_full((size - len(rows), *x.shape[1:]), pad)))


def _agrees(total: int, trailing: tuple[int, ...], size: int | None, pad: float = -2.0, share: float = 0.4) -> None:
    x, mask = _inputs(total, trailing, share)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    rows, count = compact(mine, mask, size, pad)
    expected = _expected(theirs, mask, total if size is None else size, pad)
    assert torch.equal(rows, expected)
    assert count.shape == ()
    assert count.dtype == torch.int64
    assert int(count) == int(mask.sum())
    grad = torch.randn_like(rows)
    rows.backward(grad)
    expected.backward(grad)
    assert same_gradient(mine, theirs)


@pytest.mark.parametrize("trailing", TRAILING, ids=str)
@pytest.mark.parametrize("total", TOTALS)
def test_rows_and_gradient_are_those_of_the_mask(total: int, trailing: tuple[int, ...]) -> None:
    _agrees(total, trailing, None)


@pytest.mark.parametrize("size", [0, 1, 3, 7, 11])  # none, too few, too few, all, more than there are
def test_any_size(size: int) -> None:
    _agrees(7, (2,), size)


@pytest.mark.parametrize("share", [0.0, 1.1], ids=["none", "all"])
def test_masks_of_one_kind(share: float) -> None:
    _agrees(7, (2,), 5, share=share)


@pytest.mark.sample(5)
@pytest.mark.parametrize("trailing", TRAILING, ids=str)
@pytest.mark.parametrize("total", TOTALS)
def test_kernels_agree(interpreted: None, total: int, trailing: tuple[int, ...]) -> None:
    _agrees(total, trailing, None)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.1], ids=["none", "some", "all"])
@pytest.mark.parametrize("size", [0, 3, 11])
def test_kernels_take_any_size_and_mask(interpreted: None, size: int, share: float) -> None:
    _agrees(7, (2,), size, share=share)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("total", TOTALS)
def test_gpu_agrees(total: int, dtype: torch.dtype, waits_for_nothing: Any) -> None:
    x, mask = (t.cuda() for t in _inputs(total, (9,)))
    x = x.to(dtype)
    exact = x.to(torch.float64, copy=True).requires_grad_()  # rows are moved, not computed: fp64 has the same bits
    mine, grad = x.clone().requires_grad_(), torch.randn(50, 9, device="cuda").to(dtype)
    compact(mine, mask, 50)[0].backward(grad)
    mine.grad = None
    with waits_for_nothing():
        rows, count = compact(mine, mask, 50)
        rows.backward(grad)
    expected = _expected(exact, mask, 50, 0.0)
    expected.backward(grad.double())
    assert torch.equal(rows.double(), expected)
    assert int(count) == int(mask.sum())
    assert same_gradient(mine, exact)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_gpu_compiled_under_autocast() -> None:
    x, mask = (t.cuda() for t in _inputs(1025, (9,)))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        rows = torch.compile(lambda x, mask: compact(x * 2, mask, 500).rows, fullgraph=True)(mine, mask)
    assert rows.dtype == torch.float32
    rows.square().sum().backward()
    _expected(theirs * 2, mask, 500, 0.0).square().sum().backward()
    assert same_gradient(mine, theirs)


@pytest.mark.parametrize("size", [0, 3, 11])
def test_sources_without_a_look_from_the_host_are_the_same(size: int) -> None:
    _, mask = _inputs(7, ())
    for found, expected in zip(module.sources_ref(mask, size), module._sources(mask, size), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64])
def test_dtypes(dtype: torch.dtype, path: str) -> None:
    x, mask = _inputs(7, (3,))
    x = (x * 10).to(dtype)
    assert torch.equal(compact(x, mask, 5, pad=7).rows, _expected(x, mask, 5, 7))


def test_layouts() -> None:
    x, mask = _inputs(7, (3,))
    layout = x.t().contiguous().t()
    assert torch.equal(compact(layout, mask.repeat_interleave(2)[::2], 5).rows, _expected(x, mask, 5, 0))


def test_gradients_of_both_orders() -> None:
    x, mask = _inputs(6, (2,))
    x = x.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: compact(x, mask, 5).rows, x)
    assert torch.autograd.gradgradcheck(lambda x: compact(x, mask, 5).rows ** 2, x)


@pytest.mark.parametrize(
    ("x", "mask", "size", "reason"),
    [
        (torch.zeros(3), torch.zeros(2, dtype=torch.bool), None, r"mask torch.bool \[2\]"),
        (torch.zeros(3), torch.zeros(3), None, "mask must be bool.*compare the mask"),
        (torch.zeros(()), torch.zeros((), dtype=torch.bool), None, r"x \[\] on cpu"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.bool, device="meta"), None, "on meta"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.bool), -1, "size must be 0 or more rows. Found: -1"),
    ],
    ids=["length", "dtype", "scalar", "device", "size"],
)
def test_what_does_not_fit_is_refused(x: Tensor, mask: Tensor, size: int | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compact(x, mask, size)


def test_ops_keep_their_contract() -> None:
    x, mask = _inputs(7, (2,))
    source, _ = module._sources(mask, 5)
    opcheck(module._sources_op, (mask, 5))
    opcheck(module._TAKE.opaque, (x.requires_grad_(), source, 0.0))
    opcheck(module._PUT.opaque, (x[:5].detach().requires_grad_(), source, 7))


def test_torch_compile_keeps_one_graph_and_the_gradient() -> None:
    x, mask = _inputs(7, (2,))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        rows, count = compact(x * 2, mask, 5)
        return rows.square().sum() / count

    torch.compile(loss, backend="aot_eager", fullgraph=True)(mine, mask).backward()
    loss(theirs, mask).backward()  # type: ignore[no-untyped-call]
    assert same_gradient(mine, theirs)


def test_autocast_leaves_the_dtype() -> None:
    x, mask = _inputs(7, (2,))
    with torch.autocast("cpu", torch.bfloat16):
        assert compact(x, mask).rows.dtype == torch.float32


def test_cost_counts_what_is_moved() -> None:
    assert module.cost(total=1000, size=10, columns=9, itemsize=4).bytes == 1000 + 10 * (72 + 8) + 8

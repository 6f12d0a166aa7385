"""One row of each group: values, both gradients, layouts, what is refused, compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from accel.kernels import gather_rows as module
from accel.kernels.gather_rows import gather_rows
from tests.kernels.contract import opcheck
from tests.kernels.gradients import same_gradient

# One group; odd; a power of two; more columns than groups; one column; rows of 8 and 16 bytes, in fp32 and in fp16;
# a block and one more; 3D boxes of a level.
SHAPES = [
    (1, 1, 1),
    (7, 3, 5),
    (8, 4, 16),
    (3, 2, 33),
    (5, 9, 1),
    (5, 3, 2),
    (5, 3, 4),
    (5, 3, 8),
    (129, 3, 9),
    (375, 50, 9),
]
EMPTY = [(0, 3, 4), (4, 3, 0), (0, 0, 4)]


@pytest.fixture(autouse=True, params=[0, 8192], ids=["by rows", "few"])
def _what_is_few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes one of two ways, by size."""
    monkeypatch.setattr(module, "_SMALL", request.param)


def _inputs(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    groups, rows, columns = shape
    return torch.randn(groups, rows, columns).to(dtype), torch.randint(0, max(rows, 1), (groups,))


def _published(x: Tensor, index: Tensor) -> Tensor:
    return x[range(len(x)), index]


def _agrees(shape: tuple[int, int, int], dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    x, index = _inputs(shape, dtype)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = gather_rows(mine, index.to(index_dtype)), _published(theirs, index)
    assert torch.equal(found, expected)
    grad = torch.randn_like(found)
    found.backward(grad)
    expected.backward(grad)
    assert same_gradient(mine, theirs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY], ids=str)
def test_rows_and_gradient_are_those_of_the_range_index(
    shape: tuple[int, int, int], dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    _agrees(shape, dtype, index_dtype)


# The interpreter takes 0.7 s for the boxes of a level; the shape before has a block and one more.
INTERPRETED = [*SHAPES[:-1], *EMPTY, pytest.param(SHAPES[-1], marks=pytest.mark.slow)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", INTERPRETED, ids=str)
def test_kernels_agree(interpreted: None, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    _agrees(shape, dtype, torch.int64)


def test_kernels_write_groups_of_several_blocks(interpreted: None) -> None:
    _agrees((2, 70, 33), torch.float32, torch.int64)


def test_kernels_reach_columns_that_lie_far_apart(interpreted: None, tmp_path: Path) -> None:
    """Offsets of 2³¹ elements and more wrapped around. The file has holes: it takes no room."""
    half = 2**31
    storage = torch.from_file(str(tmp_path / "far"), shared=True, size=2 * half + 8, dtype=torch.uint8)
    storage[2 * half + 1] = 7
    x = storage[half:].as_strided((1, 2, 3), (1, 1, half // 2))
    assert gather_rows(x, torch.tensor([1])).tolist() == [[0, 0, 7]]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's own, on first use
def test_kernels_carry_tangents(interpreted: None) -> None:
    """A tangent asks for no gradient: it was lost."""
    x, index = _inputs((7, 3, 5))
    tangent = torch.randn_like(x)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(gather_rows(forward_ad.make_dual(x, tangent), index))
        assert found.tangent is not None
        assert torch.equal(found.primal, _published(x, index))
        assert torch.equal(found.tangent, _published(tangent, index))


def test_kernels_take_a_narrow_index(interpreted: None) -> None:
    _agrees((7, 3, 5), torch.float32, torch.int32)


def test_kernels_read_zeros_outside_a_group_and_send_no_gradient_there(interpreted: None) -> None:
    x = torch.ones(3, 2, 4, requires_grad=True)
    found = gather_rows(x, torch.tensor([0, 2, -1]))
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert found.sum(1).tolist() == [4, 0, 0]
    assert x.grad is not None
    assert x.grad.sum((1, 2)).tolist() == [4, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gpu_agrees(shape: tuple[int, int, int], dtype: torch.dtype, waits_for_nothing: Any) -> None:
    x, index = (t.cuda() for t in _inputs(shape, dtype))
    exact = x.to(torch.float64, copy=True).requires_grad_()  # rows are moved, not computed: fp64 has the same bits
    mine, grad = x.clone().requires_grad_(), torch.randn(len(x), shape[2], device="cuda").to(dtype)
    gather_rows(mine, index).backward(grad)
    mine.grad = None
    with waits_for_nothing():
        found = gather_rows(mine, index)
        found.backward(grad)
    expected = _published(exact, index)
    expected.backward(grad.double())
    assert torch.equal(found.double(), expected)
    assert same_gradient(mine, exact)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_gpu_compiled_under_autocast() -> None:
    x, index = (t.cuda() for t in _inputs((129, 3, 9)))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        found = torch.compile(lambda x, index: gather_rows(x * 2, index), fullgraph=True)(mine, index)
    assert found.dtype == torch.float32
    found.square().sum().backward()
    _published(theirs * 2, index).square().sum().backward()  # type: ignore[no-untyped-call]
    assert same_gradient(mine, theirs)


def test_gradients_of_both_orders() -> None:
    x, index = _inputs((4, 3, 2), torch.float64)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, index), x)
    assert torch.autograd.gradgradcheck(lambda x: gather_rows(x, index) ** 2, x)


def test_any_layout(path: str) -> None:
    x, index = _inputs((6, 4, 5))
    layouts = [
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.repeat(1, 1, 2)[..., ::2],
        x[:1].expand(6, 4, 5),
    ]
    for layout in layouts:
        assert not layout.is_contiguous()
        assert torch.equal(gather_rows(layout, index.repeat_interleave(2)[::2]), _published(layout, index))


@pytest.mark.parametrize("columns", [2, 4])
def test_rows_that_begin_at_odd_places(columns: int) -> None:
    x, index = torch.randn(6 * 3 * columns + 1)[1:].view(6, 3, columns), torch.tensor([0, 2, 1, 1, 0, 2])
    assert torch.equal(gather_rows(x, index), _published(x, index))


def test_batch_dimensions() -> None:
    torch.manual_seed(0)
    x, index = torch.randn(2, 3, 5, 4, 6), torch.randint(0, 4, (2, 3, 5))
    expected = x.gather(-2, index[..., None, None].expand(2, 3, 5, 1, 6)).squeeze(-2)
    assert torch.equal(gather_rows(x, index), expected)


def test_scatter_of_the_gradient_has_the_same_bits_every_time() -> None:
    x, index = _inputs((129, 3, 9))
    x.requires_grad_()
    grads = [torch.autograd.grad(gather_rows(x, index).square().sum(), x)[0] for _ in range(3)]
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("bad", [-1, 3])
def test_row_outside_its_group_is_named(bad: int) -> None:
    with pytest.raises(IndexError, match=r"index must lie in 0\.\.2.*Clamp it"):
        gather_rows(torch.zeros(2, 3, 1), torch.tensor([0, bad]))


@pytest.mark.parametrize(
    ("x", "index", "reason"),
    [
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), r"must be \[..., P, G, C\]"),
        (torch.zeros(2, 3, 1), torch.zeros(3, dtype=torch.int64), r"Found: \[2, 3, 1\] and \[3\]"),
        (torch.zeros(2, 3, 1), torch.zeros(2), r"int32 or int64. Found: torch.float32"),
        (torch.zeros(2, 3, 1), torch.zeros(2, dtype=torch.int64, device="meta"), "on one device"),
    ],
    ids=["no columns", "other length", "float index", "other device"],
)
def test_what_does_not_fit_is_refused(x: Tensor, index: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        gather_rows(x, index)


@pytest.mark.parametrize("_what_is_few", [8192], indirect=True)
def test_few_rows_take_few_operators() -> None:
    """At 8 rows, it is what is called that takes the time: 34 µs, where the index itself took 7."""
    x, index = _inputs((8, 5, 4))
    with torch.profiler.profile() as profile:
        gather_rows(x, index)
    called = [event.name for event in profile.events() if event.cpu_parent is None]
    assert len(called) <= 6, called
    assert module._gather_few(x, index).equal(module.gather_rows_ref(x, index))


def test_op_keeps_its_contract() -> None:
    x, index = _inputs((4, 3, 2))
    opcheck(module._GATHER.opaque, (x.requires_grad_(), index))
    opcheck(module._SCATTER.opaque, (x[:, 0].detach().requires_grad_(), index, 3))


def test_torch_compile_keeps_one_graph_and_the_gradient() -> None:
    x, index = _inputs((7, 3, 5))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled = torch.compile(lambda x, index: gather_rows(x * 2, index), backend="aot_eager", fullgraph=True)
    compiled(mine, index).square().sum().backward()
    _published(theirs * 2, index).square().sum().backward()  # type: ignore[no-untyped-call]
    assert same_gradient(mine, theirs)


def test_autocast_leaves_the_dtype() -> None:
    x, index = _inputs((7, 3, 5))
    with torch.autocast("cpu", torch.bfloat16):
        assert gather_rows(x, index).dtype == torch.float32


def test_cost_counts_what_is_moved() -> None:
    found = module.cost(groups=100, columns=9, itemsize=4)
    assert found.flops == 0
    assert found.bytes == 100 * (2 * 36 + 8)

"""Elements at or above a threshold: those of a comparison, in order, for any values, sizes and ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel.kernels import threshold as op
from accel.kernels.threshold import Selected, at_least, block_maxima
from tests.kernels.contract import opcheck

# Nothing; one; a block and its neighbours; a tile of 2,048 and its neighbours; several tiles with a rest.
SIZES = [0, 1, 63, 64, 65, 2047, 2048, 2049, 4200]
LEAST = [0.0, 1e-40, 1.0, 3.0, 100.0, torch.inf]  # everything; subnormal; a third; few; none; what is not finite


def _values(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator)
    kind = torch.randint(0, 40, (size,), generator=generator)
    for place, value in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 1e-40, 3.0)):
        x[kind == place] = value
    x[100:2300] *= 0.2  # blocks of little, and a tile of nothing at 3.0
    return x


def _expected(x: Tensor, least: float) -> Tensor:
    """Return the positions by float64, NaN among them."""
    magnitudes = x.double().abs()
    return torch.where(magnitudes.isnan(), torch.inf, magnitudes).ge(torch.tensor(least).double()).nonzero().view(-1)


def _check(found: Selected, x: Tensor, least: float, size: int | None) -> None:
    expected = _expected(x, least)
    size = len(expected) if size is None else size
    assert found.count.dtype == found.positions.dtype == torch.int64
    assert found.count.shape == ()
    assert int(found.count) == len(expected)
    kept, padding = min(len(expected), size), max(size - len(expected), 0)
    assert torch.equal(found.positions, torch.cat((expected[:size], torch.full((padding,), len(x)))))
    values = torch.cat((x[expected[:size]], torch.zeros(padding)))
    assert torch.equal(found.values.view(torch.int32), values.view(torch.int32))
    assert len(found.values) == kept + padding


@pytest.mark.parametrize("size", SIZES)
def test_maxima(size: int, path: str) -> None:
    x = _values(size)
    expected = torch.stack([part.abs().amax() for part in x.split(64)]) if size else x
    assert torch.equal(block_maxima(x).nan_to_num(7.0, 8.0), expected.nan_to_num(7.0, 8.0))


@pytest.mark.sample(3)
@pytest.mark.parametrize("with_maxima", [False, True], ids=["all read", "by maxima"])
@pytest.mark.parametrize("size", SIZES)
def test_all_that_are_there(size: int, with_maxima: bool, path: str) -> None:
    x = _values(size)
    maxima = block_maxima(x) if with_maxima else None
    for least in LEAST:
        _check(at_least(x, torch.tensor(least), maxima=maxima), x, least, None)


@pytest.mark.sample(3)
@pytest.mark.parametrize("with_maxima", [False, True], ids=["all read", "by maxima"])
@pytest.mark.parametrize(
    "room", [0, 1, 700, 2049, 12_000]
)  # none; the first; within a tile; more than a tile; too many
def test_any_size(room: int, with_maxima: bool, path: str) -> None:
    for size in (0, 65, 4200):
        x = _values(size)
        for least in (0.0, 1.0, 100.0):
            maxima = block_maxima(x) if with_maxima else None
            _check(at_least(x, torch.tensor(least), room, maxima), x, least, room)


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", [0.0, -2.5, 1e-45, torch.nan])
def test_all_alike(value: float, path: str) -> None:
    x = torch.full((2100,), value)
    for least in (0.0, abs(value), 3.0):
        if least == least:
            _check(at_least(x, torch.tensor(least), maxima=block_maxima(x)), x, least, None)


def test_values_stay(path: str) -> None:
    x = _values(2049)
    before = x.clone()
    at_least(x, torch.tensor(1.0), 100, block_maxima(x))
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


_X, _T = torch.zeros(70), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("values", "least", "size", "maxima", "reason"),
    [
        (torch.zeros(70, dtype=torch.bfloat16), _T, None, None, "values must be contiguous float32.*bfloat16"),
        (torch.zeros(140)[::2], _T, None, None, r"Found: torch.float32 \[70\], not contiguous"),
        (torch.zeros(7, 10), _T, None, None, r"Found: torch.float32 \[7, 10\]. Flatten"),
        (_X, torch.ones(1), None, None, r"least must be float32 \[\].*\[1\]"),
        (_X, _T.double(), None, None, "float64 .*Use values.new_tensor"),
        (_X, torch.ones((), device="meta"), None, None, "on meta"),
        (_X, _T, -1, None, "size must be 0 or more. Found: -1"),
        (_X, _T, None, torch.zeros(3), r"maxima must be contiguous float32 \[2\].*\[3\].*Use block_maxima"),
    ],
)
def test_what_does_not_fit_is_refused(
    values: Tensor, least: Tensor, size: int | None, maxima: Tensor | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        at_least(values, least, size, maxima)


def test_ops_keep_their_contract_and_compile() -> None:
    x = _values(300).nan_to_num()
    opcheck(op._block_maxima_op, (x,))
    opcheck(op._at_least_op, (x, _T, 50, block_maxima(x)))

    def total(x: Tensor) -> Tensor:
        return at_least(x, _T, 50, block_maxima(x)).values.sum()

    assert torch.equal(torch.compile(total, backend="aot_eager", fullgraph=True)(x), total(x))


def test_cost_counts_what_is_moved() -> None:
    assert op.cost_block_maxima(1 << 20).bytes == (1 << 22) + (1 << 16)
    assert op.cost_at_least(1 << 20, selected=1000).bytes == 2 * (1 << 22) + 12_000
    by_maxima = op.cost_at_least(1 << 20, selected=1000, size=2000, blocks=900)
    assert by_maxima.bytes == 2 * ((1 << 16) + 900 * 256) + 24_000
    assert by_maxima.flops == 2 * 900 * 64


@pytest.mark.gpu
@pytest.mark.parametrize("least", LEAST)
@pytest.mark.parametrize("size", [*SIZES, (1 << 20) + 3])
def test_gpu_finds_the_same_without_waiting(size: int, least: float) -> None:
    x = _values(size)
    device, floor = x.cuda(), torch.tensor(least).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        maxima = block_maxima(device)
        found = [at_least(device, floor, 5000, one) for one in (None, maxima)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found.append(at_least(device, floor, None, maxima))
    for one, room in zip(found, (5000, 5000, None), strict=True):
        _check(Selected(*(part.cpu() for part in one)), x, least, room)

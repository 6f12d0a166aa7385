"""Signs by blocks: bits of the reference and of the kernels, sums, limits, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from accel.kernels import sign_pack as op
from tests.kernels.code_cases import (
    BLOCKS,
    SIZES,
    decoded,
    encoded,
    rows,
    same_bits,
    summed,
    values_of,
)

EPS = torch.finfo(torch.float32).eps
quiet = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of infinities and NaN


def _check(found: Tensor, lost: Tensor, x: Tensor, block: int) -> None:
    """Compare bits with the signs of x, scales with float64's mean, and what was lost with x less what is decoded."""
    blocks = -(-len(x) // block)
    scales = found[: 4 * blocks].view(torch.float32)
    exact = torch.stack([part.double().abs().mean() for part in x.split(block)]) if len(x) else x.double()
    # Sums of magnitudes in any order: (block − 1) roundings of half EPS, one of the quotient, and of subnormal results.
    assert ((scales - exact).abs() <= block * EPS / 2 * exact + 1.5e-45).all()
    bits = torch.tensor([(byte >> (7 - i)) & 1 for byte in found[4 * blocks :].tolist() for i in range(8)])
    assert torch.equal(bits[: len(x)].bool(), x.signbit())
    assert not bits[len(x) :].any()
    sent = torch.copysign(scales.repeat_interleave(block)[: len(x)], x)
    assert same_bits(lost, x - sent)


@pytest.mark.parametrize("block", [*BLOCKS, 1000])  # 1000: a size that kernels don't take
@pytest.mark.parametrize("size", SIZES)
def test_reference_is_the_formula(size: int, block: int) -> None:
    values, residual = values_of(size), values_of(size, 1)
    _check(*encoded(op, values, block, residual), values + residual, block)


@pytest.mark.sample(5)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", SIZES)
def test_kernel_is_the_formula(interpreted: None, size: int, block: int) -> None:
    values, residual = values_of(size), values_of(size, 1)
    _check(*encoded(op, values, block), values, block)
    _check(*encoded(op, values, block, residual), values + residual, block)
    assert same_bits(values, values_of(size))


def test_negative_zeros_lose_what_they_are_decoded_to(path: str) -> None:
    values = torch.tensor([-0.0, 0.0, 1.0, -1.0, -0.0, 2.0, -2.0, 2.0])
    found, lost = encoded(op, values, 8)
    assert torch.equal(decoded(op, found[None], 8, 8) + lost, values)


@pytest.mark.parametrize("size", [1, 9, 64, 2049])
def test_decoded_and_lost_are_the_values(size: int, path: str) -> None:
    values = values_of(size)
    found, lost = encoded(op, values, 64)
    out = decoded(op, found[None], size, 64)
    assert ((out + lost - values).abs() <= EPS * (values.abs() + out.abs())).all()  # two roundings


@quiet
def test_a_sum_beyond_float32_makes_the_block_void(interpreted: None) -> None:
    found, _ = encoded(op, torch.full((64,), 3e38), 64)
    assert decoded(op, found[None], 64, 64).isinf().all()


@pytest.mark.parametrize("size", [1, 65, 2049])
def test_a_factor_multiplies_the_values_first(interpreted: None, size: int) -> None:
    values = values_of(size)
    out, lost = torch.empty(op.encoded_bytes(size, 64), dtype=torch.uint8), torch.empty(size)
    op.encode(values, out, 64, lost=lost, factor=1 / 3)
    _check(out, lost, values * (1 / 3), 64)
    assert same_bits(values, values_of(size))


@pytest.mark.parametrize("size", [1, 65, 5003])
def test_reference_sums_in_rank_order(size: int) -> None:
    codes, start = rows(op, [values_of(size, seed) for seed in range(4)], 64), values_of(size, 9)
    assert same_bits(decoded(op, codes, size, 64, start), summed(op, codes, size, 64, start))  # products are exact


@given(st.lists(st.booleans(), max_size=70))
def test_bits_come_back(bits: list[bool]) -> None:
    negative = torch.tensor(bits, dtype=torch.bool)
    packed = op.pack(negative)
    assert packed.numel() == -(-len(bits) // 8)
    assert torch.equal(op.unpack(packed)[: len(bits)] < 0, negative)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"encoded must be uint8 \[R, 6\], a row for each rank.*\[1, 5\]"):
        op.decode_sum(torch.zeros(1, 5, dtype=torch.uint8), torch.zeros(9)[:8].repeat(2), 16)


def test_cost_counts_what_is_moved() -> None:
    assert op.cost_encode(1 << 20).bytes == (1 << 20) * 12 + (1 << 17) + 4 * 4096
    assert op.cost_decode_sum(1 << 20, ranks=7, add=True).bytes == (1 << 20) * 8 + 7 * ((1 << 17) + 4 * 4096)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [*BLOCKS, 1000])
@pytest.mark.parametrize("size", [*SIZES, (1 << 20) + 3])
def test_gpu_is_the_formula(size: int, block: int) -> None:
    values, residual = values_of(size), values_of(size, 1)
    found, lost = encoded(op, values.cuda(), block, residual.cuda())
    _check(found.cpu(), lost.cpu(), values + residual, block)
    again, _ = encoded(op, values.cuda(), block, residual.cuda())
    assert torch.equal(found, again)

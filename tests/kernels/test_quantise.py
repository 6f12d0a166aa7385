"""Eight-bit codes by blocks: bits of the reference and of the kernels, sums, limits, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel.kernels import quantise as op
from tests.kernels.code_cases import (
    BLOCKS,
    SIZES,
    decoded,
    encoded,
    reference,
    rows,
    same_bits,
    values_of,
)

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("block", [*BLOCKS, 100])  # 100: a size that kernels don't take
def test_reference_is_the_formula(block: int) -> None:
    x = values_of(5003)
    found, lost = reference(op, x, block)
    cut = 4 * -(-len(x) // block)
    scales = found[:cut].view(torch.float32).double().repeat_interleave(block)[: len(x)]
    codes = found[cut:].view(torch.int8).double()
    largest = torch.cat([part.abs().max()[None] for part in x.split(block)]).double()
    assert torch.equal(found[:cut].view(torch.float32), (largest / 127).float())
    assert codes.abs().max() <= 127
    sent = scales > op.SMALLEST_SCALE
    # Half a step, and two roundings of up to 127 steps on the way to the code.
    assert ((x.double() - scales * codes).abs() <= scales * (0.5 + 127 * EPS))[sent].all()
    assert (codes[~sent] == 0).all()
    assert ((x.double() - scales * codes - lost).abs() <= EPS * x.double().abs() + 1e-45).all()


@pytest.mark.sample(5)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", SIZES)
def test_kernel_writes_the_references_bits(interpreted: None, size: int, block: int) -> None:
    values, residual = values_of(size), values_of(size, 1)
    for added in (None, residual):
        found, lost = encoded(op, values, block, added)
        bytes_, left = reference(op, values, block, added)
        assert torch.equal(found, bytes_)
        assert same_bits(lost, left)
    assert same_bits(values, values_of(size))


@pytest.mark.parametrize("size", [1, 65, 2049])
def test_a_factor_multiplies_the_values_first(interpreted: None, size: int) -> None:
    values, residual = values_of(size), values_of(size, 1)
    for added in (None, residual):
        out, lost = torch.empty(op.encoded_bytes(size, 64), dtype=torch.uint8), torch.empty(size)
        op.encode(values, out, 64, added, lost, factor=1 / 3)
        bytes_, left = reference(op, values * (1 / 3), 64, added)
        assert torch.equal(out, bytes_)
        assert same_bits(lost, left)
    assert same_bits(values, values_of(size))


def test_kernel_rounds_half_to_even(interpreted: None) -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    found, _ = encoded(op, x, 8)
    assert found[4:].view(torch.int8).tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@pytest.mark.parametrize("value", [1e-45, -1e-38, 1.2e-35, 1.3e-35, 3.4e38])
def test_ends_of_the_range(interpreted: None, value: float) -> None:
    values = torch.full((100,), value)
    found, lost = encoded(op, values, 64)
    out = decoded(op, found[None], 100, 64)
    assert torch.equal(found, reference(op, values, 64)[0])
    assert out.isfinite().all()
    torch.testing.assert_close(out + lost, values, rtol=EPS, atol=0)


def test_sum_is_near_that_of_float64() -> None:
    values = [values_of(5003, seed) for seed in range(4)]
    codes, start = rows(op, values, 64), values_of(5003, 9)
    found = decoded(op, codes, 5003, 64, start)
    exact, magnitude = start.double(), start.abs().double()
    for row in codes:
        part = row[: 4 * 79].view(torch.float32).double().repeat_interleave(64)[:5003] * row[4 * 79 :].view(torch.int8)
        exact, magnitude = exact + part, magnitude + part.abs()
    # A product and a sum are rounded for each rank.
    assert ((found - exact).abs() <= len(values) * EPS * magnitude).all()


@pytest.mark.parametrize(
    ("codes", "out", "reason"),
    [
        (torch.zeros(1, 12, dtype=torch.uint8), torch.zeros(8, dtype=torch.int32), "out must be.*int32"),
        (torch.zeros(1, 11, dtype=torch.uint8), torch.zeros(8), r"encoded must be uint8 \[R, 12\].*\[1, 11\]"),
        (torch.zeros(0, 12, dtype=torch.uint8), torch.zeros(8), r"a row for each rank. Found: torch.uint8 \[0, 12\]"),
        (torch.zeros(2, 13, dtype=torch.uint8)[:, :12], torch.zeros(8), r"multiples of 4 bytes.*strides \(13, 1\)"),
        (torch.zeros(12, 2, dtype=torch.uint8).t(), torch.zeros(8), "rows of encoded must be contiguous"),
    ],
    ids=["dtype", "size", "no rank", "stride", "transposed"],
)
def test_rows_that_do_not_fit_are_refused(codes: Tensor, out: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        op.decode_sum(codes, out, 8)


def test_cost_counts_what_is_moved() -> None:
    assert op.cost_encode(1 << 20).bytes == (1 << 20) * (4 + 4 + 1 + 4) + 4 * 1024
    assert op.cost_encode(1 << 20, residual=False, lost=False).bytes == (1 << 20) * 5 + 4 * 1024
    assert op.cost_decode_sum(1 << 20, ranks=7, add=True).bytes == (1 << 20) * (7 + 4 + 4) + 7 * 4 * 1024
    assert op.cost_decode_sum(1 << 20, ranks=7, add=True).flops == (1 << 20) * 14


@pytest.mark.gpu
@pytest.mark.parametrize("block", [*BLOCKS, 100])
@pytest.mark.parametrize("size", [*SIZES, (1 << 20) + 3])
def test_gpu_writes_the_bits_of_the_cpu(size: int, block: int) -> None:
    values, residual = values_of(size), values_of(size, 1)
    found, lost = encoded(op, values.cuda(), block, residual.cuda())
    bytes_, left = reference(op, values, block, residual)
    assert torch.equal(found.cpu(), bytes_)
    assert same_bits(lost.cpu(), left)

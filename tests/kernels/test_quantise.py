"""Eight-bit codes by blocks: bits of the reference and of the kernels, sums, limits, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accel.kernels import quantise as op
from tests.kernels.code_cases import (
    BLOCKS,
    SIZES,
    decoded,
    encoded,
    on_gpu,
    reference,
    refused,
    rows,
    same_bits,
    summed,
    values_of,
)
from tests.kernels.contract import opcheck

EPS = torch.finfo(torch.float32).eps
quiet = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of infinities and NaN


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


def test_lost_may_be_the_residual_and_need_not_be_asked_for(interpreted: None) -> None:
    values, residual = values_of(2049), values_of(2049, 1)
    bytes_, left = reference(op, values, 64, residual)
    out = torch.empty_like(bytes_)
    op.encode(values, out, 64, residual, residual)
    assert torch.equal(out, bytes_)
    assert same_bits(residual, left)
    out.fill_(255)
    op.encode(values, out, 64)
    assert torch.equal(out, reference(op, values, 64)[0])


@quiet
@pytest.mark.parametrize("path", ["plain", "kernels"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 64, 199])
def test_what_is_not_finite_stays_so_in_its_block_alone(
    bad: float, place: int, path: str, request: pytest.FixtureRequest
) -> None:
    if path == "kernels":
        request.getfixturevalue("interpreted")
    values = torch.ones(200)
    values[place] = bad
    found, lost = encoded(op, values, 64)
    own = torch.arange(200) // 64 == place // 64
    out = decoded(op, found[None], 200, 64)
    assert out[own].isnan().all()
    assert lost[own].isnan().all()
    assert out[~own].isfinite().all()
    assert found[16:][own].eq(0).all()


@pytest.mark.parametrize("value", [1e-45, -1e-38, 1.2e-35, 1.3e-35, 3.4e38])
def test_ends_of_the_range(interpreted: None, value: float) -> None:
    values = torch.full((100,), value)
    found, lost = encoded(op, values, 64)
    out = decoded(op, found[None], 100, 64)
    assert torch.equal(found, reference(op, values, 64)[0])
    assert out.isfinite().all()
    torch.testing.assert_close(out + lost, values, rtol=EPS, atol=0)


@pytest.mark.sample(6)
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", [0, 1, 65, 2049, 5003])
def test_kernel_sums_in_rank_order(interpreted: None, size: int, block: int, ranks: int) -> None:
    codes = rows(op, [values_of(size, seed) for seed in range(ranks)], block)
    for start in (None, values_of(size, 9)):
        found = decoded(op, codes, size, block, start)
        if size:
            assert same_bits(found, summed(op, codes, size, block, start))


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


@pytest.mark.parametrize(("change", "reason"), refused(op))
def test_what_does_not_fit_is_refused(change: dict[str, Any], reason: str) -> None:
    call = {"values": torch.zeros(8), "encoded": torch.empty(op.encoded_bytes(8, 8), dtype=torch.uint8), "block": 8}
    op.encode(**call)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=reason):
        op.encode(**{**call, **change})


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


def test_ops_keep_their_contract_and_compile() -> None:
    values, codes = values_of(100), torch.zeros(op.encoded_bytes(100, 64), dtype=torch.uint8)
    opcheck(op.CODE.encode_op, (values, codes, 64, values.clone(), torch.zeros(100), 0.5))
    opcheck(op.CODE.decode_sum_op, (rows(op, [values, values], 64), torch.zeros(100), 64, True))

    def both(values: Tensor) -> Tensor:
        encoded, out = values.new_empty(108, dtype=torch.uint8), torch.empty_like(values)
        op.encode(values, encoded, 64)
        op.decode_sum(encoded[None], out, 64)
        return out

    assert same_bits(torch.compile(both, backend="aot_eager", fullgraph=True)(values), both(values))


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


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2049, (1 << 20) + 3])
def test_gpu_sums_as_the_reference(size: int) -> None:
    codes, start = rows(op, [values_of(size, seed) for seed in range(7)], 1024), values_of(size, 9)
    found = [decoded(op, on_gpu(codes), size, 1024, start.cuda()).cpu() for _ in range(2)]
    assert same_bits(found[0], summed(op, codes, size, 1024, start))
    assert same_bits(found[0], found[1])

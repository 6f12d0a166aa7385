# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of `quantise`: values to codes, scales and what was lost in one pass; the codes of all ranks to a sum.

Bits are those of the reference: divisions round to nearest, and products are not fused with sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.codes.block_codes import launch_decode_sum, launch_encode

_HALF_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 · 2²³: added and taken off again, it rounds |q| < 2²² half to even
_SMALLEST_SCALE = tl.constexpr(1e-37)


@triton.jit
def _places(N, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return rows [ROWS], whether they are there, elements [ROWS, BLOCK], and whether these are there."""
    if WHOLE:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        row_there = row < N // BLOCK
        n = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        there = row_there[:, None]
    else:
        row = tl.arange(0, ROWS).to(tl.int64) + N // BLOCK
        n = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        there = n < N
        row_there = row * BLOCK < N
    return row, row_there, n, there


@triton.jit
def _encode_kernel(
    values,  # [N]
    residual,  # [N], or None
    encoded,  # [4 B + N], bytes
    lost,  # [N], or None
    N,
    B,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, row_there, n, there = _places(N, WHOLE, ROWS, BLOCK)
    x = tl.load(values + n, mask=there, other=0.0)
    if residual is not None:
        x += tl.load(residual + n, mask=there, other=0.0)
    # As integers magnitudes have their own order, with NaN as the largest, which a maximum of floats would drop.
    bits = x.to(tl.int32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full([ROWS], 127.0, tl.float32))
    small = scale < _SMALLEST_SCALE
    inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.where(small, 1.0, scale))
    q = x * tl.where(small, 0.0, inverse)[:, None]
    whole = (q + _HALF_TO_EVEN) - _HALF_TO_EVEN
    # Where it rounds to 0, the sign is lost; −0 must stay −0 for `lost` to have the reference's bits.
    sign = q.to(tl.int32, bitcast=True) & -0x80000000
    whole = (whole.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    tl.store(encoded.to(tl.pointer_type(tl.float32)) + row, scale, mask=row_there)
    codes = encoded.to(tl.pointer_type(tl.int8)) + 4 * B
    tl.store(codes + n, tl.where(q == q, whole, 0.0).to(tl.int8), mask=there)
    if lost is not None:
        tl.store(lost + n, x - whole * scale[:, None], mask=there)


@triton.jit
def _decoded(encoded, B, row, row_there, n, there):
    """Return s q of one rank."""
    scale = tl.load(encoded.to(tl.pointer_type(tl.float32)) + row, mask=row_there, other=0.0)
    codes = encoded.to(tl.pointer_type(tl.int8)) + 4 * B
    return tl.load(codes + n, mask=there, other=0).to(tl.float32) * scale[:, None]


@triton.jit
def _decode_sum_kernel(
    encoded,  # [R, 4 B + N], bytes
    out,  # [N]
    N,
    B,
    R,
    stride,  # bytes from one rank's to the next one's
    ADD: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, row_there, n, there = _places(N, WHOLE, ROWS, BLOCK)
    total = _decoded(encoded, B, row, row_there, n, there)
    if ADD:
        total = tl.load(out + n, mask=there, other=0.0) + total
    place = encoded
    for _ in range(1, R):
        place += stride
        total += _decoded(place, B, row, row_there, n, there)
    tl.store(out + n, total, mask=there)


def encode(values: Tensor, encoded: Tensor, block: int, residual: Tensor | None, lost: Tensor | None) -> None:
    """Launch the encoding."""
    launch_encode(_encode_kernel, values, encoded, block, residual, lost)


def decode_sum(encoded: Tensor, out: Tensor, block: int, add: bool) -> None:
    """Launch the sum."""
    launch_decode_sum(_decode_sum_kernel, encoded, out, block, add)

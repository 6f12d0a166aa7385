# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of `sign_pack`: values to bits, scales and what was lost in one pass; the bits of all ranks to a sum.

A tile is [ROWS, BLOCK/8, 8], so that a byte is a sum along its last dimension, within a thread or two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.codes.block_codes import launch_decode_sum, launch_encode


@triton.jit
def _places(N, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return rows [ROWS] and whether they are there, bytes [ROWS, BLOCK/8] and theirs, elements [.., 8] and theirs."""
    BYTES: tl.constexpr = BLOCK // 8
    if WHOLE:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        row_there = row < N // BLOCK
        byte = row[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
        n = byte[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        byte_there = row_there[:, None]
        there = row_there[:, None, None]
    else:
        row = tl.arange(0, ROWS).to(tl.int64) + N // BLOCK
        row_there = row * BLOCK < N
        byte = row[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
        n = byte[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        byte_there = byte * 8 < N
        there = n < N
    return row, row_there, byte, byte_there, n, there


@triton.jit
def _encode_kernel(
    values,  # [N]
    residual,  # [N], or None
    encoded,  # [4 B + ⌈N/8⌉], bytes
    lost,  # [N], or None
    N,
    B,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, row_there, byte, byte_there, n, there = _places(N, WHOLE, ROWS, BLOCK)
    x = tl.load(values + n, mask=there, other=0.0)
    if residual is not None:
        x += tl.load(residual + n, mask=there, other=0.0)
    elements = tl.full([ROWS], BLOCK, tl.float32)
    if not WHOLE:
        elements = elements * 0.0 + (N % BLOCK)
    scale = tl.div_rn(tl.sum(tl.sum(tl.abs(x), 2), 1), elements)
    tl.store(encoded.to(tl.pointer_type(tl.float32)) + row, scale, mask=row_there)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    place = 7 - tl.arange(0, 8)[None, None, :]
    packed = tl.sum((sign != 0).to(tl.int32) << place, 2)
    tl.store(encoded + 4 * B + byte, packed.to(tl.uint8), mask=byte_there)
    if lost is not None:
        sent = (scale.to(tl.int32, bitcast=True)[:, None, None] | sign).to(tl.float32, bitcast=True)
        tl.store(lost + n, x - sent, mask=there)


@triton.jit
def _decoded(encoded, B, row, row_there, byte, byte_there):
    """Return ±s of one rank, [ROWS, BLOCK/8, 8]."""
    scale = tl.load(encoded.to(tl.pointer_type(tl.float32)) + row, mask=row_there, other=0.0)[:, None, None]
    packed = tl.load(encoded + 4 * B + byte, mask=byte_there, other=0).to(tl.int32)
    place = 7 - tl.arange(0, 8)[None, None, :]
    sign = (packed[:, :, None] >> place) << 31  # of a bit's own place: 0 − x would lose the sign of 0
    return (scale.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _decode_sum_kernel(
    encoded,  # [R, 4 B + ⌈N/8⌉], bytes
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
    row, row_there, byte, byte_there, n, there = _places(N, WHOLE, ROWS, BLOCK)
    total = _decoded(encoded, B, row, row_there, byte, byte_there)
    if ADD:
        total = tl.load(out + n, mask=there, other=0.0) + total
    rank = encoded
    for _ in range(1, R):
        rank += stride
        total += _decoded(rank, B, row, row_there, byte, byte_there)
    tl.store(out + n, total, mask=there)


def encode(values: Tensor, encoded: Tensor, block: int, residual: Tensor | None, lost: Tensor | None) -> None:
    """Launch the encoding."""
    launch_encode(_encode_kernel, values, encoded, block, residual, lost)


def decode_sum(encoded: Tensor, out: Tensor, block: int, add: bool) -> None:
    """Launch the sum."""
    launch_decode_sum(_decode_sum_kernel, encoded, out, block, add)

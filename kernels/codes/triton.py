# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of the block codes: values to codes, scales and what was lost in one pass; all ranks' codes to a sum.

BITS an element: 8 are integers, 1 is a sign. A tile of elements is [ROWS, BLOCK] or, for signs, [ROWS, BLOCK/8, 8], so
that a byte is a sum along its last dimension, within a thread or two. Divisions round to nearest, and products are not
fused with sums: integers are those of the reference to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.codes.block_code import LARGEST_BLOCK
from accel.kernels.launching import PLANS, LaunchPlan, PlannedKernel

EXACT = {"enable_fp_fusion": False}
"""Options of all launches."""
_ELEMENTS = 2048  # of a program, where blocks are smaller: 16 a thread, four loads of 16 bytes under way
_HALF_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 · 2²³: added and taken off again, it rounds |q| < 2²² half to even
_SMALLEST_SCALE = tl.constexpr(1e-37)
assert LARGEST_BLOCK <= _ELEMENTS


@triton.jit
def _places(N, BITS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return blocks [ROWS], bytes of codes and elements as offsets, and for each of them whether it is there."""
    BYTES: tl.constexpr = BLOCK * BITS // 8
    if WHOLE:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        row_there = row < N // BLOCK
    else:
        row = tl.arange(0, ROWS).to(tl.int64) + N // BLOCK
        row_there = row * BLOCK < N
    byte = row[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    if BITS == 1:
        n = byte[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    else:
        n = byte
    if WHOLE:
        byte_there = row_there[:, None]
        there = byte_there
        if BITS == 1:
            there = row_there[:, None, None]
    elif BITS == 1:
        byte_there = byte * 8 < N
        there = n < N
    else:
        there = n < N
        byte_there = there
    return row, row_there, byte, byte_there, n, there


@triton.jit
def _store_integers(x, encoded, lost, B, row, row_there, n, there, ROWS: tl.constexpr):
    """Write scales, integers, and what these lost of x."""
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
def _store_signs(
    x, encoded, lost, N, B, row, row_there, byte, byte_there, n, there,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write scales, bits, and what these lost of x."""
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


@PlannedKernel
@triton.jit
def _encode_kernel(
    values,  # [N]
    residual,  # [N], or None
    encoded,  # [4 B + ⌈N BITS/8⌉], bytes
    lost,  # [N], or None
    factor,  # of the values, or None
    N,
    B,
    BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, row_there, byte, byte_there, n, there = _places(N, BITS, WHOLE, ROWS, BLOCK)
    x = tl.load(values + n, mask=there, other=0.0)
    if factor is not None:
        x *= factor
    if residual is not None:
        x += tl.load(residual + n, mask=there, other=0.0)
    if BITS == 1:
        _store_signs(x, encoded, lost, N, B, row, row_there, byte, byte_there, n, there, WHOLE, ROWS, BLOCK)
    else:
        _store_integers(x, encoded, lost, B, row, row_there, n, there, ROWS)


@triton.jit
def _decoded(encoded, B, BITS: tl.constexpr, row, row_there, byte, byte_there):
    """Return what one rank's codes stand for."""
    scale = tl.load(encoded.to(tl.pointer_type(tl.float32)) + row, mask=row_there, other=0.0)
    if BITS == 1:
        packed = tl.load(encoded + 4 * B + byte, mask=byte_there, other=0).to(tl.int32)
        place = 7 - tl.arange(0, 8)[None, None, :]
        sign = (packed[:, :, None] >> place) << 31  # of a bit's own place: 0 − x would lose the sign of 0
        x = (scale[:, None, None].to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        codes = encoded.to(tl.pointer_type(tl.int8)) + 4 * B
        x = tl.load(codes + byte, mask=byte_there, other=0).to(tl.float32) * scale[:, None]
    return x


@PlannedKernel
@triton.jit
def _decode_sum_kernel(
    encoded,  # [R, 4 B + ⌈N BITS/8⌉], bytes
    out,  # [N]
    N,
    B,
    R,
    stride,  # bytes from one rank's to the next one's
    ADD: tl.constexpr,
    BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, row_there, byte, byte_there, n, there = _places(N, BITS, WHOLE, ROWS, BLOCK)
    total = _decoded(encoded, B, BITS, row, row_there, byte, byte_there)
    if ADD:
        total = tl.load(out + n, mask=there, other=0.0) + total
    rank = encoded
    for _ in range(1, R):
        rank += stride
        total += _decoded(rank, B, BITS, row, row_there, byte, byte_there)
    tl.store(out + n, total, mask=there)


class Launch(NamedTuple):
    """One launch over some blocks of a tensor."""

    programs: int
    rows: int
    """Blocks of a program."""
    whole: bool
    """Whether all blocks are full: then masks are equal along a block, and loads and stores are vectors."""


def launches(numel: int, block: int) -> Iterator[Launch]:
    """Yield the launches that cover `numel` elements: the full blocks, then what is left."""
    rows = max(_ELEMENTS // block, 1)
    full, rest = divmod(numel, block)
    if full:
        yield Launch(-(-full // rows), rows, True)
    if rest:
        yield Launch(1, 1, False)


def _plans(kernel: PlannedKernel, numel: int, block: int, *numbers: float, **form: Any) -> list[LaunchPlan]:
    return [
        kernel.plan((programs,), *numbers, WHOLE=whole, ROWS=rows, BLOCK=block, **form, **EXACT)
        for programs, rows, whole in launches(numel, block)
    ]


def encode(
    bits: int, values: Tensor, encoded: Tensor, block: int, residual: Tensor | None, lost: Tensor | None, factor: float
) -> None:
    """Launch the encoding, over all blocks."""
    unscaled = (None,) if factor == 1.0 else ()
    for plan in _encode_plans(bits, values.numel(), block, factor):
        plan(values, residual, encoded, lost, *unscaled)


@functools.lru_cache(PLANS)
def _encode_plans(bits: int, numel: int, block: int, factor: float) -> list[LaunchPlan]:
    scaling = () if factor == 1.0 else (factor,)
    return _plans(_encode_kernel, numel, block, *scaling, numel, -(-numel // block), BITS=bits)


def decode_sum(bits: int, encoded: Tensor, out: Tensor, block: int, add: bool) -> None:
    """Launch the sum, over all blocks."""
    for plan in _decode_sum_plans(bits, out.numel(), block, encoded.shape[0], encoded.stride(0), add):
        plan(encoded, out)


@functools.lru_cache(PLANS)
def _decode_sum_plans(bits: int, numel: int, block: int, ranks: int, stride: int, add: bool) -> list[LaunchPlan]:
    numbers = numel, -(-numel // block), ranks, stride
    return _plans(_decode_sum_kernel, numel, block, *numbers, ADD=add, BITS=bits)

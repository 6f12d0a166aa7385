# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of `compact`: sources of the rows, rows by their sources, and back. Every element is written once."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.launching import PLANS, LaunchPlan, PlannedKernel, ceil_div, next_power_of_2

_ELEMENTS = 1024  # of a program's block


@PlannedKernel
@triton.jit
def _sources_kernel(
    mask,  # [P]
    ends,  # [P], int64: rows under the mask up to and with this one
    source,  # [S]
    P,
    S,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(ends + n, mask=n < P, other=0) - 1
    selected = tl.load(mask + n, mask=n < P, other=0).to(tl.int32) != 0
    tl.store(source + slot, n, mask=(n < P) & selected & (slot < S))
    count = tl.load(ends + P - 1)
    tl.store(source + n, tl.zeros([BLOCK], tl.int64) + P, mask=(n < S) & (n >= count))


@PlannedKernel
@triton.jit
def _take_kernel(
    x,  # [P, C]
    source,  # [S]
    out,  # [S, C]
    pad,  # []
    P,
    S,
    C,
    across,  # blocks of columns
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0)
    row = (block // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (block % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.load(source + row, mask=row < S, other=0)
    written = (row < S)[:, None] & (column < C)[None, :]
    there = written & (p < P)[:, None]
    values = tl.load(x + p[:, None] * C + column[None, :], mask=there, other=0)
    values = tl.where(there, values, tl.load(pad))
    tl.store(out + row[:, None] * C + column[None, :], values, mask=written)


@PlannedKernel
@triton.jit
def _put_kernel(
    rows,  # [S, C]
    source,  # [S]
    out,  # [P, C], zeros
    P,
    S,
    C,
    across,  # blocks of columns
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0)
    row = (block // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (block % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    p = tl.load(source + row, mask=row < S, other=P)
    there = (p < P)[:, None] & (column < C)[None, :]
    values = tl.load(rows + row[:, None] * C + column[None, :], mask=there, other=0)
    tl.store(out + p[:, None] * C + column[None, :], values, mask=there)


def sources(mask_P: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Launch the search for sources."""
    (total,) = mask_P.shape
    source = mask_P.new_empty(size, dtype=torch.int64)
    if total == 0:
        return source.zero_(), mask_P.new_zeros((), dtype=torch.int64)
    ends = mask_P.cumsum(0)
    _sources_plan(total, size)(mask_P.contiguous(), ends, source)
    return source, ends[-1].clone()


@functools.lru_cache(PLANS)
def _sources_plan(total: int, size: int) -> LaunchPlan:
    return _sources_kernel.plan((ceil_div(max(total, size), _ELEMENTS),), total, size, BLOCK=_ELEMENTS)


def take(x_PC: Tensor, source_S: Tensor, pad: float) -> Tensor:
    """Launch the taking of rows."""
    (total, columns), (size,) = x_PC.shape, source_S.shape
    out = x_PC.new_empty(size, columns)
    if size == 0 or columns == 0:
        return out
    if total == 0:
        return out.fill_(pad)
    _take_plan(total, size, columns)(x_PC.contiguous(), source_S, out, x_PC.new_full((), pad))
    return out


@functools.lru_cache(PLANS)
def _take_plan(total: int, size: int, columns: int) -> LaunchPlan:
    grid, across, blocks = row_blocks(size, columns)
    return _take_kernel.plan(grid, total, size, columns, across, **blocks)


def put(rows_SC: Tensor, source_S: Tensor, total: int) -> Tensor:
    """Launch the putting back of rows."""
    size, columns = rows_SC.shape
    out = rows_SC.new_zeros(total, columns)
    if total == 0 or columns == 0 or size == 0:
        return out
    _put_plan(total, size, columns)(rows_SC.contiguous(), source_S, out)
    return out


@functools.lru_cache(PLANS)
def _put_plan(total: int, size: int, columns: int) -> LaunchPlan:
    grid, across, blocks = row_blocks(size, columns)
    return _put_kernel.plan(grid, total, size, columns, across, **blocks)


def row_blocks(size: int, columns: int) -> tuple[tuple[int], int, dict[str, int]]:
    """Return the grid, how many blocks lie side by side, and the rows and columns of one."""
    wide = min(next_power_of_2(columns), _ELEMENTS)
    tall, across = _ELEMENTS // wide, ceil_div(columns, wide)
    return (ceil_div(size, tall) * across,), across, {"ROWS": tall, "COLUMNS": wide}

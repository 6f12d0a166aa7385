# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of `gather_rows`: one row per group, and its transpose. Every element is written once."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.launching import PLANS, LaunchPlan, PlannedKernel, ceil_div, next_power_of_2
from accel.kernels.rows.compact_triton import row_blocks

_ELEMENTS = 1024  # of a program's block


@PlannedKernel
@triton.jit
def _gather_kernel(
    x,  # [N, G, C], any strides
    index,  # [N]
    out,  # [N, C]
    N,
    G,
    C,
    x_group,
    x_row,
    x_column,
    across,  # blocks of columns
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0)
    n = (block // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # In 64 bits: columns may lie far apart, where x was permuted.
    c = (block % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(index + n, mask=n < N, other=-1).to(tl.int64)
    there = (row >= 0) & (row < G)
    written = (n < N)[:, None] & (c < C)[None, :]
    source = x + (n * x_group + row * x_row)[:, None] + (c * x_column)[None, :]
    tl.store(out + n[:, None] * C + c[None, :], tl.load(source, mask=written & there[:, None], other=0), mask=written)


@PlannedKernel
@triton.jit
def _scatter_kernel(
    rows,  # [N, C]
    index,  # [N]
    out,  # [N, G, C]
    G,
    C,
    elements,  # G·C
    blocks,  # of a group
    SIZE: tl.constexpr,
):
    # One program a group and block of its G·C elements: zeros and the row are written in one pass.
    n = (tl.program_id(0) // blocks).to(tl.int64)
    element = (tl.program_id(0) % blocks).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    row = tl.load(index + n).to(tl.int64)
    c = element - row * C
    mine = (row >= 0) & (row < G) & (c >= 0) & (c < C)
    values = tl.load(rows + n * C + c, mask=mine, other=0)
    tl.store(out + n * elements + element, values, mask=element < elements)


def gather(x_NGC: Tensor, index_N: Tensor) -> Tensor:
    """Launch the gather."""
    groups, rows, columns = x_NGC.shape
    out = x_NGC.new_empty(groups, columns)
    if groups == 0 or columns == 0:
        return out
    if rows == 0:
        return out.zero_()
    _gather_plan(groups, rows, columns, *x_NGC.stride())(x_NGC, index_N.contiguous(), out)
    return out


@functools.lru_cache(PLANS)
def _gather_plan(groups: int, rows: int, columns: int, *strides: int) -> LaunchPlan:
    grid, across, blocks = row_blocks(groups, columns)
    return _gather_kernel.plan(grid, groups, rows, columns, *strides, across, **blocks)


def scatter(rows_NC: Tensor, index_N: Tensor, group: int) -> Tensor:
    """Launch the scatter."""
    groups, columns = rows_NC.shape
    out = rows_NC.new_empty(groups, group, columns)
    if groups == 0 or group == 0 or columns == 0:
        return out
    _scatter_plan(groups, group, columns)(rows_NC.contiguous(), index_N.contiguous(), out)
    return out


@functools.lru_cache(PLANS)
def _scatter_plan(groups: int, group: int, columns: int) -> LaunchPlan:
    elements = group * columns
    size = min(next_power_of_2(elements), _ELEMENTS)
    blocks = ceil_div(elements, size)
    return _scatter_kernel.plan((groups * blocks,), group, columns, elements, blocks, SIZE=size)

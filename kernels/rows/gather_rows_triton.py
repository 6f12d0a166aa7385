# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of `gather_rows`: one row per group, and its transpose. Every element is written once."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.launching import PLANS, LaunchPlan, PlannedKernel, ceil_div, next_power_of_2

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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
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
    N,
    G,
    C,
    SIZE: tl.constexpr,
):
    # One program a group and block of its G·C elements: zeros and the row are written in one pass.
    n = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    row = tl.load(index + n).to(tl.int64)
    mine = element // C == row
    written = element < G * C
    values = tl.load(rows + n * C + element % C, mask=written & mine, other=0)
    tl.store(out + n * G * C + element, values, mask=written)


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
    block_columns = min(next_power_of_2(columns), _ELEMENTS)
    block_rows = _ELEMENTS // block_columns
    grid = (ceil_div(groups, block_rows), ceil_div(columns, block_columns))
    return _gather_kernel.plan(grid, groups, rows, columns, *strides, ROWS=block_rows, COLUMNS=block_columns)


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
    size = min(next_power_of_2(group * columns), _ELEMENTS)
    return _scatter_kernel.plan((groups, ceil_div(group * columns, size)), groups, group, columns, SIZE=size)

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of `threshold`: maxima of blocks, a count for each tile, and the elements written at their places.

Magnitudes are compared as integers: floats without sign have the same order, and NaN is the largest.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.launching import PLANS, LaunchPlan, PlannedKernel, ceil_div
from accel.kernels.rows import BLOCK

_ROWS = 32  # blocks of a program, 2,048 elements: 16 a thread


@triton.jit
def _places(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows [ROWS], where the tile begins, and elements [ROWS, WIDTH] from there on, in 32 bits."""
    tile = tl.program_id(0).to(tl.int64)
    return (
        tile * ROWS + tl.arange(0, ROWS),
        tile * (ROWS * WIDTH),
        tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :],
    )


@triton.jit
def _magnitudes(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@PlannedKernel
@triton.jit
def _block_maxima_kernel(
    values,  # [N]
    maxima,  # [B]
    N,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, begin, n = _places(ROWS, WIDTH)
    largest = tl.max(_magnitudes(tl.load(values + begin + n, mask=begin + n < N, other=0.0)), 1)
    tl.store(maxima + row, largest.to(tl.float32, bitcast=True), mask=row * WIDTH < N)


@triton.jit
def _at_least(values, least, maxima, N, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return values [ROWS, WIDTH], 1 where they are at least the threshold, and which element each is of the tile."""
    row, begin, n = _places(ROWS, WIDTH)
    floor = _magnitudes(tl.load(least))
    there = begin + n < N
    if maxima is not None:
        largest = _magnitudes(tl.load(maxima + row, mask=row * WIDTH < N, other=0.0))
        there = there & (largest >= floor)[:, None]
    x = tl.load(values + begin + n, mask=there, other=0.0)
    return x, (there & (_magnitudes(x) >= floor)).to(tl.int32), begin, n


@PlannedKernel
@triton.jit
def _tally_kernel(
    values,  # [N]
    least,  # []
    maxima,  # [B], or None
    counts,  # [T]: elements selected in each tile
    N,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    _, selected, _, _ = _at_least(values, least, maxima, N, ROWS, WIDTH)
    tl.store(counts + tl.program_id(0), tl.sum(tl.sum(selected, 1), 0))


@PlannedKernel
@triton.jit
def _take_kernel(
    values,  # [N]
    least,  # []
    maxima,  # [B], or None
    ends,  # [T]: elements selected up to and including each tile
    positions,  # [S]
    selected,  # [S]
    N,
    S,
    T,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tile = tl.program_id(0)
    # This program's share of the entries past the last selected element.
    entry = tile.to(tl.int64) * (ROWS * WIDTH) + tl.arange(0, ROWS * WIDTH)
    total = tl.load(ends + T - 1)
    beyond = (entry < S) & (entry >= total)
    tl.store(positions + entry, tl.zeros([ROWS * WIDTH], tl.int64) + N, mask=beyond)
    tl.store(selected + entry, tl.zeros([ROWS * WIDTH], tl.float32), mask=beyond)
    before = tl.load(ends + tile - 1, mask=(tile > 0) & (tile <= T), other=0)
    after = tl.load(ends + tile, mask=tile < T, other=0)
    if (after > before) & (before < S):
        x, is_selected, begin, n = _at_least(values, least, maxima, N, ROWS, WIDTH)
        in_row = tl.sum(is_selected, 1)
        slot = (tl.cumsum(in_row, 0) - in_row)[:, None] + tl.cumsum(is_selected, 1) - is_selected
        written = (is_selected != 0) & (before + slot < S)
        tl.store(positions + before + slot, begin + n, mask=written)
        tl.store(selected + before + slot, x, mask=written)


def block_maxima(values: Tensor) -> Tensor:
    """Launch the search for maxima."""
    numel = values.numel()
    maxima = values.new_empty(ceil_div(numel, BLOCK))
    if numel:
        _block_maxima_plan(numel)(values, maxima)
    return maxima


@functools.lru_cache(PLANS)
def _block_maxima_plan(numel: int) -> LaunchPlan:
    grid = (ceil_div(ceil_div(numel, BLOCK), _ROWS),)
    return _block_maxima_kernel.plan(grid, numel, ROWS=_ROWS, WIDTH=BLOCK)


def tally(values: Tensor, least: Tensor, maxima: Tensor | None) -> Tensor:
    """Launch the count; return [T], int64: how many there are up to and with each tile."""
    numel = values.numel()
    counts = values.new_empty(ceil_div(numel, _ROWS * BLOCK), dtype=torch.int32)
    if numel:
        _tally_plan(numel)(values, least, maxima, counts)
    return counts.cumsum(0)


@functools.lru_cache(PLANS)
def _tally_plan(numel: int) -> LaunchPlan:
    return _tally_kernel.plan((ceil_div(numel, _ROWS * BLOCK),), numel, ROWS=_ROWS, WIDTH=BLOCK)


def take(
    values: Tensor, least: Tensor, maxima: Tensor | None, ends: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the writing of positions and values."""
    numel = values.numel()
    positions, selected = values.new_empty(size, dtype=torch.int64), values.new_empty(size)
    if numel == 0:
        return positions.zero_(), selected.zero_(), ends.new_zeros(())
    if size:
        _take_plan(numel, size, ends.shape[0])(values, least, maxima, ends, positions, selected)
    return positions, selected, ends[-1].clone()


@functools.lru_cache(PLANS)
def _take_plan(numel: int, size: int, tiles: int) -> LaunchPlan:
    grid = (ceil_div(max(numel, size), _ROWS * BLOCK),)
    return _take_kernel.plan(grid, numel, size, tiles, ROWS=_ROWS, WIDTH=BLOCK)

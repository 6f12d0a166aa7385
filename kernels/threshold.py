"""Which elements of a vector have at least some magnitude: positions, values and their number, in ascending order.

    maxima[b] = max |x| over block b of 64
    positions = the n with |x[n]| ≥ least, ascending, then N, up to `size` of them        count = how many there are
    values[j] = x[positions[j]] if positions[j] < N else 0

N elements, S = size. NaN counts as the largest magnitude, and is selected by any `least`. Two passes: tiles are
counted, and after a cumulative sum over tiles each writes its own range, so order and bits are the same in every run.
Given maxima, blocks without a selected element are not read. `accel.kernels.compact` does this for rows under a given
mask; here that would be ten bytes of mask and sums for each four of x.

Where thresholds come from: Lin et al. 2018, https://arxiv.org/abs/1712.01887, section 3.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accel.kernels.compact import sources_ref
from accel.kernels.rows import BLOCK
from accel.kernels.support import Cost, runs_triton
from accel.profiler.errors import InvalidArgument


class Selected(NamedTuple):
    """Elements at or above a threshold.

    Attributes:
        positions: [S], int64, ascending, N where there are no more.
        values: [S], 0 where there are no more.
        count: [], int64: how many there are, more than S if some were left out.
    """

    positions: Tensor
    values: Tensor
    count: Tensor  # type: ignore[assignment]  # replaces tuple.count, which is not needed


def takes(values: Tensor) -> bool:
    """Return whether kernels search these values: float32 on CUDA with triton."""
    return values.dtype == torch.float32 and runs_triton(values)


def block_maxima_ref(values_N: Tensor) -> Tensor:
    """Return max |x| of each block in plain torch."""
    return torch.nn.functional.pad(values_N, (0, -len(values_N) % BLOCK)).view(-1, BLOCK).abs().amax(1)


def at_least_ref(values_N: Tensor, least: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions [S], values [S] and count [] in plain torch."""
    positions, count = sources_ref((values_N.abs() < least).logical_not_(), size)
    selected = torch.cat((values_N, values_N.new_zeros(1))).index_select(0, positions)
    return positions, selected, count


def _block_maxima(values: Tensor) -> Tensor:
    if takes(values):
        from accel.kernels.rows import threshold_triton

        return threshold_triton.block_maxima(values)
    return block_maxima_ref(values)


def _at_least(values: Tensor, least: Tensor, size: int | None, maxima: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return so many of them, or all: their number synchronises the host with the device."""
    if takes(values):
        from accel.kernels.rows import threshold_triton

        ends = threshold_triton.tally(values, least, maxima)
        if size is None:
            size = int(ends[-1]) if len(ends) else 0
        return threshold_triton.take(values, least, maxima, ends, size)
    if size is None:
        size = int((values.abs() < least).logical_not_().sum())
    return at_least_ref(values, least, size)


# torch.compile sees opaque ops; eager calls go around them, for half the overhead.
_block_maxima_op = torch.library.custom_op("accel::block_maxima", _block_maxima, mutates_args=())
_at_least_op = torch.library.custom_op("accel::at_least", _at_least, mutates_args=())


@_block_maxima_op.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty((values.shape[0] + BLOCK - 1) // BLOCK)


@_at_least_op.register_fake
def _(values: Tensor, least: Tensor, size: int, maxima: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return (
        values.new_empty(size, dtype=torch.int64),
        values.new_empty(size),
        values.new_empty((), dtype=torch.int64),
    )


def block_maxima(values: Tensor) -> Tensor:
    """Return the largest magnitude of each 64 elements.

    Args:
        values: [N], float32, contiguous.

    Returns:
        [⌈N/64⌉], float32; NaN where a block holds one.

    Raises:
        InvalidArgument: if the values are of another kind.

    Example:
        >>> block_maxima(torch.tensor([1.0, -3.0, 2.0]))
        tensor([3.])
    """
    _check(values)
    return _block_maxima_op(values) if torch.compiler.is_compiling() else _block_maxima(values)


def at_least(values: Tensor, least: Tensor, size: int | None = None, maxima: Tensor | None = None) -> Selected:
    """Find the elements whose magnitude is at least a threshold.

    Args:
        values: [N], float32, contiguous.
        least: [], float32, on the same device, ≥ 0 and not NaN, which is not checked.
        size: how many to return, 0 or more: of more, the first; nothing waits for the device. None (default) for as
            many as there are, which the host waits for, once.
        maxima: `block_maxima(values)`, so that blocks without such elements are not read; None (default) reads all.

    Returns:
        positions: [size], int64, ascending, padded with N.
        values: [size], float32, padded with 0.
        count: [], int64, on the device: how many there are, whatever the size.

    Raises:
        InvalidArgument: if the tensors don't fit, or the size is below 0.

    Example:
        >>> at_least(torch.tensor([1.0, -3.0, 2.0]), torch.tensor(2.0), size=3)
        Selected(positions=tensor([1, 2, 3]), values=tensor([-3.,  2.,  0.]), count=tensor(2))
    """
    _check(values)
    _check_threshold(values, least, size, maxima)
    run = _at_least if size is None or not torch.compiler.is_compiling() else _at_least_op
    return Selected(*run(values, least, size, maxima))


def _check(values: Tensor) -> None:
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        layout = "" if values.is_contiguous() else ", not contiguous"
        raise InvalidArgument(
            "threshold: values must be contiguous float32 [N]. "
            f"Found: {values.dtype} {list(values.shape)}{layout}. Flatten or convert them."
        )


def _check_threshold(values: Tensor, least: Tensor, size: int | None, maxima: Tensor | None) -> None:
    if least.dtype != torch.float32 or least.dim() or least.device != values.device:
        raise InvalidArgument(
            f"threshold: least must be float32 [] on {values.device}, as the values. "
            f"Found: {least.dtype} {list(least.shape)} on {least.device}. Use values.new_tensor(number)."
        )
    if size is not None and size < 0:
        raise InvalidArgument(f"threshold: size must be 0 or more. Found: {size}. None returns as many as there are.")
    if maxima is None:
        return
    blocks = -(-len(values) // BLOCK)
    fits = maxima.dtype == torch.float32 and maxima.shape == (blocks,) and maxima.is_contiguous()
    if not fits or maxima.device != values.device:
        raise InvalidArgument(
            f"threshold: maxima must be contiguous float32 [{blocks}] on {values.device}, one for each {BLOCK} values. "
            f"Found: {maxima.dtype} {list(maxima.shape)} on {maxima.device}. Use block_maxima(values)."
        )


def cost_block_maxima(numel: int) -> Cost:
    """Return the least work of `block_maxima`."""
    return Cost(flops=2 * numel, bytes=4 * numel + 4 * -(-numel // BLOCK))


def cost_at_least(numel: int, selected: int, size: int | None = None, blocks: int | None = None) -> Cost:
    """Return the least work of `at_least`.

    Args:
        numel: N.
        selected: elements at or above the threshold.
        size: entries returned; None (default) for all that are selected.
        blocks: blocks with such elements, where maxima are given; None (default) where they are not.
    """
    entries = selected if size is None else size
    # Counting and writing are two passes: an element's position is known only once all before it are counted.
    read_bytes = 4 * numel if blocks is None else 4 * -(-numel // BLOCK) + 4 * BLOCK * blocks
    return Cost(flops=2 * numel if blocks is None else 2 * BLOCK * blocks, bytes=2 * read_bytes + 12 * entries)

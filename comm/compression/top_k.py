"""The k largest magnitudes of a vector, exactly, at the cost of little more than one pass over it.

    blocks of 64:  m_b = max |x| over block b;  T = the k-th largest m_b

k blocks hold an element ≥ T each, so the k-th largest magnitude is ≥ T, and whatever is larger stands in a block with
m_b ≥ T: k blocks are enough to look at. Ties, equal values and zeros change nothing in that bound.

Where k is a larger share than 1/256, few blocks are left out. There a sample of runs of one cache line estimates T, all
elements ≥ T are collected, and T sinks until they are k: the estimate costs time where it is wrong, never the result.

One thread, 2²⁰ normal float32, taking turns: torch.topk of the magnitudes costs 2.4 times as much CPU time at
k = 2²⁰/1000, 4.3 times at 2²⁰/64, 1.5 times at 2²⁰/4.

Source: threshold by sampling (Lin et al. 2018, arxiv.org/abs/1712.01887, section 3.1), which takes what is above.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.kernels.threshold import at_least, block_maxima, takes

_BLOCK = 64
_FEW = 256  # by blocks up to a share of 1/256: a quarter of the elements is then looked at again
_RUN = 16  # float32 of one cache line: a sample costs its own bytes only
_ENOUGH = 1 << 14  # elements of a sample: the k-th of 1/256 is the 64th, known to 1/8


def largest(values: Tensor, count: int) -> Tensor:
    """Return where the `count` largest magnitudes stand: fewer if fewer are not zero, none twice, in no order.

    NaN counts as the largest, infinity next. Magnitudes below the smallest normal number count as zero.

    Args:
        values: (n,), floating point, contiguous.
        count: ≥ 0.

    Returns:
        (≤ count,) int64.

    Example:
        >>> largest(torch.tensor([1.0, -3.0, 0.0, 2.0]), 2)
        tensor([1, 3])
    """
    if count < 1 or values.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    return _largest(values, count, by_kernels=takes(values))


def _largest(values: Tensor, count: int, *, by_kernels: bool) -> Tensor:
    positions = _candidates(values, count, by_kernels)
    if positions.numel() <= count:
        return positions
    return positions[values[positions].abs().topk(count, sorted=False).indices]


def _candidates(values: Tensor, count: int, by_kernels: bool) -> Tensor:
    """Return where at least the `count` largest stand; waits for a GPU once for each threshold that is tried."""
    # By kernels, magnitudes are never written down: one pass for the maxima of blocks, one over the blocks that matter.
    magnitudes = None if by_kernels else values.abs()
    numel, tiny = values.numel(), values.new_tensor(torch.finfo(values.dtype).tiny)
    if count * _FEW <= numel and magnitudes is not None:
        return _by_blocks(magnitudes, count)
    if count * _FEW <= numel:
        maxima = block_maxima(values)
        least = _least(maxima.topk(count, sorted=False).values)
        return at_least(values, torch.maximum(least, tiny), maxima=maxima).positions

    def above(least: Tensor) -> Tensor:
        return at_least(values, least).positions if magnitudes is None else _at_least(magnitudes, least)

    sample = _sample(values).abs()
    share = sample.numel() * count / numel
    rank = int(share + 2 * share**0.5) + 1  # two standard deviations more than needed
    while count < numel and rank < sample.numel():
        positions = above(torch.maximum(_least(sample.topk(rank, sorted=False).values), tiny))
        if positions.numel() >= count:
            return positions
        rank *= 2
    return above(tiny)


def _at_least(magnitudes: Tensor, least: Tensor) -> Tensor:
    """Return where magnitudes are NaN, or at least `least` and not zero."""
    least = least.clamp(min=torch.finfo(magnitudes.dtype).tiny)
    return (magnitudes < least).logical_not_().nonzero().view(-1)


def _least(values: Tensor) -> Tensor:
    """Return the smallest; NaN counts as the largest."""
    return values.nan_to_num(nan=torch.inf, posinf=torch.inf).min()


def _by_blocks(magnitudes: Tensor, count: int) -> Tensor:
    """Return at least the `count` largest, out of `count` blocks and the rest that fills none."""
    whole = magnitudes.numel() // _BLOCK * _BLOCK
    blocks = magnitudes[:whole].view(-1, _BLOCK)
    top, chosen = blocks.amax(1).topk(count, sorted=False)
    least = _least(top)
    within = _at_least(blocks[chosen].view(-1), least)
    positions = chosen[within // _BLOCK] * _BLOCK + within % _BLOCK
    if whole == magnitudes.numel():
        return positions
    return torch.cat([positions, whole + _at_least(magnitudes[whole:], least)])


def _sample(values: Tensor) -> Tensor:
    """Return runs of neighbours, spread evenly; everything where that is not much more."""
    runs = values.numel() // _RUN
    # An odd stride, so that rows of a matrix, which have even lengths, are met at all places.
    stride = max(runs * _RUN // max(_ENOUGH, values.numel() // 50), 1) | 1
    if stride <= 2:
        return values
    return values[: runs * _RUN].view(-1, _RUN)[::stride].reshape(-1)

"""Mask compaction with a count that stays on the device: x[mask], padded to a fixed size.

    source = the p with mask[p], ascending, then P, up to `size` of them       count = Σ mask
    rows[j] = x[source[j]] if source[j] < P else pad                           dx[p] = drows[j] where source[j] = p

P: rows of x, S = size. `x[mask]` has a shape that the host must wait for, at every call; these shapes are fixed, so a
CUDA graph may hold them. Each row has one source, so backward writes each row once and needs no atomics: same bits
every run. Saved for backward: the sources. Used on the losses of FCOS heads, https://arxiv.org/abs/1904.01355, whose
foreground is a few hundred of some 10⁵ points.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from accel.kernels.rows.linear import RowsOp, pair
from accel.kernels.support import Cost, is_plain, runs_triton
from accel.profiler.errors import InvalidArgument


class Compacted(NamedTuple):
    """The rows under a mask.

    Attributes:
        rows: [size, ...], padded.
        count: [], int64: how many rows the mask holds, more than `size` if some were left out.
    """

    rows: Tensor
    count: Tensor  # type: ignore[assignment]  # replaces tuple.count, which is not needed


def sources_ref(mask_P: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return source [S] and count [] in plain torch, without reading a value on the host."""
    total = len(mask_P)
    slot = torch.where(mask_P, mask_P.cumsum(0) - 1, size).clamp(max=size)
    source = slot.new_full((size + 1,), total)
    source.index_copy_(0, slot, torch.arange(total, device=mask_P.device))
    return source[:size].clone(), mask_P.sum()


def take_rows_ref(x_PC: Tensor, source_S: Tensor, pad: float) -> Tensor:
    """Return x[source], `pad` where source is P, in plain torch."""
    if len(x_PC) == 0:
        return x_PC.new_full((len(source_S), x_PC.shape[1]), pad)
    there = source_S < len(x_PC)
    return x_PC.index_select(0, torch.where(there, source_S, 0)).masked_fill_(~there[:, None], pad)


def put_rows_ref(rows_SC: Tensor, source_S: Tensor, total: int) -> Tensor:
    """Return zeros [P, C] with `rows[j]` at source[j], in plain torch."""
    # Padding goes to an extra row, which is cut off.
    return rows_SC.new_zeros(total + 1, rows_SC.shape[1]).index_copy_(0, source_S, rows_SC)[:total].clone()


def _sources(mask_P: Tensor, size: int) -> tuple[Tensor, Tensor]:
    if runs_triton(mask_P):
        from accel.kernels.rows import compact_triton

        return compact_triton.sources(mask_P, size)
    if mask_P.device.type != "cpu":
        return sources_ref(mask_P, size)
    # On a CPU nothing has to wait: four times as fast as a cumulative sum, 0.09 against 0.42 ms at P = 247,432.
    indices = mask_P.nonzero()[:, 0]
    source = indices.new_full((size,), len(mask_P))
    source[: len(indices)] = indices[:size]
    return source, torch.tensor(len(indices), device=indices.device)


def _take(x_PC: Tensor, source_S: Tensor, pad: float) -> Tensor:
    if runs_triton(x_PC):
        from accel.kernels.rows import compact_triton

        return compact_triton.take(x_PC, source_S, pad)
    return take_rows_ref(x_PC, source_S, pad)


def _put(rows_SC: Tensor, source_S: Tensor, total: int) -> Tensor:
    if runs_triton(rows_SC):
        from accel.kernels.rows import compact_triton

        return compact_triton.put(rows_SC, source_S, total)
    return put_rows_ref(rows_SC, source_S, total)


_sources_op = torch.library.custom_op("accel::compact_sources", _sources, mutates_args=())


@_sources_op.register_fake
def _(mask_P: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return mask_P.new_empty(size, dtype=torch.int64), mask_P.new_empty((), dtype=torch.int64)


_TAKE = RowsOp(
    "accel::take_rows",
    _take,
    lambda x_PC, source_S, pad: x_PC.new_empty(source_S.shape[0], x_PC.shape[1]),
    turned=lambda shape: (shape[0],),
)
_PUT = RowsOp(
    "accel::put_rows",
    _put,
    lambda rows_SC, source_S, total: rows_SC.new_empty(total, rows_SC.shape[1]),
    turned=lambda shape: (0.0,),
)
pair(_TAKE, _PUT)


def compact(x: Tensor, mask: Tensor, size: int | None = None, pad: float = 0.0) -> Compacted:
    """Return the rows under a mask, in order, padded to a fixed number: x[mask] without a wait for the device.

    Args:
        x: [P, ...], any floating or integer dtype.
        mask: [P], bool.
        size: rows to return, 0 or more; None for P, which is always enough. Of more rows under the mask the first
            `size` are returned.
        pad: what the other rows hold.

    Returns:
        rows: [size, ...], of x's dtype and device; differentiable in x, twice too. Padding has no gradient.
        count: [], int64, on x's device: the number of rows under the mask. `count > size` says that some were left
            out; reading it from the host waits for the device.

    Raises:
        InvalidArgument: if the mask is not bool [P] on x's device, or the size is below 0.

    Example:
        >>> rows, count = compact(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True]), size=4)
        >>> rows
        tensor([1., 3., 0., 0.])
        >>> count
        tensor(2)

    Heads whose losses compact this way: FCOS, https://arxiv.org/abs/1904.01355.
    """
    _check(x, mask, size)
    shape = x.shape
    size = shape[0] if size is None else size
    is_matrix = len(shape) == 2
    x_PC = x if is_matrix else x.reshape(shape[0], math.prod(shape[1:]))
    if torch.compiler.is_compiling():
        source, count = _sources_op(mask, size)
        rows = _TAKE.opaque(x_PC, source, float(pad))
    else:
        source, count = _sources(mask, size)
        rows = (_take if is_plain(x) else _TAKE)(x_PC, source, float(pad))
    return Compacted(rows if is_matrix else rows.view(size, *shape[1:]), count)


def _check(x: Tensor, mask: Tensor, size: int | None) -> None:
    if x.dim() == 0 or mask.shape != x.shape[:1] or mask.dtype != torch.bool or mask.device != x.device:
        raise InvalidArgument(
            "compact: mask must be bool [P] on x's device, x [P, ...]. Found: "
            f"mask {mask.dtype} {list(mask.shape)} on {mask.device}, x {list(x.shape)} on {x.device}. "
            "Flatten both over what the mask selects, and compare the mask to make it bool."
        )
    if size is not None and size < 0:
        raise InvalidArgument(f"compact: size must be 0 or more rows. Found: {size}. None keeps all rows.")


def cost(total: int, size: int, columns: int, itemsize: int) -> Cost:
    """Return the least work of a forward call, if the mask selects `size` rows.

    Args:
        total: P.
        size: S.
        columns: elements of a row.
        itemsize: bytes of an element.
    """
    return Cost(flops=total, bytes=total + size * (2 * columns * itemsize + 8) + 8)

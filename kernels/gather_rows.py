"""Pick one row of each group: out[p] = x[p, index[p]], without an index on the host.

    out[n, c] = x[n, index[n], c]          dx[n, g, c] = dout[n, c] if g == index[n] else 0

N: groups (all leading dimensions together), G: rows of a group, C: columns. The published heads write
`x[range(P), index]` (FCOS3D, https://arxiv.org/abs/2104.10956): Python then makes a list of P integers and a tensor of
it, 6.3 ms of host time at P = 30,929. Each output row has one source, so backward writes each row once and needs no
atomics: same bits every run. Saved for backward: the index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.kernels.rows.linear import RowsOp, pair
from accel.kernels.support import Cost, is_plain, runs_triton
from accel.kernels.tables import kept
from accel.profiler.errors import InvalidArgument

_WHOLE = {8: torch.int64, 16: torch.complex128}
"""Bytes of a row → a dtype of that size: a CPU copies elements 3 times as fast as rows of 4 numbers."""
_SMALL = 8192
"""Numbers up to which a CPU picks by one operator of torch: 23 against 34 µs for 8 rows, more for 4,096 and above."""


def gather_rows_ref(x_NGC: Tensor, index_N: Tensor) -> Tensor:
    """Return x[n, index[n]] in plain torch."""
    groups, rows, columns = x_NGC.shape
    if not x_NGC.is_contiguous():
        return x_NGC[torch.arange(groups, device=x_NGC.device), index_N]
    # A third of the time of x[arange, index] on a CPU: rows of one matrix, 0.08 against 0.28 ms at P = 30,929, C = 9.
    matrix, flat = x_NGC.view(groups * rows, columns), _flat(index_N, rows)
    whole = _WHOLE.get(columns * x_NGC.itemsize)
    if whole is None or x_NGC.storage_offset() % columns:
        return matrix.index_select(0, flat)
    return matrix.view(whole)[:, 0].index_select(0, flat)[:, None].view(x_NGC.dtype)


def scatter_rows_ref(rows_NC: Tensor, index_N: Tensor, group: int) -> Tensor:
    """Return zeros [N, G, C] with `rows[n]` at [n, index[n]], in plain torch."""
    groups, columns = rows_NC.shape
    out = rows_NC.new_zeros(groups * group, columns)
    return out.index_copy_(0, _flat(index_N, group), rows_NC).view(groups, group, columns)


def _flat(index_N: Tensor, group: int) -> Tensor:
    """Return n·G + index[n], the row in the matrix of all groups."""
    step = max(group, 1)  # a group without rows has no index either
    if index_N.device.type == "cpu":
        return _starts(len(index_N), step) + index_N
    return torch.arange(0, len(index_N) * step, step, device=index_N.device) + index_N


@kept(8)
def _starts(groups: int, group: int) -> Tensor:
    return torch.arange(0, groups * group, group, device="cpu")


def _gather(x_NGC: Tensor, index_N: Tensor) -> Tensor:
    if runs_triton(x_NGC):
        from accel.kernels.rows import gather_rows_triton

        return gather_rows_triton.gather(x_NGC, index_N)
    return gather_rows_ref(x_NGC, _in_bounds(index_N, x_NGC.shape[1]))


def _scatter(rows_NC: Tensor, index_N: Tensor, group: int) -> Tensor:
    if runs_triton(rows_NC):
        from accel.kernels.rows import gather_rows_triton

        return gather_rows_triton.scatter(rows_NC, index_N, group)
    return scatter_rows_ref(rows_NC, index_N, group)


def _gather_few(x: Tensor, index: Tensor) -> Tensor:
    """Pick few rows: here the calls take the time, not the copying."""
    wide = index.long()[..., None, None].expand(*index.shape, 1, x.shape[-1])
    try:
        return x.gather(-2, wide).squeeze(-2)
    except RuntimeError:
        _in_bounds(index, x.shape[-2])  # raises a clearer error if the index is at fault
        raise


def _in_bounds(index_N: Tensor, group: int) -> Tensor:
    """Return the index, checked where it lies on the CPU and can be read without waiting."""
    if index_N.device.type != "cpu" or len(index_N) == 0:
        return index_N
    low, high = (int(bound) for bound in torch.aminmax(index_N))
    if low < 0 or high >= group:
        raise IndexError(
            f"gather_rows: index must lie in 0..{group - 1}, the rows of a group. Found: {low}..{high}. "
            "Clamp it, or mask the groups without a row first."
        )
    return index_N


_GATHER = RowsOp(
    "accel::gather_rows",
    _gather,
    lambda x_NGC, index_N: x_NGC.new_empty(x_NGC.shape[0], x_NGC.shape[2]),
    turned=lambda shape: (shape[1],),
)
_SCATTER = RowsOp(
    "accel::scatter_rows",
    _scatter,
    lambda rows_NC, index_N, group: rows_NC.new_empty(rows_NC.shape[0], group, rows_NC.shape[1]),
    turned=lambda shape: (),
)
pair(_GATHER, _SCATTER)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Pick one row of each group: out[..., p, :] = x[..., p, index[..., p], :].

    It does what `x[range(P), index]` does, without a list of P integers on the host, and without atomics in backward:
    gradients have the same bits every run.

    Args:
        x: [..., P, G, C], any floating or integer dtype: P groups of G rows, after any batch dimensions.
        index: [..., P], int32 or int64: the row of each group, 0..G-1. Checked on a CPU. On CUDA it is not, for that
            would wait for the device: a row outside its group reads zeros and sends its gradient nowhere.

    Returns:
        [..., P, C], of x's dtype and device; differentiable in x, twice too.

    Raises:
        InvalidArgument: if the shapes, the devices or the index's dtype don't fit.
        IndexError: on a CPU, if an index lies outside its group.

    Example:
        >>> x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
        >>> gather_rows(x, torch.tensor([1, 0]))
        tensor([[3., 4.],
                [5., 6.]])

    Heads that index this way: FCOS, https://arxiv.org/abs/1904.01355, and FCOS3D, https://arxiv.org/abs/2104.10956.
    """
    _check(x, index)
    groups = index.numel()
    if 0 < groups * x.shape[-1] <= _SMALL and not torch.compiler.is_compiling() and not runs_triton(x) and x.is_cpu:
        return _gather_few(x, index)
    flat = (x, index) if x.dim() == 3 else (x.reshape(groups, *x.shape[-2:]), index.reshape(groups))
    picked: Tensor
    if torch.compiler.is_compiling():
        picked = _GATHER.opaque(*flat)
    else:
        # Plain torch carries tangents, and goes through transforms, by itself.
        plain = is_plain(x) if runs_triton(x) else not x.requires_grad
        picked = _gather(*flat) if plain else _GATHER(*flat)
    return picked if x.dim() == 3 else picked.view(*index.shape, x.shape[-1])


def _check(x: Tensor, index: Tensor) -> None:
    if x.dim() < 3 or index.shape != x.shape[:-2]:
        raise InvalidArgument(
            f"gather_rows: x must be [..., P, G, C] and index [..., P]. Found: {list(x.shape)} and "
            f"{list(index.shape)}. Give x a last dimension of 1 if it has no columns."
        )
    if index.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(
            f"gather_rows: index must be int32 or int64. Found: {index.dtype}. Convert it with .long()."
        )
    if index.device != x.device:
        raise InvalidArgument(
            f"gather_rows: x and index must be on one device. Found: {x.device} and {index.device}. Move the index."
        )


def cost(groups: int, columns: int, itemsize: int, index_itemsize: int = 8) -> Cost:
    """Return the least work of a forward call.

    Args:
        groups: N, all leading dimensions together.
        columns: C.
        itemsize: bytes of an element of x.
        index_itemsize: bytes of an index.
    """
    return Cost(flops=0, bytes=groups * (2 * columns * itemsize + index_itemsize))

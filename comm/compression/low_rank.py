"""Orthonormal bases and outer products of a few long vectors, stored as rows: (…, r, length).

BLAS and LAPACK are quick at factors that lie as few long rows: `rows @ M` takes 1.7 ms for six matrices of 1024² and
rank 4; M by a factor of 1024 rows of four takes 5.3 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from accel.comm.layout import Piece
from accel.kernels.tables import kept

_LARGE, _PART = 1 << 20, 1 << 18
"""Elements of the largest matrix that is made at once, and of parts of others; less costs more than it saves."""


@kept(256)
def noise(seed: int, rank: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (rank, length) numbers from −1 to 1 that depend on the arguments alone. Don't write.

    Uniform ones are made from integers, so they are the same bits on every processor, and those of a lower rank are the
    first rows.
    """
    generator = torch.Generator("cpu").manual_seed(seed * 1_000_003 + length)
    uniform = torch.rand(rank, length, generator=generator, dtype=torch.float32, device="cpu")
    return uniform.mul_(2).sub_(1).to(device, dtype)


def orthonormal(rows: Tensor, filler: Tensor) -> Tensor:
    """Return orthonormal rows that span at least what `rows` span.

    By Householder reflections, which stay orthonormal where rows are dependent or nearly so, and end in some complement
    of what the rows span where that has fewer dimensions. Rows are scaled by their largest value first, so that squares
    neither overflow nor vanish, and get 1e-3 of an epsilon of `filler`: rows of nothing but zeros become those of the
    filler, not unit vectors, which a gradient of many zeros might never touch. On the CPU this takes a third to a half
    of the time of Gram-Schmidt twice and of Cholesky-QR, at ranks 4 to 64, one matrix or 24 at once.

    Args:
        rows: (batch, r, length), r ≤ length, float32 or float64. A matrix with a NaN or an infinity becomes NaN.
        filler: (r, length), of full rank, values of about 1.

    Returns:
        (batch, r, length).
    """
    assert rows.shape[-2] <= rows.shape[-1]
    largest = rows.abs().amax(-1, keepdim=True)
    scaled = rows / largest.masked_fill(largest == 0, 1)
    scaled = scaled.add_(filler, alpha=1e-3 * torch.finfo(rows.dtype).eps)
    basis: Tensor = torch.linalg.qr(scaled.mT).Q.mT
    # Some LAPACKs leave the rows before a NaN as they would be without it.
    return basis + (largest * 0).sum(-2, keepdim=True)


def add_product(target: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0, fresh: bool = False) -> None:
    """Add alpha · leftᵀ right to `target`, or put it there.

    MKL is slow for 2 to 15 inner dimensions: 24 matrices of 1024² take 16 ms to add a product of rank 4 and 21
    ms to set one, but 9 ms each as four outer products, or with rows of zeros up to 16. A matrix that no cache holds is
    made some rows at a time, so that four products pass over memory once: 4096² in 13 and 11 ms in place of 22 and 25.

    Args:
        target: (m, n).
        left: (r, m).
        right: (r, n).
        fresh: overwrite what `target` holds.
    """
    rank = left.shape[0]
    if rank > 4 or target.is_cuda:
        if 4 < rank < 16 and not target.is_cuda:
            left, right = (torch.nn.functional.pad(factor, (0, 0, 0, 16 - rank)) for factor in (left, right))
        target.addmm_(left.T, right, alpha=alpha, beta=0.0 if fresh else 1.0)
        return
    rows = target.shape[0]
    if target.numel() > _LARGE:
        rows = max(_PART // target.shape[1], 1)
    for low in range(0, target.shape[0], rows):
        part = target[low : low + rows]
        for i in range(rank):
            vector = left[i, low : low + rows]
            if i == 0 and fresh:
                torch.outer(vector if alpha == 1 else vector * alpha, right[0], out=part)
            else:
                part.addr_(vector, right[i], alpha=alpha)


Side = Literal["left", "right"]


class MatrixGroup(NamedTuple):
    """Matrices of one shape in a piece; tensors of more dimensions count as (first, all others)."""

    rows: int
    columns: int
    rank: int
    names: list[str]
    begins: list[int]
    """Where each begins in the piece."""

    def length(self, side: Side) -> int:
        """Return the length of the vectors of a factor."""
        return self.rows if side == "left" else self.columns

    def matrices(self, values: Tensor) -> list[Tensor]:
        """Return views (rows, columns)."""
        size = self.rows * self.columns
        return [values[begin : begin + size].view(self.rows, self.columns) for begin in self.begins]


class FactorPlan(NamedTuple):
    """What of a piece is sent as factors, and what as it is."""

    groups: list[MatrixGroup]
    plain: list[tuple[int, int]]
    """(begin, length) in the piece."""

    def factors(self, wire: Tensor, side: Side) -> list[Tensor]:
        """Return views (matrices, rank, length) of each group's factors in what is sent."""
        shapes = [(len(group.begins), group.rank, group.length(side)) for group in self.groups]
        begins = [0, *accumulate(b * k * length for b, k, length in shapes)][:-1]
        return [wire[at : at + b * k * n].view(b, k, n) for at, (b, k, n) in zip(begins, shapes, strict=True)]

    @property
    def matrices(self) -> int:
        """Return how many matrices are sent as factors."""
        return sum(len(group.begins) for group in self.groups)

    @property
    def tensors(self) -> int:
        """Return of how many tensors parts are sent, each with a flag: matrices, then what is sent as it is."""
        return self.matrices + len(self.plain)

    def by_group(self, flags: Tensor) -> list[Tensor]:
        """Return views (matrices, 1, 1) of each group's part of one flag per matrix."""
        sizes = [len(group.begins) for group in self.groups]
        return [part.view(-1, 1, 1) for part in torch.split(flags, sizes)]

    def sent(self, side: Side) -> int:
        """Return the elements of the factors of one side."""
        return sum(len(group.begins) * group.rank * group.length(side) for group in self.groups)


def make_plan(piece: Piece, rank_of: Callable[[torch.Size], int]) -> FactorPlan:
    """Return the plan of a piece.

    Args:
        piece: holds parameters as a whole.
        rank_of: rank by shape of the parameter, 0 for what is sent as it is; no more than the smaller side.
    """
    groups: dict[tuple[int, int, int], MatrixGroup] = {}
    plain: list[tuple[int, int]] = []
    for extent, (_, tensor) in zip(piece.layout.extents(piece.low, piece.high), piece.tensors(), strict=True):
        if rank := rank_of(tensor.shape):
            rows, columns = matrix_of(tensor.shape)
            group = groups.setdefault((rows, columns, rank), MatrixGroup(rows, columns, rank, [], []))
            group.names.append(extent.name)
            group.begins.append(extent.begin)
        else:
            plain.append((extent.begin, extent.length))
    return FactorPlan(list(groups.values()), plain)


def project(plan: FactorPlan, values: Tensor, bases: Sequence[Tensor], known: Side, wire: Tensor) -> None:
    """Write basisᵀ M, or basisᵀ Mᵀ where the basis is a right one, of each matrix in `values` into `wire`."""
    for group, basis, out in zip(plan.groups, bases, plan.factors(wire, other(known)), strict=True):
        for i, matrix in enumerate(group.matrices(values)):
            torch.mm(basis[i], matrix if known == "left" else matrix.T, out=out[i])


def note_used(plan: FactorPlan, values: Tensor, out: Tensor) -> None:
    """Write 1 into `out` (tensors,) for each tensor in `values` that holds anything but zeros, else 0."""
    tensors = [matrix.view(-1) for group in plan.groups for matrix in group.matrices(values)]
    tensors += [values[begin : begin + length] for begin, length in plan.plain]
    for i, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            # A few elements nearly always suffice; all of them cost a pass over memory.
            out[i] = bool(tensor[:: tensor.numel() // 1024 + 1].any()) or bool(tensor.any())
        else:
            out[i] = tensor.any()  # no wait for the device


def other(side: Side) -> Side:
    """Return the other side."""
    return "right" if side == "left" else "left"


def ordered(known: Side, basis: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (left, right) of a basis on the known side and a factor on the other."""
    return (basis, factor) if known == "left" else (factor, basis)


def matrix_of(shape: torch.Size) -> tuple[int, int]:
    """Return the rows and columns that a parameter counts as."""
    return shape[0], shape.numel() // shape[0]

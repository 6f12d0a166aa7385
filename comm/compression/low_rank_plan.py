"""Which gradients of a piece are sent as two thin factors, where they lie, and how the factors are packed.

Factors are stored as rows, (matrices, rank, length): one block for all matrices of a shape, so that they are
orthonormalised at once, and all blocks of a side after each other, so that one all-reduce takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from accel.comm.layout import Piece

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

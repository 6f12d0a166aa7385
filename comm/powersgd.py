"""PowerSGD: two thin factors in place of each gradient matrix, from one step of power iteration on the mean gradient.

    M_r = G_r + E_r                      (m, n)  gradient of rank r plus its residual; M = Σ_r M_r
    P   = Σ_r M_r Q                      (m, k)  one all-reduce, in which biases and the like ride along
    P̂   = orthonormal basis of P
    Q   = Σ_r M_rᵀ P̂                     (n, k)  another one; the next step starts from it
    M   ≈ P̂ Qᵀ                                   the mean gradient that all ranks apply
    E_r = M_r − P̂ (M_rᵀ P̂)ᵀ                      residual of this rank: Σ_r E_r + P̂ Qᵀ = M

`alternate` takes one of the two halves per step, from the other factor of the step before, and needs one all-reduce.

All is linear in M_r, so one all-reduce of any kind will do and the number of ranks doesn't matter. The published E_r
takes the mean of P̂ Qᵀ from M_r in place of its own part. Their sums, and so all steps, are the same; but the
differences between ranks add up for ever there, while here a rank keeps no residual of what it has sent.

Sources: PowerSGD (Vogels et al. 2019, arxiv.org/abs/1905.13727); one factor per step, ACP-SGD (Zhang et al. 2023,
arxiv.org/abs/2306.08881).

Orthonormal bases and outer products of a few long vectors, stored as rows: (…, r, length).

BLAS and LAPACK are quick at factors that lie as few long rows: `rows @ M` takes 1.7 ms for six matrices of 1024² and
rank 4; M by a factor of 1024 rows of four takes 5.3 ms.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from accel.comm.compressor import RESIDUAL, Compressor, Stage, add_residual, any_nonzero, used_spans
from accel.comm.layout import Layout, Piece, between, put_back
from accel.comm.ranks.channel import Channel
from accel.kernels.tables import kept
from accel.profiler.errors import InvalidArgument

Rank = int | Mapping[tuple[int, ...], int]


class PowerSGD(Compressor):
    """Send a low-rank approximation of each gradient matrix, with error feedback and warm start.

    A matrix of m x n costs rank · (m + n) elements for m · n. What is 1-D, or saves too little, is sent exactly, in the
    same all-reduce as the first factors. With a rank of the smaller side the mean gradient is exact to rounding.

    Replicas are equal to the bit where all ranks have processors of one kind and equal numbers of threads, for each
    rank multiplies the factors on its own.

    Args:
        rank: of the approximation, default 4; or a mapping, by shape of the parameter. 0, or no entry, sends it as it
            is. No matrix gets more than its smaller side. Conv weights count as (out, in · height · width).
        alternate: ACP-SGD: send left and right factors at alternate steps: half the bytes and one all-reduce, at some
            loss of quality while gradients change fast. A matrix that gets all of its rank is sent as it is: its longer
            factor would be no smaller.
        start_step: steps at first, ≥ 0, that send gradients as they are, default 0.
        min_compression: least ratio of a matrix's elements to those of both factors for which it is compressed, ≥ 0,
            default 2; 0 compresses all matrices.
        seed: of the first right factors, which are the same on all ranks.

    Raises:
        InvalidArgument: if an argument is out of range.

    Example:
        >>> state = CommState(ddp, PowerSGD(rank=4, start_step=100))
        >>> ddp.register_comm_hook(state, hook)
    """

    feedback = True
    scales = True

    def __init__(
        self,
        rank: Rank = 4,
        *,
        alternate: bool = False,
        start_step: int = 0,
        min_compression: float = 2.0,
        seed: int = 0,
    ) -> None:
        if isinstance(rank, Mapping):
            rank = {tuple(shape): rank[shape] for shape in sorted(rank)}
            wrong = [value for value in rank.values() if not _whole(value, 0)]
        else:
            wrong = [] if _whole(rank, 1) else [rank]
        if wrong:
            raise InvalidArgument(
                f"rank must be a whole number from 1, or by shape from 0, got {wrong[0]!r}; use Exact() to send "
                "gradients as they are"
            )
        if not _whole(start_step, 0):
            raise InvalidArgument(f"start_step must be a whole number of steps from 0, got {start_step!r}")
        if not _whole(seed, 0):
            raise InvalidArgument(f"seed must be a whole number from 0, got {seed!r}")
        if not min_compression >= 0:
            raise InvalidArgument(
                f"min_compression must be 0 or more, got {min_compression!r}; 0 compresses all matrices"
            )
        self.rank, self.alternate, self.start_step = rank, alternate, start_step
        self.min_compression, self.seed = min_compression, seed

    def stages(self) -> Sequence[Stage]:
        decode = Stage("product of factors", self._decode)
        if self.alternate:
            return [Stage("one factor", self._begin), decode]
        return [Stage("left factors", self._begin), Stage("right factors", self._right), decode]

    def boundaries(self, layout: Layout, parts: int) -> list[int]:
        return between(layout, parts)

    def sent(self, shapes: Sequence[torch.Size]) -> float:
        """Return how many elements are all-reduced per step, the mean of two, for parameters of these shapes."""
        total = 0.0
        for shape in shapes:
            if rank := self.rank_of(shape):
                total += rank * sum(matrix_of(shape)) / (2 if self.alternate else 1) + 1
            else:
                total += shape.numel() + (shape.numel() > 0)
        return total

    def rank_of(self, shape: torch.Size) -> int:
        """Return the rank of what is sent for a parameter of this shape, 0 if it is sent as it is."""
        if len(shape) < 2 or shape.numel() == 0:
            return 0
        rows, columns = matrix_of(shape)
        wanted = self.rank if isinstance(self.rank, int) else self.rank.get(tuple(shape), 0)
        rank = min(wanted, rows, columns)
        complete = self.alternate and rank == min(rows, columns)
        saves = rows * columns >= self.min_compression * rank * (rows + columns)
        return rank if saves and not complete else 0

    # -- stages ------------------------------------------------------------------------------------------------------

    def _right(self, piece: Piece, channel: Channel) -> None:
        """Sum the right factors for an orthonormal basis of the left ones."""
        if "wire" not in piece.carry:
            return
        plan, left = piece.carry["plan"], piece.carry["wire"]
        wire = left.new_empty(plan.sent("right"))
        bases = [self._basis(factors) for factors in plan.factors(left, "left")]
        project(plan, piece.carry["kept"], bases, "left", wire)
        piece.carry.update(bases=bases, local=wire.clone(), wire=wire)
        if plan.groups:
            channel.all_reduce(wire)

    def _known(self, piece: Piece) -> Side:
        """Return the side of the factor that all ranks have before they sum the last one."""
        return "left" if not self.alternate or (piece.step - self.start_step) % 2 == 0 else "right"

    def _begin(self, piece: Piece, channel: Channel) -> None:
        """Add the residual, and sum the factors that the known ones, of the step before, project the gradients to."""
        known: Side = self._known(piece) if self.alternate else "right"
        feedback, values, slot = piece.slot.has(RESIDUAL), piece.values, piece.slot
        if channel.size == 1 or piece.step <= self.start_step:
            self._send_plain(piece, channel)
            return
        plan, kept = make_plan(piece, self.rank_of), values
        if not slot.agreed:
            _agree(plan, piece, channel)
            slot.agreed = True
        if feedback:
            kept = slot.write(RESIDUAL)
            torch.add(slot.read(RESIDUAL), values, alpha=piece.factor, out=kept)
        else:
            add_residual(values, piece.factor, None)
        side = other(known)
        sizes = [plan.sent(side), plan.tensors, sum(span.stop - span.start for span in plan.plain)]
        wire = values.new_empty(sum(sizes))
        factors, used, plain = torch.split(wire, sizes)
        bases = [self._basis(self._warm(piece, group, known)) for group in plan.groups]
        project(plan, kept, bases, known, factors)
        note_used(plan, values, used)
        if plan.plain:
            torch.cat([kept[span] for span in plan.plain], out=plain)
        piece.carry.update(plan=plan, kept=kept, bases=bases, wire=wire, used=used, plain=plain)
        if self.alternate:
            piece.carry["local"] = factors.clone()
        if sum(sizes):
            channel.all_reduce(wire)

    def _send_plain(self, piece: Piece, channel: Channel) -> None:
        """Sum the gradients as they are; residuals, of a run before, wait where there are other ranks."""
        values, slot = piece.values, piece.slot
        sent = channel.size == 1 and slot.has(RESIDUAL) and bool(values.numel())
        spans, used = used_spans(piece) if sent else ([], values)
        add_residual(values, piece.factor, slot.read(RESIDUAL) if sent else None)
        if sent:
            slot.write(RESIDUAL).zero_()
            piece.stand_still(spans, used, (RESIDUAL,))
        channel.all_reduce(values)

    def _decode(self, piece: Piece, channel: Channel) -> None:
        """Multiply the factors, note what they lack of this rank's gradients, and keep the newer factor."""
        carry = piece.carry
        if "wire" not in carry:
            return
        plan, known, kept = carry["plan"], self._known(piece), carry["kept"]
        feedback, side = kept is not piece.values, other(known)
        totals, locals_ = plan.factors(carry["wire"], side), plan.factors(carry["local"], side)
        used = plan.by_group(carry["used"][: plan.matrices] > 0)
        for group, basis, total, local, used_matrices in zip(
            plan.groups, carry["bases"], totals, locals_, used, strict=True
        ):
            means, rests = group.matrices(piece.values), group.matrices(kept)
            # DDP drops what arrives for a parameter that no rank used: nothing is sent of its residual.
            applied, sent = total * used_matrices, local * used_matrices
            for i, name in enumerate(group.names):
                if feedback:
                    add_product(rests[i], *ordered(known, basis[i], sent[i]), alpha=-1.0)
                add_product(means[i], *ordered(known, basis[i], applied[i]), fresh=True)
                piece.slot.write_shared(side, name, total[i])
        if piece.values.device.type == "cpu" and _bounded([*zip(carry["bases"], totals, strict=True)], carry["plain"]):
            carry["finite"] = torch.ones(1, dtype=torch.bool)
        put_back(piece.values, plan.plain, carry["plain"])
        if feedback:
            for span in plan.plain:
                kept[span] = 0
            piece.stand_still(plan.plain, carry["used"][plan.matrices :], (RESIDUAL,))

    # -- parts -------------------------------------------------------------------------------------------------------

    def _basis(self, factors: Tensor) -> Tensor:
        return orthonormal(factors, noise(self.seed, *factors.shape[1:], factors.dtype, factors.device))

    def _warm(self, piece: Piece, group: MatrixGroup, side: Side) -> Tensor:
        """Return the factors that the last finite step left, (matrices, rank, length); noise where there are none."""
        first = noise(self.seed, group.rank, group.length(side), piece.values.dtype, piece.values.device)
        factors = first.repeat(len(group.names), 1, 1)
        for own, name in zip(factors, group.names, strict=True):
            before = piece.slot.read_shared(side, name)
            if before is not None and before.shape[1] == group.length(side):
                # Of a run with another rank: as many as there are.
                own[: before.shape[0]] = before[: group.rank]
        return factors


def _agree(plan: FactorPlan, piece: Piece, channel: Channel) -> None:
    """Forget factors of the steps before that are not the same on all ranks of the channel.

    Those of a loaded state may differ: where hosts reduce first, each rank had but some. A step with unlike bases would
    leave unlike replicas if only one factor is sent.
    """
    kept = [
        (side, name, piece.slot.read_shared(side, name))
        for group in plan.groups
        for name in group.names
        for side in ("left", "right")
    ]
    if not kept:
        return
    sums = [-1 if factor is None else zlib.crc32(factor.contiguous().cpu().numpy().tobytes()) for _, _, factor in kept]
    own = torch.tensor(sums, dtype=torch.int64, device=piece.values.device)
    rows = [torch.empty_like(own) for _ in range(channel.size)]
    channel.all_gather(own, rows)
    for (side, name, _), same in zip(kept, (torch.stack(rows) == own).all(0).tolist(), strict=True):
        if not same:
            piece.slot.forget_shared(side, name)


def _bounded(factors: Sequence[tuple[Tensor, Tensor]], plain: Tensor) -> bool:
    """Return whether the products are sure to be finite, judged by the factors alone."""
    bounds = [(p.abs().amax((1, 2)) * q.abs().amax((1, 2)) * p.shape[1]).sum() for p, q in factors]
    if plain.numel():
        bounds.append(plain.abs().amax())
    return all(bool(bound.isfinite()) for bound in bounds)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# -- low-rank factors --------------------------------------------------------------------------------------------------


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
    plain: list[slice]
    """In the piece."""

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
    """Return the plan of a piece."""
    groups: dict[tuple[int, int, int], MatrixGroup] = {}
    plain: list[slice] = []
    for extent, (_, tensor) in zip(piece.layout.extents(piece.low, piece.high), piece.tensors(), strict=True):
        if rank := rank_of(tensor.shape):
            rows, columns = matrix_of(tensor.shape)
            group = groups.setdefault((rows, columns, rank), MatrixGroup(rows, columns, rank, [], []))
            group.names.append(extent.name)
            group.begins.append(extent.begin)
        else:
            plain.append(extent.span)
    return FactorPlan(list(groups.values()), plain)


def project(plan: FactorPlan, values: Tensor, bases: Sequence[Tensor], known: Side, wire: Tensor) -> None:
    """Write basisᵀ M, or basisᵀ Mᵀ where the basis is a right one, of each matrix in `values` into `wire`."""
    for group, basis, out in zip(plan.groups, bases, plan.factors(wire, other(known)), strict=True):
        for i, matrix in enumerate(group.matrices(values)):
            torch.mm(basis[i], matrix if known == "left" else matrix.T, out=out[i])


def note_used(plan: FactorPlan, values: Tensor, out: Tensor) -> None:
    """Write 1 into `out` (tensors,) for each tensor in `values` that holds anything but zeros, else 0."""
    tensors = [matrix.view(-1) for group in plan.groups for matrix in group.matrices(values)]
    tensors += [values[span] for span in plan.plain]
    for i, tensor in enumerate(tensors):
        out[i] = any_nonzero(tensor)


def other(side: Side) -> Side:
    """Return the other side."""
    return "right" if side == "left" else "left"


def ordered(known: Side, basis: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (left, right) of a basis on the known side and a factor on the other."""
    return (basis, factor) if known == "left" else (factor, basis)


def matrix_of(shape: torch.Size) -> tuple[int, int]:
    """Return the rows and columns that a parameter counts as."""
    return shape[0], shape.numel() // shape[0]

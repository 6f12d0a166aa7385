"""Deep Gradient Compression: the largest entries of what has accumulated, momentum included.

    g ← clip(g, C N^−½),  u ← m u + g,  r ← r + u,  send s = the k largest of r,  r ← r − s,  masking: u ← 0 where sent
                                                    (Nesterov: r ← r + g + m u)

of each parameter, with g divided by the N ranks, k = ⌈ratio · elements⌉. Momentum is applied before error feedback: the
step that dense SGD would have taken arrives late, not twice (momentum correction). With `masking` u is dropped where it
was sent, so that old gradients don't push on (momentum factor masking). After each step T, to rounding:

    Σ_r r + Σ_t≤T decoded_t = Σ_t≤T Σ_r u_t, each u_t as it was added to r (Nesterov: g_t + m u_t), void steps left out

* Biases, norms and other small tensors are sent uncompressed, and have no residual. The optimizer keeps the momentum of
  weight decay, which is the same on every rank. See `accel.comm.sgd_momentum`.
* One all-gather of packs that have the same size on every rank: replicas stay equal to the bit.
* Where ratio · ranks ≥ 1, packs would be as long as dense gradients on a ring: these are sent then, with no
  residual and no momentum dropped, and so they are where there is one rank, or by hosts one host. Ratio 1 is dense
  momentum SGD. Warm-up stages often fall under this.
* A parameter whose gradient is zero on all ranks stands still, its momentum too, as in SGD where it has no gradient:
  DDP would drop what is sent for a parameter that no rank used. By hosts, this goes for each slice of a parameter.

Source: Lin et al. 2018, arxiv.org/abs/1712.01887. There, k is met roughly, by a sampled threshold; here exactly.

The k largest magnitudes of a vector, exactly, at the cost of little more than one pass over it.

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

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from accel.comm.compression.momentum import VELOCITY, MomentumCorrection
from accel.comm.compressor import RESIDUAL, Stage, any_nonzero
from accel.comm.layout import Layout, Piece, put_back
from accel.comm.ranks.channel import Channel
from accel.kernels.threshold import at_least, block_maxima, takes
from accel.profiler import renamed
from accel.profiler.errors import InvalidArgument, check_numbers


class DGC(MomentumCorrection):
    """Send the largest of the accumulated, momentum-corrected gradients; 8 bytes for each.

    With momentum, hand the optimizer's over before the first step: `accel.take_momentum`.

    Args:
        ratio: share of elements sent at each step, in (0, 1], default 0.001.
        momentum: accumulate SGD's momentum here, default True: two more copies of the gradients. False for other
            optimizers: plain top-k with error feedback, which is less accurate where the optimizer has momentum.
        masking: drop the momentum of what was sent, as in the paper, default False: a small convolution network lost
            0.6 points of accuracy with it, 0.2 without (`python -m benchmarks.comm_accuracy`).
        max_grad_norm: clip each rank's gradient, divided by the number of ranks N, to this norm by √N before it is
            accumulated, so one that is not divided to max_grad_norm · √N: where ranks differ by noise alone, their mean
            is held to about max_grad_norm. None (default) doesn't. The norm is that of all gradients, so nothing is
            sent before backward ends. Don't clip again after backward: that would clip what has gathered over many
            steps.
        warmup: ratios to begin with, default (0.25, 0.0625, 0.015625, 0.004); a smaller one than `ratio` counts as it.
        warmup_steps: steps that each of them lasts, an epoch in the paper; default 0: no warm-up.
        exact_below: parameters of fewer elements, and all of less than two dimensions, are sent as they are; default
            1024.

    Raises:
        InvalidArgument: if an argument is out of range; from `loss.backward()`, if the optimizer's momentum was not
            taken.

    Example:
        >>> state = CommState(ddp, DGC(0.001, warmup_steps=len(loader)), hierarchical=True)
        >>> ddp.register_comm_hook(state, hook)
        >>> momentum = take_momentum(state, optimizer)
    """

    feedback = True

    @renamed.arguments(clip_norm="max_grad_norm", dense_below="exact_below")
    def __init__(
        self,
        ratio: float = 0.001,
        *,
        momentum: bool = True,
        masking: bool = False,
        max_grad_norm: float | None = None,
        warmup: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004),
        warmup_steps: int = 0,
        exact_below: int = 1024,
    ) -> None:
        check_numbers(ratio=ratio, max_grad_norm=max_grad_norm, warmup_steps=warmup_steps, exact_below=exact_below)
        for value in (ratio, *warmup):
            if not 0 < value <= 1:
                raise InvalidArgument(
                    f"ratio and those of warmup must be in (0, 1], got {value}; 0.001 sends a thousandth"
                )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise InvalidArgument(
                f"max_grad_norm must be positive, got {max_grad_norm}; None leaves gradients unclipped"
            )
        if warmup_steps < 0 or exact_below < 0:
            raise InvalidArgument(f"warmup_steps and exact_below must be ≥ 0, got {warmup_steps} and {exact_below}")
        self.ratio, self.momentum, self.masking, self.max_grad_norm = ratio, momentum, masking, max_grad_norm
        self.warmup, self.warmup_steps, self.exact_below = tuple(warmup), warmup_steps, exact_below
        self._bind(None)

    # -- settings ----------------------------------------------------------------------------------------------------

    @property
    def needs_whole_step(self) -> bool:
        return self.max_grad_norm is not None

    def ratio_at(self, step: int) -> float:
        """Return the share of elements sent at a step, counted from 1."""
        stage = (step - 1) // self.warmup_steps if self.warmup_steps else len(self.warmup)
        return max(self.warmup[stage], self.ratio) if stage < len(self.warmup) else self.ratio

    def check(self, layout: Layout) -> None:
        super().check(layout)
        if layout.numel >= 1 << 31:
            raise InvalidArgument(
                f"DGC sends positions as 32 bits, got {layout}; pass a smaller bucket_cap_mb, or divide the parameter"
            )

    # -- one step ----------------------------------------------------------------------------------------------------

    def whole_step(self, buckets: Sequence[Tensor], ranks: int, scale: float) -> None:
        """Clip this rank's gradients to max_grad_norm · √ranks: once divided by the ranks, max_grad_norm by √ranks."""
        assert self.max_grad_norm is not None
        source = self._momentum_source()
        limit = self.max_grad_norm * (scale if source is None else source.loss_scale()) * math.sqrt(ranks)
        # In float64, where no square of a float32 overflows: a large gradient is clipped, not lost.
        norms = torch.stack([torch.linalg.vector_norm(bucket, dtype=torch.float64) for bucket in buckets])
        factor = (limit / torch.linalg.vector_norm(norms)).clamp(max=1.0)
        for bucket in buckets:
            bucket.mul_(factor)

    def stages(self) -> Sequence[Stage]:
        return [Stage("selection", self._select), Stage("gather of selected", self._gather)]

    def _select(self, piece: Piece, channel: Channel) -> None:
        """Accumulate, and take the largest of each parameter out of what has gathered."""
        ratio = self.ratio_at(piece.step)
        dense = channel.size == 1 or ratio * channel.size >= 1
        parts = self._parts(piece, 1.0 if dense else ratio)
        scale = self._loss_scale(piece)
        residual = piece.slot.read(RESIDUAL) if piece.slot.has(RESIDUAL) else None
        gathered = torch.empty_like(piece.values) if residual is None else piece.slot.write(RESIDUAL)
        flags = [any_nonzero(piece.values[part.span]) for part in parts]
        used = torch.stack(flags).int() if flags else piece.values.new_empty(0, dtype=torch.int32)
        places, entries = [used[:0]], [piece.values[:0]]
        if scale != 1.0:
            piece.values.div_(scale)
        for part in parts:
            span, new = part.span, self._corrected(piece, part.name, part.span)
            if residual is None:
                gathered[span] = new
            else:
                torch.add(residual[span], new, out=gathered[span])
            if dense or part.sent == 0:
                piece.values[span] = gathered[span]
                gathered[span].zero_()
                continue
            positions = largest(gathered[span], part.sent)
            places.append((positions + span.start).int())
            entries.append(gathered[span][positions])
            gathered[span].index_fill_(0, positions, 0.0)
            if self.momentum and self.masking:
                piece.slot.write(VELOCITY)[span].index_fill_(0, positions, 0.0)
        pack = None if dense else _pack(used, torch.cat(places), torch.cat(entries), sum(part.sent for part in parts))
        piece.carry.update(parts=parts, pack=pack, used=used, scale=scale)

    def _gather(self, piece: Piece, channel: Channel) -> None:
        """Add up what all ranks sent; what is sent as it is is all-reduced beside it."""
        parts, pack, used, scale = (piece.carry[name] for name in ("parts", "pack", "used", "scale"))
        own = used if pack is None else pack
        rows = [torch.empty_like(own) for _ in range(channel.size)]
        if pack is None:
            channel.all_reduce(piece.values)
        channel.all_gather(own, rows)
        if pack is not None:
            self._add_up(piece, rows, channel)
        if scale != 1.0:
            piece.values.mul_(scale)
        flags = torch.stack([row[: len(parts)] for row in rows]).amax(0)
        piece.stand_still([part.span for part in parts], flags, (VELOCITY, RESIDUAL))

    def _add_up(self, piece: Piece, rows: Sequence[Tensor], channel: Channel) -> None:
        """Set `piece.values` to the sum of all ranks' packs, in rank order and by position, and of dense parts."""
        values, parts = piece.values, piece.carry["parts"]
        spans, count = [part.span for part in parts if not part.sent], sum(part.sent for part in parts)
        dense = torch.cat([values[span] for span in spans]) if spans else values[:0]
        if dense.numel():
            channel.all_reduce(dense)
        values.zero_()
        put_back(values, spans, dense)
        for row in rows:
            _, positions, entries = torch.tensor_split(row, (len(parts), len(parts) + count))
            # A copy, for numbers of 8 bytes begin at a multiple of that; but for zeros, no position twice in a pack.
            values.index_add_(0, positions, entries.clone().view(values.dtype))


def _pack(used: Tensor, positions: Tensor, entries: Tensor, count: int) -> Tensor:
    """Return what one rank sends of a piece, int32, of a size that the piece's layout gives.

    Whether each parameter was used | positions | values of the entries. Where there are fewer entries than there is
    room for, the rest adds 0 to the first element.
    """
    missing = count - positions.numel()
    positions, entries = (torch.nn.functional.pad(each, (0, missing)) for each in (positions, entries))
    return torch.cat([used, positions, entries.view(torch.int32)])


# -- the largest elements ----------------------------------------------------------------------------------------------


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

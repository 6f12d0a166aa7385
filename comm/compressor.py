"""What is sent in place of gradients: the interface of a compressor, and the two commonest families.

A compressor is a list of stages. Each runs in a thread of its own with a group of its own, bucket after bucket, so that
stage 2 of one bucket overlaps stage 1 of the next; within a stage all ranks issue the same collectives in the same
order, whatever happens elsewhere.

* Exact: one all-reduce.
* Quantised: encode, all-to-all, sum what arrived, encode the sum, all-gather, decode: 2 (n − 1)/n of the encoded bytes
  on the wire, as a ring sends of the plain ones; an all-gather of everything would send n − 1. Each rank sums one chunk
  and all decode the same bytes, so replicas stay equal to the bit. With error feedback, a rank keeps as its
  residual what encoding lost of its values and of the sum of its chunk: Σ_r residual + decoded = Σ_r values holds at
  every step. DDP drops what arrives for a parameter that no rank used: its residual waits.

Sources: two-phase compressed all-reduce with error feedback (Tang et al. 2021, arxiv.org/abs/2102.02888), whose second
residual is here added to the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from accel.comm.layout import Layout, Piece, equal_cuts
from accel.comm.ranks.channel import Channel
from accel.kernels.codes.block_code import BlockCode
from accel.profiler.errors import InvalidArgument

RESIDUAL = "residual"
_ALIGNED = 16  # bytes of the widest load: ranks' codes begin at multiples of it


class Stage(NamedTuple):
    """One step of a compressor."""

    name: str
    run: Callable[[Piece, Channel], None]


class Compressor(ABC):
    """Base of all compressors: configuration only, no tensors, so that it pickles and compares by its `repr`."""

    fields: tuple[str, ...] = ()
    """Own fields that the compressor needs in `piece.slot`, beside `residual`."""
    feedback = False
    """Whether error feedback is on unless the user says otherwise."""
    takes_feedback = True
    """Whether the compressor uses `residual` where it is there."""
    lossless = False
    scales = False
    """Whether the compressor multiplies values by `piece.factor`; else they come multiplied, at a pass over memory."""

    @property
    def needs_whole_step(self) -> bool:
        """Return whether `whole_step` must see a step's gradients before any is sent, none beside backward then."""
        return False

    def begin_pass(self) -> None:  # noqa: B027  (most take all)
        """Raise InvalidArgument if no backward pass can be averaged yet; `CommState` calls it at the first bucket."""

    def whole_step(self, buckets: Sequence[Tensor], ranks: int, scale: float) -> None:  # noqa: B027  (most need nothing)
        """Change this rank's gradients of a step, all buckets of them.

        Args:
            buckets: (elements,) each, not divided by `ranks` yet.
            ranks: of which the mean is taken.
            scale: by what the gradients are too large, if a GradScaler was given to the state.
        """

    @abstractmethod
    def stages(self) -> Sequence[Stage]:
        """Return the stages; the last one leaves the sum over the channel's ranks in `piece.values`."""

    def boundaries(self, layout: Layout, parts: int) -> list[int]:
        """Return parts + 1 offsets at which the ranks of a host may share out a bucket."""
        return equal_cuts(layout.numel, parts)

    def check(self, layout: Layout) -> None:  # noqa: B027  (most take all)
        """Raise InvalidArgument if the compressor can't handle a bucket; called once for each layout."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"


def chosen(compressor: Compressor | None, error_feedback: bool | None, timeout: timedelta) -> tuple[Compressor, bool]:
    """Return a compressor, by default `Exact`, and whether it is used with error feedback, by default as it says.

    Raises:
        InvalidArgument: unless it is one that uses error feedback if that is asked for, and the timeout is positive.
    """
    compressor = Exact() if compressor is None else compressor
    if not isinstance(compressor, Compressor):
        raise InvalidArgument(f"compressor must be a Compressor, got {compressor!r}; pass for example Int8()")
    if error_feedback and not compressor.takes_feedback:
        raise InvalidArgument(
            f"error_feedback=True needs a compressor that uses it, got {compressor!r}; leave the argument out"
        )
    if timeout <= timedelta():
        raise InvalidArgument(f"timeout must be positive, got {timeout}")
    return compressor, compressor.feedback if error_feedback is None else error_feedback


class Exact(Compressor):
    """Send gradients as they are; sums differ from DDP's own by rounding alone."""

    takes_feedback = False
    lossless = True

    def stages(self) -> Sequence[Stage]:
        return [Stage("all-reduce", lambda piece, channel: channel.all_reduce(piece.values))]


class Quantised(Compressor):
    """Base of compressors that encode each block of elements on its own.

    A block with a NaN or an infinity must decode to something that is not finite: GradScaler and the memory see
    by it that the step is void.
    """

    scales = True
    block = 1
    """Elements that share a scale."""

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """Return the size of `numel` encoded elements."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None) -> None:
        """Encode `values` (m,) into `out` (encoded_bytes(m),) uint8 and write what that lost of them to `lost` (m,)."""

    @abstractmethod
    def decode(self, encoded: Tensor, out: Tensor, add: bool = False) -> None:
        """Decode into `out` (m,), or add to it."""

    def decode_sum(self, encoded: Tensor, out: Tensor, add: bool = False) -> None:
        """Decode the sum of rows (ranks, encoded_bytes(m)), in their order, into `out` (m,), or add it."""
        for rank, row in enumerate(encoded):
            self.decode(row, out, add or rank > 0)

    def encode_sum(
        self, values: Tensor, factor: float, out: Tensor, residual: Tensor | None, lost: Tensor | None
    ) -> None:
        """Encode factor · values + residual as `encode` does; what `values` holds then is of no use."""
        add_residual(values, factor, residual)
        self.encode(values, out, lost)

    def finite(self, encoded: Tensor, numel: int) -> Tensor | None:
        """Return whether all that is decoded will be finite, () bool; None (default) where that must be looked at."""
        return None

    def boundaries(self, layout: Layout, parts: int) -> list[int]:
        return equal_cuts(layout.numel, parts, self.block)

    def stages(self) -> Sequence[Stage]:
        return [Stage("sum of encoded", self._sum), Stage("gather of encoded", self._spread)]

    def _sum(self, piece: Piece, channel: Channel) -> None:
        """Sum, and note first which parameters this rank used: only with a residual can one lose by not being used."""
        if piece.slot.has(RESIDUAL) and piece.values.numel():
            spans, used = used_spans(piece)
            piece.carry.update(spans=spans, flags=used.to(torch.uint8))
        self._scatter(piece, channel)

    def _spread(self, piece: Piece, channel: Channel) -> None:
        """Give the sums to everyone, and leave what no rank used unchanged."""
        self._gather(piece, channel)
        if "flags" in piece.carry:
            piece.stand_still(piece.carry["spans"], piece.carry["flags"], (RESIDUAL,))

    def _scatter(self, piece: Piece, channel: Channel) -> None:
        """Sum this rank's chunk of the piece over all ranks, as they encoded it, and encode the sum."""
        values, rank = piece.values, channel.rank
        residual = piece.slot.read(RESIDUAL) if piece.slot.has(RESIDUAL) else None
        lost = piece.slot.write(RESIDUAL) if residual is not None else None
        if channel.size == 1:
            add_residual(values, piece.factor, residual)
            if lost is not None:
                lost.zero_()
            return
        chunks, going = self._chunks(piece, channel)
        for r, part in enumerate(chunks):
            if r != rank:
                self.encode_sum(values[part], piece.factor, going[r], part_of(residual, part), part_of(lost, part))
        own = chunks[rank]
        add_residual(values[own], piece.factor, part_of(residual, own))
        arrived = self._rows(values, going[rank].numel(), channel.size - 1)
        channel.exchange(going, [*arrived[:rank], going[rank][:0], *arrived[rank:]])
        self.decode_sum(arrived, values[own], add=True)
        self.encode(values[own], going[rank], part_of(lost, own))

    def _rows(self, like: Tensor, size: int, ranks: int) -> Tensor:
        """Return (ranks, size) bytes to receive into."""
        # Not even nothing may lie at an odd place: rows of no bytes are one byte apart, which no float can be read at.
        rows = like.new_empty(ranks, max(-(-size // _ALIGNED), 1) * _ALIGNED, dtype=torch.uint8)
        return rows[:, :size]

    def _chunks(self, piece: Piece, channel: Channel) -> tuple[list[slice], list[Tensor]]:
        """Return each rank's chunk of the piece, and room for its codes, which may be followed by flags."""
        cuts = equal_cuts(piece.values.numel(), channel.size, self.block)
        chunks = [slice(low, high) for low, high in pairwise(cuts)]
        sizes = [self.encoded_bytes(part.stop - part.start) for part in chunks]
        more = piece.carry["flags"].numel() if "flags" in piece.carry else 0
        rooms = [piece.values.new_empty(size + more, dtype=torch.uint8) for size in sizes]
        going = [room[:size] for room, size in zip(rooms, sizes, strict=True)]
        piece.carry.update(chunks=chunks, encoded=going, rooms=rooms)
        return chunks, going

    def _gather(self, piece: Piece, channel: Channel) -> None:
        """Give the encoded sums to everyone, and with them the flags of all."""
        if channel.size == 1:
            return
        chunks, encoded, rooms = (piece.carry[name] for name in ("chunks", "encoded", "rooms"))
        if "flags" in piece.carry:
            rooms[channel.rank][encoded[channel.rank].numel() :] = piece.carry["flags"]
        channel.all_gather(rooms[channel.rank], rooms)
        for part, code in zip(chunks, encoded, strict=True):
            self.decode(code, piece.values[part])
        finite = [self.finite(code, part.stop - part.start) for part, code in zip(chunks, encoded, strict=True)]
        if all(flag is not None for flag in finite):
            piece.carry["finite"] = torch.stack([flag for flag in finite if flag is not None]).all().view(1)
        if "flags" in piece.carry:
            flags = [room[code.numel() :] for room, code in zip(rooms, encoded, strict=True)]
            piece.carry["flags"] = torch.stack(flags).amax(0)


def add_residual(values: Tensor, factor: float, residual: Tensor | None) -> None:
    """Replace values by factor · values + residual, in one pass."""
    if residual is not None:
        torch.add(residual, values, alpha=factor, out=values)
    elif factor != 1.0:
        values.mul_(factor)


def part_of(values: Tensor | None, part: slice) -> Tensor | None:
    """Return a range of what may not be there."""
    return None if values is None else values[part]


def used_spans(piece: Piece) -> tuple[list[slice], Tensor]:
    """Return where each parameter of a piece stands, and whether this rank used it, (parameters,) bool; not none."""
    spans = [extent.span for extent, _ in piece.parameters()]
    return spans, torch.stack([any_nonzero(piece.values[span]) for span in spans])


def any_nonzero(values: Tensor) -> Tensor:
    """Return whether anything is not zero, () bool; on a CPU a few elements nearly always show it."""
    if values.device.type == "cpu":
        for some in (values[:64], values[:: values.numel() // 1024 + 1]):
            if is_there := some.any():
                return is_there
    return values.any()


class BlockCompressor(Quantised):
    """Base of compressors by block codes; `block` is up to the subclass."""

    code: ClassVar[BlockCode]

    def encoded_bytes(self, numel: int) -> int:
        return self.code.encoded_bytes(numel, self.block)

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None) -> None:
        self.code.encode(values, out, self.block, lost=lost)

    def encode_sum(
        self, values: Tensor, factor: float, out: Tensor, residual: Tensor | None, lost: Tensor | None
    ) -> None:
        self.code.encode(values, out, self.block, residual, lost, factor)

    def decode(self, encoded: Tensor, out: Tensor, add: bool = False) -> None:
        self.code.decode_sum(encoded[None], out, self.block, add)

    def decode_sum(self, encoded: Tensor, out: Tensor, add: bool = False) -> None:
        self.code.decode_sum(encoded, out, self.block, add)

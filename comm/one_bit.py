"""The sign of each element, one scale per block.

    x ≈ s · sign(x),  s = mean |x| over the block

which is the nearest of all s · sign(x). It needs error feedback: without, what a step loses is lost for good.
Bytes: 1/8 + 4/block per element. `accel.kernels.sign_pack` does the work. Codes so coarse need aids:

* Few ranks exchange codes directly:

    up to 4 ranks: encode all, all-gather, sum of what all ranks decoded        each value is rounded once
    more ranks:    as `Quantised`: encode, all-to-all, encode the sum, gather   twice, for fewer bytes

  Two ranks send the same bytes either way, three 1.5 times and four twice as many. With signs the second rounding cost
  about three times the accuracy that the first one cost.
* Small tensors are sent uncompressed, and so are all gradients in the first steps: without this, training on signs did
  not converge at all.
* Momentum, if it is handed over, is applied before error feedback; see `accel.comm.compression.momentum`.

Sums are made in rank order, so replicas stay equal to the bit, and Σ_r residual + decoded = Σ_r values holds at every
step, values with momentum where it was handed over. A parameter whose gradient is zero on all ranks stands still.

Sources: 1-bit SGD (Seide et al. 2014); signSGD with error feedback (Karimireddy et al. 2019, arxiv.org/abs/1901.09847).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from accel.comm.compression.momentum import VELOCITY, MomentumCorrection, ParameterRange
from accel.comm.compressor import RESIDUAL, BlockCompressor, Stage, any_nonzero
from accel.comm.layout import Piece, put_back
from accel.comm.ranks.channel import Channel
from accel.kernels import sign_pack
from accel.kernels.codes.block_code import BlockCode
from accel.profiler.errors import InvalidArgument, check_numbers


class OneBit(MomentumCorrection, BlockCompressor):
    """Send the sign of each element and the mean magnitude of each block, with error feedback.

    Args:
        block: elements that share a scale, a multiple of 8, default 256. Fewer are more accurate and cost 4/block bytes
            more.
        exact_below: parameters of fewer elements, and all of less than two dimensions, are sent as they are; default
            1024.
        start_step: steps at first, ≥ 0, that send gradients as they are, default 0. While gradients change fast, their
            signs mislead: a fifth of the training is usual.
        momentum: accumulate SGD's momentum here, default False: two more copies of the gradients, and several times
            more accurate. Hand it over before the first step: `accel.take_momentum`.

    Raises:
        InvalidArgument: if an argument is out of range; from `loss.backward()`, if momentum was not handed over.

    Example:
        >>> state = CommState(ddp, OneBit(momentum=True, start_step=1000))
        >>> ddp.register_comm_hook(state, hook)
        >>> momentum = take_momentum(state, optimizer)
    """

    feedback = True
    scales = False  # momentum and what is sent uncompressed need gradients already divided
    code: ClassVar[BlockCode] = sign_pack.CODE
    direct = 4
    """Ranks up to which everyone sends to everyone."""

    def __init__(
        self, block: int = 256, *, exact_below: int = 1024, start_step: int = 0, momentum: bool = False
    ) -> None:
        check_numbers(block=block)
        if block < 8 or block % 8 or block > 1 << 16:
            raise InvalidArgument(f"block must be a multiple of 8 from 8 to 65,536 elements, got {block}")
        for name, value in (("exact_below", exact_below), ("start_step", start_step)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidArgument(f"{name} must be a whole number ≥ 0, got {value!r}")
        self.block, self.exact_below, self.start_step, self.momentum = block, exact_below, start_step, momentum
        self._bind(None)

    def stages(self) -> Sequence[Stage]:
        return [Stage("sum of encoded", self._first), Stage("gather of encoded", self._last)]

    def _first(self, piece: Piece, channel: Channel) -> None:
        parts = self._parts(piece)
        used = self._correct(piece, parts)
        piece.carry.update(parts=parts, used=used)
        if channel.size == 1:
            return self._scatter(piece, channel)
        if piece.step <= self.start_step:  # residuals, of a run before, wait
            channel.all_reduce(piece.values)
            if self.momentum:
                channel.all_reduce(used)
            else:
                used.fill_(1)  # what no rank used sums to nothing
            piece.carry["dense"] = True
            return None
        exact = self._set_aside(piece, parts)
        direct = channel.size <= self.direct
        if direct:
            self._encode_all(piece)  # with flags of what was used
        else:
            self._scatter(piece, channel)
        summed = exact if direct else torch.cat([exact, used])
        if summed.numel():
            channel.all_reduce(summed)
        if piece.slot.has(RESIDUAL):
            lost = piece.slot.write(RESIDUAL)
            for part in parts:
                if not part.sent:
                    lost[part.span] = 0
        piece.carry["exact"] = summed[: exact.numel()]
        if not direct:
            piece.carry["used"] = summed[exact.numel() :]
        return None

    def _correct(self, piece: Piece, parts: list[ParameterRange]) -> Tensor:
        """Apply momentum; return which parts this rank used, (parts,) 0 or 1."""
        used = [any_nonzero(piece.values[part.span]) for part in parts]
        if self.momentum:
            piece.carry["scale"] = scale = self._loss_scale(piece)
            if scale != 1.0:
                piece.values.div_(scale)
            for part in parts:
                piece.values[part.span] = self._corrected(piece, part.name, part.span)
        return torch.stack(used).to(piece.values.dtype) if used else piece.values.new_empty(0)

    def _set_aside(self, piece: Piece, parts: list[ParameterRange]) -> Tensor:
        """Return what is sent uncompressed, residual included, and leave nothing of it to be encoded."""
        residual = piece.slot.read(RESIDUAL) if piece.slot.has(RESIDUAL) else None
        taken = []
        for span in (part.span for part in parts if not part.sent):
            if residual is None:
                taken.append(piece.values[span].clone())
                piece.values[span] = 0
            else:
                taken.append(piece.values[span] + residual[span])
                torch.neg(residual[span], out=piece.values[span])  # it is added before values are encoded
        return torch.cat(taken) if taken else piece.values.new_empty(0)

    def _encode_all(self, piece: Piece) -> None:
        values, feedback = piece.values, piece.slot.has(RESIDUAL)
        residual = piece.slot.read(RESIDUAL) if feedback else None
        lost = piece.slot.write(RESIDUAL) if feedback else None
        size, used = self.encoded_bytes(values.numel()), piece.carry["used"]
        own = values.new_empty(size + used.numel(), dtype=torch.uint8)
        self.encode_sum(values, 1.0, own[:size], residual, lost)
        own[size:] = used
        piece.carry["own"] = own

    def _last(self, piece: Piece, channel: Channel) -> None:
        if channel.size > 1 and "dense" not in piece.carry:
            self._decode_all(piece, channel)
            spans = [part.span for part in piece.carry["parts"] if not part.sent]
            put_back(piece.values, spans, piece.carry["exact"])
        self._finish(piece)

    def _decode_all(self, piece: Piece, channel: Channel) -> None:
        if "own" not in piece.carry:
            return self._gather(piece, channel)
        own, values = piece.carry["own"], piece.values
        size = self.encoded_bytes(values.numel())
        rows = self._rows(values, own.numel(), channel.size)
        channel.all_gather(own, list(rows))
        self.decode_sum(rows[:, :size], values)
        piece.carry["used"] = rows[:, size:].amax(0)
        return None

    def _finish(self, piece: Piece) -> None:
        """Give the sums the scale that the optimizer expects, and leave what no rank used unchanged."""
        fields = (VELOCITY,) if "dense" in piece.carry else (VELOCITY, RESIDUAL)
        scale, parts = piece.carry.get("scale", 1.0), piece.carry["parts"]
        if scale != 1.0:
            piece.values *= scale
        piece.stand_still([part.span for part in parts], piece.carry["used"], fields)

"""What compressors by blocks do on a GPU: each pass over the values in one kernel.

    x = values + residual, codes of x, what they lost of x        one pass in place of one for each operation
    sum of all ranks' codes                                       one pass in place of one for each rank

The kernels take float32 on CUDA and blocks of a power of two from 8 to 2,048; everything else goes the plain way of
`Quantised`, with the same bytes on the wire. Not run on GPUs yet.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from accel.comm.compressor import RESIDUAL, Quantised, add_residual, part_of
from accel.comm.engine.channel import Channel
from accel.comm.layout import Piece

_ALIGNED = 16  # bytes of the widest load: ranks' codes begin at multiples of it


class Codec(Protocol):
    """Kernels of one encoding; `accel.kernels.quantise` and `accel.kernels.sign_pack` are two."""

    def takes(self, values: Tensor, block: int) -> bool:
        """Tell whether there are kernels for these values."""

    def encode(
        self, values: Tensor, encoded: Tensor, block: int, residual: Tensor | None = None, lost: Tensor | None = None
    ) -> None:
        """Encode values + residual, and write what that lost."""

    def decode_sum(self, encoded: Tensor, out: Tensor, block: int, add: bool = False) -> None:
        """Write the sum of what ranks encoded, or add it."""


class Fused(Quantised):
    """Base of compressors by blocks that have kernels.

    `encode` and `decode` are the plain way, and must take the same bytes.
    """

    codec: ClassVar[Codec]

    def _scatter(self, piece: Piece, channel: Channel) -> None:
        values, rank = piece.values, channel.rank
        if channel.size == 1 or not self.codec.takes(values, self.block):
            return super()._scatter(piece, channel)
        add_residual(values, piece.factor, None)
        residual = piece.slot.read(RESIDUAL) if piece.slot.has(RESIDUAL) else None
        lost = piece.slot.write(RESIDUAL) if residual is not None else None
        chunks, going = self._chunks(piece, channel)
        for r, part in enumerate(chunks):
            if r != rank:
                self.codec.encode(values[part], going[r], self.block, part_of(residual, part), part_of(lost, part))
        own = chunks[rank]
        arrived = self._rows(values, self.encoded_bytes(own.stop - own.start), channel.size - 1)
        nothing = values.new_empty(0, dtype=torch.uint8)
        channel.exchange(going, [*arrived[:rank], nothing, *arrived[rank:]])
        if residual is not None:
            values[own] += residual[own]
        self.codec.decode_sum(arrived, values[own], self.block, add=True)
        self.codec.encode(values[own], going[rank], self.block, None, part_of(lost, own))
        return None

    def _rows(self, like: Tensor, size: int, ranks: int) -> Tensor:
        """Return (ranks, size) bytes to receive into."""
        # Not even nothing may lie at an odd place: rows of no bytes are one byte apart, which no float can be read at.
        rows = like.new_empty(ranks, max(-(-size // _ALIGNED), 1) * _ALIGNED, dtype=torch.uint8)
        return rows[:, :size]

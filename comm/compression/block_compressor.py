"""Compressors whose encoding is a block code: an op of `accel.kernels`, which has kernels and a reference."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from accel.comm.compressor import Quantised
from accel.kernels.codes.block_code import BlockCode


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

"""Eight-bit integers with one scale per block.

    s = max |x| / 127 over the block,  q = round(x / s),  x ≈ s q,  |x − s q| ≤ s / 2

Bytes: 1 + 4/block per element. `accel.kernels.quantise` does the work.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from accel.comm.compressor import BlockCompressor
from accel.kernels import quantise
from accel.kernels.codes.block_code import LARGEST_TILE, BlockCode
from accel.profiler.errors import InvalidArgument, check_numbers


class Int8(BlockCompressor):
    """Send 8-bit integers, scaled by the largest of each block.

    Args:
        block: elements that share a scale, ≥ 8, default 1024. Fewer are more accurate and cost 4/block bytes more.
    """

    code: ClassVar[BlockCode] = quantise.CODE

    def __init__(self, block: int = 1024) -> None:
        check_numbers(block=block)
        if block < 8 or block > LARGEST_TILE:
            raise InvalidArgument(f"block must be from 8 to {LARGEST_TILE:,} elements, got {block}")
        self.block = block

    def finite(self, encoded: Tensor, numel: int) -> Tensor | None:
        scales = self.code.scales(encoded, numel, self.block)
        return torch.isfinite(scales * 127.0).all()  # the largest that a block can hold

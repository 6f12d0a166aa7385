"""Eight-bit integers with one scale per block.

    s = max |x| / 127 over the block,  q = round(x / s),  x ≈ s q,  |x − s q| ≤ s / 2

Bytes: 1 + 4/block per element. On a GPU `accel.kernels.quantise` does this in one pass.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from accel.comm.fused import Codec, Fused
from accel.kernels import quantise

_SMALLEST_SCALE = 1e-37  # 1/s must be a float32; a block below is sent as zeros
_TILE = 1 << 17  # elements worked on at once: three float32 temporaries stay in a 2 MB cache


class Int8(Fused):
    """Send 8-bit integers, scaled by the largest of each block.

    Args:
        block: elements that share a scale, ≥ 8, default 1024. Fewer are more accurate and cost 4/block bytes more.
    """

    codec: ClassVar[Codec] = quantise

    def __init__(self, block: int = 1024) -> None:
        if block < 8 or block > _TILE:
            raise ValueError(f"block must be from 8 to {_TILE:,} elements, got {block}")
        self.block = block

    def encoded_bytes(self, numel: int) -> int:
        return numel + 4 * -(-numel // self.block)

    def _parts(self, encoded: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        scales = 4 * -(-numel // self.block)
        return encoded[:scales].view(torch.float32), encoded[scales:].view(torch.int8)

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None) -> None:
        if self.codec.takes(values, self.block):
            return self.codec.encode(values, out, self.block, lost=lost)
        scales, codes = self._parts(out, values.numel())
        for low, high, rows, _ in tiles(values.numel(), self.block):
            x = blocks(values[low:high], self.block)
            scale = x.abs().amax(1).float().div_(127.0)  # 5 times as fast here as the norm of the same name
            scales[rows] = scale
            small = scale < _SMALLEST_SCALE
            inverse = scale.reciprocal().masked_fill_(small, 0.0).unsqueeze(1)
            q = torch.mul(x, inverse.to(x.dtype)).round_()
            codes[low:high] = q.view(-1)[: high - low]
            if lost is not None:
                kept = q.mul_(scale.to(x.dtype).unsqueeze(1)).view(-1)[: high - low]
                torch.sub(values[low:high], kept, out=lost[low:high])
        return None

    def decode(self, encoded: Tensor, out: Tensor, add: bool = False) -> None:
        if self.codec.takes(out, self.block):
            return self.codec.decode_sum(encoded[None], out, self.block, add)
        scales, codes = self._parts(encoded, out.numel())
        for low, high, rows, whole in tiles(out.numel(), self.block):
            q = blocks(codes[low:high], self.block).to(out.dtype)
            scale = scales[rows].to(out.dtype).unsqueeze(1)
            if add and whole:
                out[low:high].view(-1, self.block).addcmul_(q, scale)
            elif add:
                out[low:high] += q.mul_(scale).view(-1)[: high - low]
            else:
                out[low:high] = q.mul_(scale).view(-1)[: high - low]
        return None


def tiles(numel: int, block: int) -> list[tuple[int, int, slice, bool]]:
    """Return (low, high, rows, whole): ranges of elements, the blocks they fill, and whether they fill the last one."""
    step = max(_TILE // block, 1) * block
    found = []
    for low in range(0, numel, step):
        high = min(low + step, numel)
        whole = high - (high - low) % block
        if whole > low:
            found.append((low, whole, slice(low // block, whole // block), True))
        if whole < high:
            found.append((whole, high, slice(whole // block, whole // block + 1), False))
    return found


def blocks(values: Tensor, block: int) -> Tensor:
    """Return `values` as (blocks, block); a part of a block is filled up with zeros in a copy."""
    if values.numel() % block == 0:
        return values.view(-1, block)
    padded = values.new_zeros(-(-values.numel() // block) * block)
    padded[: values.numel()] = values
    return padded.view(-1, block)

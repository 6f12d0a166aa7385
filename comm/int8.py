"""Eight-bit integers with one scale per block.

    s = max |x| / 127 over the block,  q = round(x / s),  x ≈ s q,  |x − s q| ≤ s / 2

Bytes: 1 + 4/block per element. On a GPU `accel.kernels.quantise` does this in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from accel.comm.compression.fused import Codec, Fused
from accel.comm.compressor import add_residual
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
        self.encode_sum(values, 1.0, out, None, lost)

    def encode_sum(
        self, values: Tensor, factor: float, out: Tensor, residual: Tensor | None, lost: Tensor | None
    ) -> None:
        if self.codec.takes(values, self.block):
            add_residual(values, factor, residual)
            return self.codec.encode(values, out, self.block, lost=lost)
        scales, codes = self._parts(out, values.numel())
        room = values.new_empty(min(max(_TILE, self.block), values.numel()))
        whole, code_rows = rows(values, self.block), rows(codes, self.block)
        nothing = [None] * len(whole)
        parts = (nothing if one is None else rows(one, self.block) for one in (residual, lost))
        for given, code, scale, withheld, rest in zip(whole, code_rows, _by_tile(scales, whole), *parts, strict=True):
            x = summed(given, factor, withheld, rest)
            q = room[: x.numel()].view(x.shape)
            top = torch.abs(x, out=q).amax(1, keepdim=True)  # 5 times as fast here as the norm of the same name
            scale.copy_(top.view(-1)).div_(127.0)
            s = scale.view(-1, 1)
            inverse = s.reciprocal().masked_fill_(s < _SMALLEST_SCALE, 0.0)
            code.copy_(torch.mul(x, inverse.to(x.dtype), out=q).round_())
            if rest is not None:
                torch.sub(x, q.mul_(s.to(x.dtype)), out=rest)
        return None

    def finite(self, encoded: Tensor, numel: int) -> Tensor | None:
        scales, _ = self._parts(encoded, numel)
        return torch.isfinite(scales * 127.0).all()  # the largest that a block can hold

    def decode(self, encoded: Tensor, out: Tensor, add: bool = False) -> None:
        if self.codec.takes(out, self.block):
            return self.codec.decode_sum(encoded[None], out, self.block, add)
        scales, codes = self._parts(encoded, out.numel())
        room = out.new_empty(min(max(_TILE, self.block), out.numel()))
        whole = rows(out, self.block)
        for part, code, scale in zip(whole, rows(codes, self.block), _by_tile(scales, whole), strict=True):
            q, s = room[: code.numel()].view(code.shape).copy_(code), scale.to(out.dtype).view(-1, 1)
            if add:
                part.addcmul_(q, s)
            else:
                torch.mul(q, s, out=part)
        return None


def summed(values: Tensor, factor: float, residual: Tensor | None, room: Tensor | None) -> Tensor:
    """Return factor · values + residual, where there is one in the room of what will be lost, which is there then."""
    if residual is not None:
        return torch.add(residual, values, alpha=factor, out=room)
    return values if factor == 1.0 else values * factor


def rows(values: Tensor, block: int) -> Sequence[Tensor]:
    """Return tiles (blocks, block), and what does not fill a block as (1, rest)."""
    whole = values.numel() // block * block
    found = torch.split(values[:whole].view(-1, block), max(_TILE // block, 1)) if whole else ()
    return (*found, values[whole:].view(1, -1)) if whole < values.numel() else found


def _by_tile(scales: Tensor, tiles: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.split(scales, [one.shape[0] for one in tiles]) if tiles else ()


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

"""The sign of each element, one scale per block.

    x ≈ s · sign(x),  s = mean |x| over the block

which is the nearest of all s · sign(x). It needs error feedback: without, what a step loses is lost for good.
Bytes: 1/8 + 4/block per element. On a GPU `accel.kernels.sign_pack` does this in one pass.

Sources: 1-bit SGD (Seide et al. 2014); signSGD with error feedback (Karimireddy et al. 2019, arxiv.org/abs/1901.09847).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from accel.comm.compression.fused import Codec
from accel.comm.compression.gathered import Gathered
from accel.comm.compressor import add_residual, part_of
from accel.comm.int8 import summed, tiles
from accel.kernels import sign_pack
from accel.kernels.tables import kept


class OneBit(Gathered):
    """Send the sign of each element and the mean magnitude of each block, with error feedback.

    Args:
        block: elements that share a scale, a multiple of 8, default 256. Fewer are more accurate and cost 4/block bytes
            more.
        exact_below: parameters of fewer elements, and all of less than two dimensions, are sent as they are; default
            1024.
        start_step: steps at first, ≥ 0, that send gradients as they are, default 0. While gradients change fast, their
            signs mislead: a fifth of the training is usual.
        momentum: accumulate SGD's momentum here, default False: two more copies of the gradients, and several times
            more accurate. Hand it over before the first step: `accel.comm.sgd_momentum.take_momentum`.

    Raises:
        ValueError: if an argument is out of range; from `loss.backward()`, if momentum was not handed over.

    Example:
        >>> state = CommState(ddp, OneBit(momentum=True, start_step=1000))
        >>> ddp.register_comm_hook(state, hook)
        >>> momentum = take_momentum(state, optimizer)
    """

    feedback = True
    codec: ClassVar[Codec] = sign_pack

    def __init__(
        self, block: int = 256, *, exact_below: int = 1024, start_step: int = 0, momentum: bool = False
    ) -> None:
        if block < 8 or block % 8 or block > 1 << 16:
            raise ValueError(f"block must be a multiple of 8 from 8 to 65,536 elements, got {block}")
        for name, value in (("exact_below", exact_below), ("start_step", start_step)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number ≥ 0, got {value!r}")
        self.block, self.exact_below, self.start_step, self.momentum = block, exact_below, start_step, momentum
        self._bind(None)

    def encoded_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + -(-numel // 8)

    def _parts(self, encoded: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        scales = 4 * -(-numel // self.block)
        return encoded[:scales].view(torch.float32), encoded[scales:]

    def encode(self, values: Tensor, out: Tensor, lost: Tensor | None) -> None:
        self.encode_sum(values, 1.0, out, None, lost)

    def encode_sum(
        self, values: Tensor, factor: float, out: Tensor, residual: Tensor | None, lost: Tensor | None
    ) -> None:
        if self.codec.takes(values, self.block):
            add_residual(values, factor, residual)
            return self.codec.encode(values, out, self.block, lost=lost)
        scales, bits = self._parts(out, values.numel())
        for low, high, rows, whole in tiles(values.numel(), self.block):
            here = slice(low, high)
            given = summed(values[here], factor, part_of(residual, here), part_of(lost, here))
            x = given.view(-1, self.block if whole else high - low)
            scale = x.abs().sum(1).div_(x.shape[1]).float()
            scales[rows] = scale
            bits[low // 8 : -(-high // 8)] = pack(given.signbit())  # −0 too, as copysign below
            if lost is not None:
                torch.sub(x, torch.copysign(scale.to(x.dtype).unsqueeze(1), x), out=lost[here].view(x.shape))
        return None

    def decode(self, encoded: Tensor, out: Tensor, add: bool = False) -> None:
        if self.codec.takes(out, self.block):
            return self.codec.decode_sum(encoded[None], out, self.block, add)
        scales, bits = self._parts(encoded, out.numel())
        for low, high, rows, whole in tiles(out.numel(), self.block):
            signs = unpack(bits[low // 8 : -(-high // 8)])[: high - low]
            scale = scales[rows].unsqueeze(1)
            if not whole:
                part = signs.mul_(scale[0, 0])
                out[low:high] = out[low:high] + part if add else part
            elif add:
                out[low:high].view(-1, self.block).addcmul_(signs.view(-1, self.block), scale)
            else:
                torch.mul(signs.view(-1, self.block), scale, out=out[low:high].view(-1, self.block))
        return None


# numpy packs with one vector instruction per 16 elements, and has no CUDA; the products and sums run anywhere.


def pack(negative: Tensor) -> Tensor:
    """Return bools (m,) as bits (⌈m/8⌉,) uint8, the first in the highest bit."""
    if negative.device.type == "cpu":
        return torch.from_numpy(np.packbits(negative.numpy()))
    padded = negative.new_zeros(-(-negative.numel() // 8) * 8)
    padded[: negative.numel()] = negative
    places = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=negative.device)
    return (padded.view(-1, 8) * places).sum(1, dtype=torch.uint8)


@kept(8)
def _table(device: torch.device) -> Tensor:
    """Return the eight signs that each byte stands for, (256, 8) float32."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, 8)
    return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float32)).to(device)


def unpack(bits: Tensor) -> Tensor:
    """Return bits (b,) uint8 as signs (8 b,) float32: −1 where a bit is set, else 1."""
    # A row of the table per byte, not a shift per bit.
    return torch.nn.functional.embedding(bits.int(), _table(bits.device)).view(-1)

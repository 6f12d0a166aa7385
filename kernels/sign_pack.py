"""One bit an element and one scale per block: packed in one pass with error feedback, and summed over ranks in one.

    x = factor · values + residual
    s[b] = mean |x| over block b        bit = 1 where x has a minus sign        lost = x − (−s if bit else s)
    encoded = s, float32 [B] | bits, the first of each byte its highest, uint8 [⌈N/8⌉]
    out = (out +) Σ_r ±s_r, in the order of r, each sum rounded to float32

N elements, B = ⌈N/block⌉, R ranks. −0, which gradients behind a ReLU often are, has a minus sign and is sent as −s: bit
and `lost` must agree. A block with a NaN, an infinity, or a sum beyond float32 decodes to what is not finite. Values
and residual are read once, bits, scales and what was lost are written once: 12.1 bytes an element. Each element has one
writer, and a sum has one order on one kind of device, so the bits are the same in every run.

    >>> values, encoded = torch.tensor([1.0, -3.0]), torch.empty(encoded_bytes(2, 8), dtype=torch.uint8)
    >>> encode(values, encoded, block=8)
    >>> encoded[:4].view(torch.float32).item(), encoded[4:].tolist()
    (2.0, [64])

Sources: 1-bit SGD (Seide et al. 2014); signSGD with error feedback (Karimireddy et al. 2019,
https://arxiv.org/abs/1901.09847).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from accel.kernels.codes.block_code import BlockCode, Flops, takes
from accel.kernels.tables import kept

__all__ = ["cost_decode_sum", "cost_encode", "decode_sum", "encode", "encoded_bytes", "takes"]


def _encode_tile(x_BK: Tensor, scale_B1: Tensor, bits: Tensor, lost_BK: Tensor | None, room_BK: Tensor) -> None:
    scale_B1.copy_(torch.abs(x_BK, out=room_BK).sum(1, keepdim=True).div_(x_BK.shape[1]))
    bits.view(-1).copy_(pack(x_BK.signbit()))  # −0 too, as copysign below
    if lost_BK is not None:
        torch.sub(x_BK, torch.copysign(scale_B1.to(x_BK.dtype), x_BK, out=room_BK), out=lost_BK)


def pack(negative: Tensor) -> Tensor:
    """Return m bools as bits (⌈m/8⌉,) uint8, the first in the highest bit."""
    if negative.device.type == "cpu":  # numpy packs with one vector instruction per 16 elements, and has no CUDA
        return torch.from_numpy(np.packbits(negative.numpy()))
    padded = negative.new_zeros(-(-negative.numel() // 8) * 8)
    padded[: negative.numel()] = negative.view(-1)
    places = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=negative.device)
    return (padded.view(-1, 8) * places).sum(1, dtype=torch.uint8)


@kept(8)
def _table(device: torch.device) -> Tensor:
    """Return the eight signs that each byte stands for, (256, 8) float32."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, 8)
    return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float32)).to(device)


def unpack(bits: Tensor) -> Tensor:
    """Return bits (…, b) uint8 as signs (…, 8 b) float32: −1 where a bit is set, else 1."""
    # A row of the table per byte, not a shift per bit.
    return torch.nn.functional.embedding(bits.int(), _table(bits.device)).flatten(-2)


# |x| and its sum; the difference from ±s.
_flops = Flops(encode=2, lost=1, decode=0)
CODE = BlockCode(
    "sign_pack", bits=1, block=256, encode_tile=_encode_tile, units=lambda bits, _: unpack(bits), flops=_flops
)
encode, decode_sum, encoded_bytes = CODE.encode, CODE.decode_sum, CODE.encoded_bytes
cost_encode, cost_decode_sum = CODE.cost_encode, CODE.cost_decode_sum

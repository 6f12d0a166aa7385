"""Codes of gradients on whole tensors, as one writes them in torch: rivals of the kernels, eager and compiled.

The formulas are those of `accel.kernels.quantise` (8 bits) and `accel.kernels.sign_pack` (1 bit).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel.kernels.quantise import SMALLEST_SCALE


def encode(bits: int, values: Tensor, residual: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales [B], the codes, uint8, and what was lost [N]."""
    numel = len(values)
    x_BK = pad(values + residual, (0, -numel % block)).view(-1, block)
    if bits == 8:
        scale_B1 = x_BK.abs().amax(1, keepdim=True) / 127
        q_BK = (x_BK * torch.where(scale_B1 < SMALLEST_SCALE, 0.0, 1 / scale_B1)).round()
        code, decoded_BK = q_BK.to(torch.int8).view(torch.uint8).view(-1)[:numel], q_BK * scale_B1
    else:
        scale_B1 = x_BK.abs().sum(1, keepdim=True) / block
        if rest := numel % block:
            scale_B1 = torch.cat((scale_B1[:-1], scale_B1[-1:] * (block / rest)))
        shifts = torch.arange(7, -1, -1, device=values.device)
        code = (x_BK.signbit().view(-1, 8) << shifts).sum(1).to(torch.uint8)[: -(-numel // 8)]
        decoded_BK = torch.copysign(scale_B1, x_BK)
    return scale_B1.view(-1), code, (x_BK - decoded_BK).view(-1)[:numel]


def decode_sum(bits: int, encoded: Tensor, numel: int, block: int) -> Tensor:
    """Return the sum [N] of what ranks encoded [R, E]."""
    blocks = -(-numel // block)
    scales_RB1 = encoded[:, : 4 * blocks].view(torch.float32).unsqueeze(-1)
    codes = encoded[:, 4 * blocks :]
    if bits == 8:
        units = codes.view(torch.int8).float()
    else:
        shifts = torch.arange(7, -1, -1, device=encoded.device)
        units = 1.0 - 2.0 * ((codes.unsqueeze(-1) >> shifts) & 1).flatten(1)
    padded = pad(units, (0, blocks * block - units.shape[1])).view(len(encoded), blocks, block)
    return (padded * scales_RB1).sum(0).view(-1)[:numel]

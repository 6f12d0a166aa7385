"""One bit an element and one scale per block: packed in one pass with error feedback, and summed over ranks in one.

    x = values + residual
    s[b] = mean |x| over block b        bit = 1 where x has a minus sign        lost = x − (−s if bit else s)
    encoded = s, float32 [B] | bits, the first of each byte its highest, uint8 [⌈N/8⌉]
    out = (out +) Σ_r ±s_r, in the order of r, each sum rounded to float32

N elements, B = ⌈N/block⌉, R ranks. −0, which gradients behind a ReLU often are, has a minus sign and is sent as −s: bit
and `lost` must agree. A block with a NaN, an infinity, or a sum beyond float32 decodes to what is not finite. Values
and residual are read once, bits, scales and what was lost are written once: 12.1 bytes an element. Each element has one
writer, and a sum has one order on one kind of device, so the bits are the same in every run.

Sources: 1-bit SGD (Seide et al. 2014); signSGD with error feedback (Karimireddy et al. 2019,
https://arxiv.org/abs/1901.09847).
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel.kernels.codes.block_codes import (
    check_block,
    check_decode,
    check_encode,
    padded,
    scale_bytes,
    scales_ref,
    takes,
)
from accel.kernels.support import Cost

__all__ = ["cost_decode_sum", "cost_encode", "decode_sum", "encode", "encoded_bytes", "takes"]


def encoded_bytes(numel: int, block: int) -> int:
    """Return the size of `numel` encoded elements."""
    return scale_bytes(numel, block) + -(-numel // 8)


def encode_ref(values_N: Tensor, block: int, residual_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return encoded [scales | bits] and lost [N] in plain torch."""
    x_N = values_N if residual_N is None else values_N + residual_N
    counts_B = padded(torch.ones_like(x_N), block).sum(1)
    scale_B = padded(x_N, block).abs().sum(1) / counts_B
    places_8 = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=x_N.device)
    bits = (padded(x_N.signbit().to(torch.uint8), 8) * places_8).sum(1, dtype=torch.uint8)
    sent_N = torch.copysign(scale_B[:, None], padded(x_N, block)).view(-1)[: len(x_N)]
    return torch.cat((scale_B.view(torch.uint8), bits)), x_N - sent_N


def decode_sum_ref(encoded_RE: Tensor, numel: int, block: int, start_N: Tensor | None = None) -> Tensor:
    """Return Σ_r ±s_r [N], plus `start` where given, in plain torch."""
    total_N = start_N
    cut = scale_bytes(numel, block)
    shifts_8 = torch.arange(7, -1, -1, dtype=torch.uint8, device=encoded_RE.device)
    for encoded_E in encoded_RE:
        signs_N = 1.0 - 2.0 * (encoded_E[cut:, None] >> shifts_8 & 1).view(-1)[:numel].float()
        part_N = (padded(signs_N, block) * scales_ref(encoded_E, numel, block)[:, None]).view(-1)[:numel]
        total_N = part_N if total_N is None else total_N + part_N
    assert total_N is not None
    return total_N


def _encode(values: Tensor, encoded: Tensor, block: int, residual: Tensor | None, lost: Tensor | None) -> None:
    if takes(values, block):
        from accel.kernels.codes import sign_pack_triton

        return sign_pack_triton.encode(values, encoded, block, residual, lost)
    found, left = encode_ref(values, block, residual)
    encoded.copy_(found)
    if lost is not None:
        lost.copy_(left)
    return None


def _decode_sum(encoded: Tensor, out: Tensor, block: int, add: bool) -> None:
    if takes(out, block):
        from accel.kernels.codes import sign_pack_triton

        return sign_pack_triton.decode_sum(encoded, out, block, add)
    out.copy_(decode_sum_ref(encoded, len(out), block, out if add else None))
    return None


# torch.compile sees opaque ops; eager calls go around them, for half the overhead.
_encode_op = torch.library.custom_op("accel::sign_pack_encode", _encode, mutates_args=("encoded", "lost"))
_decode_sum_op = torch.library.custom_op("accel::sign_pack_decode_sum", _decode_sum, mutates_args=("out",))


def encode(
    values: Tensor, encoded: Tensor, block: int = 256, residual: Tensor | None = None, lost: Tensor | None = None
) -> None:
    """Encode values, plus what earlier steps withheld of them, and write what that lost.

    Args:
        values: [N], float32, contiguous; not changed.
        encoded: [encoded_bytes(N, block)], uint8, written.
        block: elements that share a scale, a multiple of 8, default 256. Kernels take powers of two from 8 to 2048;
            other sizes run in plain torch.
        residual: [N], float32, added to the values first; None (default) for zeros.
        lost: [N], float32, written: what the signs lack of the sum; None (default) doesn't. It may be `residual`.

    Raises:
        ValueError: if shapes, dtypes, devices or layouts don't fit.

    Example:
        >>> values, encoded = torch.tensor([1.0, -3.0]), torch.empty(encoded_bytes(2, 8), dtype=torch.uint8)
        >>> encode(values, encoded, block=8)
        >>> encoded[:4].view(torch.float32).item(), encoded[4:].tolist()
        (2.0, [64])
    """
    check_block("sign_pack.encode", block, multiple=8)
    check_encode("sign_pack.encode", values, encoded, encoded_bytes(values.numel(), block), residual, lost)
    run = _encode_op if torch.compiler.is_compiling() else _encode
    run(values, encoded, block, residual, lost)


def decode_sum(encoded: Tensor, out: Tensor, block: int = 256, add: bool = False) -> None:
    """Write the sum of what ranks encoded: in their order, in float32, the same bits in every run.

    Args:
        encoded: [R, encoded_bytes(N, block)], uint8, R ≥ 1; rows begin at multiples of 4 bytes.
        out: [N], float32, contiguous, written.
        block: as in `encode`.
        add: begin with what `out` holds, default False.

    Raises:
        ValueError: if shapes, dtypes, devices or layouts don't fit.
    """
    check_block("sign_pack.decode_sum", block, multiple=8)
    check_decode("sign_pack.decode_sum", encoded, out, encoded_bytes(out.numel(), block))
    if out.numel() == 0:
        return
    run = _decode_sum_op if torch.compiler.is_compiling() else _decode_sum
    run(encoded, out, block, add)


def cost_encode(numel: int, block: int = 256, residual: bool = True, lost: bool = True) -> Cost:
    """Return what `encode` must do at least; `residual` and `lost` tell whether they are given."""
    # |x| and its sum; x + r; the difference from ±s.
    flops = numel * (2 + residual + lost)
    return Cost(flops=flops, bytes=4 * numel * (1 + residual + lost) + encoded_bytes(numel, block))


def cost_decode_sum(numel: int, ranks: int, block: int = 256, add: bool = False) -> Cost:
    """Return what `decode_sum` must do at least."""
    read = ranks * encoded_bytes(numel, block)
    return Cost(flops=numel * (ranks - 1 + add), bytes=read + 4 * numel * (1 + add))

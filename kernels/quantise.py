"""Eight-bit integers with one scale per block: encoded in one pass with error feedback, and summed over ranks in one.

    x = values + residual
    s[b] = max |x| / 127 over block b        q = round(x / s), half to even        lost = x − s q
    encoded = s, float32 [B] | q, int8 [N]
    out = (out +) Σ_r s_r q_r, in the order of r, each product and each sum rounded to float32

N elements, B = ⌈N/block⌉, R ranks, E = 4 B + N bytes. A block whose scale is below 1e-37 is sent as zeros, for 1/s
must be a float32; one that holds a NaN or an infinity decodes to NaN. Values and residual are read once; codes, scales
and what was lost are written once: 13 bytes an element, where plain torch moves 65 op by op. Each element has one
writer, so the bits are the same in every run.

Error feedback: Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847. Blocks of one scale: Dettmers 2015,
https://arxiv.org/abs/1511.04561.
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

SMALLEST_SCALE = 1e-37

__all__ = ["cost_decode_sum", "cost_encode", "decode_sum", "encode", "encoded_bytes", "takes"]


def encoded_bytes(numel: int, block: int) -> int:
    """Return the size of `numel` encoded elements."""
    return scale_bytes(numel, block) + numel


def encode_ref(values_N: Tensor, block: int, residual_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return encoded [E] and lost [N] in plain torch."""
    x_BK = padded(values_N if residual_N is None else values_N + residual_N, block)
    # Not divided by a number: CUDA multiplies by its inverse then, which rounds otherwise than a CPU.
    scale_B = x_BK.abs().amax(1) / values_N.new_full((), 127.0)
    inverse_B = scale_B.reciprocal().masked_fill(scale_B < SMALLEST_SCALE, 0.0)
    q_BK = (x_BK * inverse_B[:, None]).round()
    lost_N = (x_BK - q_BK * scale_B[:, None]).view(-1)[: len(values_N)]
    codes_N = q_BK.nan_to_num(nan=0.0).to(torch.int8).view(-1)[: len(values_N)]
    return torch.cat((scale_B.view(torch.uint8), codes_N.view(torch.uint8))), lost_N


def decode_sum_ref(encoded_RE: Tensor, numel: int, block: int, start_N: Tensor | None = None) -> Tensor:
    """Return Σ_r s_r q_r [N], plus `start` where given, in plain torch."""
    total_N = start_N
    cut = scale_bytes(numel, block)
    for encoded_E in encoded_RE:
        scale_B = scales_ref(encoded_E, numel, block)
        part_N = (padded(encoded_E[cut:].view(torch.int8).float(), block) * scale_B[:, None]).view(-1)[:numel]
        total_N = part_N if total_N is None else total_N + part_N
    assert total_N is not None
    return total_N


def _encode(values: Tensor, encoded: Tensor, block: int, residual: Tensor | None, lost: Tensor | None) -> None:
    if takes(values, block):
        from accel.kernels.codes import quantise_triton

        return quantise_triton.encode(values, encoded, block, residual, lost)
    found, left = encode_ref(values, block, residual)
    encoded.copy_(found)
    if lost is not None:
        lost.copy_(left)
    return None


def _decode_sum(encoded: Tensor, out: Tensor, block: int, add: bool) -> None:
    if takes(out, block):
        from accel.kernels.codes import quantise_triton

        return quantise_triton.decode_sum(encoded, out, block, add)
    out.copy_(decode_sum_ref(encoded, len(out), block, out if add else None))
    return None


# torch.compile sees opaque ops; eager calls go around them, for half the overhead.
_encode_op = torch.library.custom_op("accel::quantise_encode", _encode, mutates_args=("encoded", "lost"))
_decode_sum_op = torch.library.custom_op("accel::quantise_decode_sum", _decode_sum, mutates_args=("out",))


def encode(
    values: Tensor, encoded: Tensor, block: int = 1024, residual: Tensor | None = None, lost: Tensor | None = None
) -> None:
    """Encode values, plus what earlier steps withheld of them, and write what that lost.

    Args:
        values: [N], float32, contiguous; not changed.
        encoded: [encoded_bytes(N, block)], uint8, written.
        block: elements that share a scale, default 1024. Kernels take powers of two from 8 to 2048; other sizes run in
            plain torch.
        residual: [N], float32, added to the values first; None (default) for zeros.
        lost: [N], float32, written: what the codes lack of the sum; None (default) doesn't. It may be `residual`.

    Raises:
        ValueError: if shapes, dtypes, devices or layouts don't fit.

    Example:
        >>> values, encoded = torch.tensor([127.0, 50.4]), torch.empty(encoded_bytes(2, 8), dtype=torch.uint8)
        >>> encode(values, encoded, block=8)
        >>> encoded[4:].tolist()
        [127, 50]
    """
    check_block("quantise.encode", block)
    check_encode("quantise.encode", values, encoded, encoded_bytes(values.numel(), block), residual, lost)
    run = _encode_op if torch.compiler.is_compiling() else _encode
    run(values, encoded, block, residual, lost)


def decode_sum(encoded: Tensor, out: Tensor, block: int = 1024, add: bool = False) -> None:
    """Write the sum of what ranks encoded: in their order, in float32, the same bits in every run.

    Args:
        encoded: [R, encoded_bytes(N, block)], uint8, R ≥ 1; rows begin at multiples of 4 bytes.
        out: [N], float32, contiguous, written.
        block: as in `encode`.
        add: begin with what `out` holds, default False.

    Raises:
        ValueError: if shapes, dtypes, devices or layouts don't fit.
    """
    check_block("quantise.decode_sum", block)
    check_decode("quantise.decode_sum", encoded, out, encoded_bytes(out.numel(), block))
    if out.numel() == 0:
        return
    run = _decode_sum_op if torch.compiler.is_compiling() else _decode_sum
    run(encoded, out, block, add)


def cost_encode(numel: int, block: int = 1024, residual: bool = True, lost: bool = True) -> Cost:
    """Return what `encode` must do at least; `residual` and `lost` tell whether they are given."""
    # |x|, max, x/s, round; x + r; s q and its difference from x.
    flops = numel * (4 + residual + 2 * lost)
    return Cost(flops=flops, bytes=4 * numel * (1 + residual + lost) + encoded_bytes(numel, block))


def cost_decode_sum(numel: int, ranks: int, block: int = 1024, add: bool = False) -> Cost:
    """Return what `decode_sum` must do at least."""
    read = ranks * encoded_bytes(numel, block)
    return Cost(flops=numel * (2 * ranks - 1 + add), bytes=read + 4 * numel * (1 + add))

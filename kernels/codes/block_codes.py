"""What encodings with one scale per block share: the layout of the bytes, what is refused, and how launches are cut.

encoded = scales, float32 [B] | codes        N elements, B = ⌈N/block⌉ blocks, the last one may be shorter
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.kernels.support import runs_triton

SMALLEST, LARGEST = 8, 2048
"""Elements of a block that a program of a kernel holds in registers; of 4,096 a thread would need up to 254."""
EXACT = {"enable_fp_fusion": False}
"""Options of all launches: products are not fused with sums, so that the bits are those of the reference."""
_ELEMENTS = 2048  # of a program, where blocks are smaller: 16 a thread, four loads of 16 bytes under way


class Launch(NamedTuple):
    """One launch over some blocks of a tensor."""

    programs: int
    rows: int
    """Blocks of a program."""
    whole: bool
    """Whether all blocks are full: then masks are equal along a block, and loads and stores are vectors."""


def launches(numel: int, block: int) -> Iterator[Launch]:
    """Yield the launches that cover `numel` elements: the full blocks, then what is left."""
    rows = max(_ELEMENTS // block, 1)
    full, rest = divmod(numel, block)
    if full:
        yield Launch(-(-full // rows), rows, True)
    if rest:
        yield Launch(1, 1, False)


def launch_encode(
    kernel: Any, values: Tensor, encoded: Tensor, block: int, residual: Tensor | None, lost: Tensor | None
) -> None:
    """Launch the kernel that encodes, over all blocks."""
    numel = values.numel()
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        for programs, rows, whole in launches(numel, block):
            form = {"WHOLE": whole, "ROWS": rows, "BLOCK": block}
            kernel[(programs,)](values, residual, encoded, lost, numel, -(-numel // block), **form, **EXACT)


def launch_decode_sum(kernel: Any, encoded: Tensor, out: Tensor, block: int, add: bool) -> None:
    """Launch the kernel that sums what ranks encoded, over all blocks."""
    numel = out.numel()
    ranks, stride = encoded.shape[0], encoded.stride(0)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        for programs, rows, whole in launches(numel, block):
            form = {"ADD": add, "WHOLE": whole, "ROWS": rows, "BLOCK": block}
            kernel[(programs,)](encoded, out, numel, -(-numel // block), ranks, stride, **form, **EXACT)


def takes(values: Tensor, block: int) -> bool:
    """Tell whether kernels encode these values: float32 on CUDA with triton, blocks a power of two from 8 to 2048."""
    fits = SMALLEST <= block <= LARGEST and block & (block - 1) == 0
    return fits and values.dtype == torch.float32 and runs_triton(values)


def scale_bytes(numel: int, block: int) -> int:
    """Return the bytes of all scales."""
    return 4 * -(-numel // block)


def scales_ref(encoded_E: Tensor, numel: int, block: int) -> Tensor:
    """Return the scales [B], copied: torch may have moved the row to where a float32 can't begin."""
    return encoded_E[: scale_bytes(numel, block)].clone().view(torch.float32)


def padded(values_N: Tensor, block: int) -> Tensor:
    """Return values as [B, block], zeros behind the last."""
    return torch.nn.functional.pad(values_N, (0, -len(values_N) % block)).view(-1, block)


def check_encode(
    op: str, values: Tensor, encoded: Tensor, size: int, residual: Tensor | None, lost: Tensor | None
) -> None:
    """Raise ValueError unless the tensors of an encoding fit."""
    flat = {"values": values, "residual": residual, "lost": lost}
    for name, one in flat.items():
        if one is None:
            continue
        if one.dtype != torch.float32 or one.shape != values.shape or one.dim() != 1 or not one.is_contiguous():
            raise ValueError(f"{op}: {name} must be contiguous float32 [N], N as of values. Found: {_told(one)}.")
    if encoded.dtype != torch.uint8 or encoded.shape != (size,) or not encoded.is_contiguous():
        raise ValueError(f"{op}: encoded must be contiguous uint8 [{size}]. Found: {_told(encoded)}. Size it anew.")
    _check_place(op, encoded)
    _check_devices(op, values, encoded, residual, lost)


def check_decode(op: str, encoded: Tensor, out: Tensor, size: int) -> None:
    """Raise ValueError unless the tensors of a decoding fit."""
    if out.dtype != torch.float32 or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"{op}: out must be contiguous float32 [N]. Found: {_told(out)}.")
    if encoded.dtype != torch.uint8 or encoded.dim() != 2 or encoded.shape[1] != size or encoded.shape[0] < 1:
        raise ValueError(f"{op}: encoded must be uint8 [R, {size}], a row for each rank. Found: {_told(encoded)}.")
    if size and (encoded.stride(1) != 1 or (len(encoded) > 1 and encoded.stride(0) % 4)):
        raise ValueError(
            f"{op}: rows of encoded must be contiguous and begin at multiples of 4 bytes, where their scales stand. "
            f"Found: strides {encoded.stride()}. Cut them out of a tensor with longer rows."
        )
    _check_place(op, encoded)
    _check_devices(op, out, encoded)


def _check_place(op: str, encoded: Tensor) -> None:
    if torch.compiler.is_compiling():
        return  # which has no offsets, and makes its tensors anew
    if encoded.storage_offset() % 4:
        raise ValueError(
            f"{op}: encoded must begin at a multiple of 4 bytes, since its scales are float32. "
            f"Found: byte {encoded.storage_offset()} of its storage. Give it a tensor of its own."
        )


def _check_devices(op: str, *tensors: Tensor | None) -> None:
    devices = {one.device for one in tensors if one is not None}
    if len(devices) > 1:
        raise ValueError(f"{op}: all tensors must be on one device. Found: {sorted(map(str, devices))}. Move them.")


def check_block(op: str, block: int, multiple: int = 1) -> None:
    """Raise ValueError unless the block is a size."""
    if block < 1 or block % multiple:
        raise ValueError(f"{op}: block must be a positive multiple of {multiple} elements. Found: {block}. Use 1024.")


def _told(tensor: Tensor) -> str:
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{tensor.dtype} {list(tensor.shape)}{layout}"

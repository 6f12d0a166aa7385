"""Checks of the arguments of block codes."""

from __future__ import annotations

import torch
from torch import Tensor


def check_block(op: str, block: int, multiple: int) -> None:
    """Raise ValueError unless the block is a size."""
    if block < 1 or block % multiple:
        raise ValueError(f"{op}: block must be a positive multiple of {multiple} elements. Found: {block}. Use 1024.")


def check_encode(
    op: str, values: Tensor, encoded: Tensor, size: int, residual: Tensor | None, lost: Tensor | None
) -> None:
    """Raise ValueError unless the tensors of an encoding fit."""
    for name, tensor in (("values", values), ("residual", residual), ("lost", lost)):
        if tensor is not None and not (_is_flat(tensor) and _alike(tensor, values)):
            kind = _name(values.dtype) if values.is_floating_point() else "floating-point"
            raise ValueError(
                f"{op}: {name} must be contiguous {kind} [N], N as of values. Found: {_described(tensor)}."
            )
    if encoded.dtype != torch.uint8 or encoded.shape != (size,) or not encoded.is_contiguous():
        raise ValueError(
            f"{op}: encoded must be contiguous uint8 [{size}]. Found: {_described(encoded)}. Size it anew."
        )
    _check_place(op, encoded)
    _check_devices(op, values, encoded, residual, lost)


def check_decode(op: str, encoded: Tensor, out: Tensor, size: int) -> None:
    """Raise ValueError unless the tensors of a decoding fit."""
    if not _is_flat(out):
        raise ValueError(f"{op}: out must be contiguous floating-point [N]. Found: {_described(out)}.")
    if encoded.dtype != torch.uint8 or encoded.dim() != 2 or encoded.shape[1] != size or encoded.shape[0] < 1:
        raise ValueError(f"{op}: encoded must be uint8 [R, {size}], a row for each rank. Found: {_described(encoded)}.")
    if size and (encoded.stride(1) != 1 or (len(encoded) > 1 and encoded.stride(0) % 4)):
        raise ValueError(
            f"{op}: rows of encoded must be contiguous and begin at multiples of 4 bytes, where their scales stand. "
            f"Found: strides {encoded.stride()}. Cut them out of a tensor with longer rows."
        )
    _check_place(op, encoded)
    _check_devices(op, out, encoded)


def _is_flat(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() == 1 and tensor.is_contiguous()


def _alike(tensor: Tensor, values: Tensor) -> bool:
    return tensor is values or (tensor.dtype == values.dtype and tensor.shape == values.shape)


def _check_place(op: str, encoded: Tensor) -> None:
    if torch.compiler.is_compiling():
        return  # a compiler's tensors have no offsets, and are allocated by its own code
    if encoded.storage_offset() % 4:
        raise ValueError(
            f"{op}: encoded must begin at a multiple of 4 bytes, since its scales are float32. "
            f"Found: byte {encoded.storage_offset()} of its storage. Give it a tensor of its own."
        )


def _check_devices(op: str, first: Tensor, *others: Tensor | None) -> None:
    if any(other is not None and other.device != first.device for other in others):
        devices = {str(tensor.device) for tensor in (first, *others) if tensor is not None}
        raise ValueError(f"{op}: all tensors must be on one device. Found: {sorted(devices)}. Move them.")


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{tensor.dtype} {list(tensor.shape)}{layout}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

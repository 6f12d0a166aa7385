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
    if _encodes(values, encoded, size, residual, lost):
        return
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
    if _decodes(encoded, out, size):
        return
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


def _encodes(values: Tensor, encoded: Tensor, size: int, residual: Tensor | None, lost: Tensor | None) -> bool:
    """Return whether all is surely right, each property read once: the checks one by one take twice as long."""
    if not (values.is_floating_point() and values.dim() == 1 and values.is_contiguous()):
        return False
    dtype, shape, device = values.dtype, values.shape, values.device
    for tensor in (residual,) if lost is residual else (residual, lost):
        if tensor is not None and not (
            tensor.dtype is dtype and tensor.shape == shape and tensor.is_contiguous() and tensor.device == device
        ):
            return False
    return (
        encoded.dtype is torch.uint8
        and encoded.shape == (size,)
        and encoded.is_contiguous()
        and encoded.device == device
        and (torch.compiler.is_compiling() or encoded.storage_offset() % 4 == 0)
    )


def _decodes(encoded: Tensor, out: Tensor, size: int) -> bool:
    """Return whether all is surely right."""
    return (
        _is_flat(out)
        and encoded.dtype is torch.uint8
        and encoded.dim() == 2
        and encoded.is_contiguous()
        and _rows_fit(encoded.shape[0], encoded.shape[1], size)
        and encoded.device == out.device
        and (torch.compiler.is_compiling() or encoded.storage_offset() % 4 == 0)
    )


def _rows_fit(ranks: int, width: int, size: int) -> bool:
    return ranks > 0 and width == size and (ranks == 1 or size % 4 == 0)


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

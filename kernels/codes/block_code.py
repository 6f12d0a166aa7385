"""An encoding with one scale per block, as an op: encode with error feedback, decode, sum over ranks.

    x = factor · values + residual
    encoded = scales, float32 [B] | codes, uint8 [⌈N bits/8⌉]        lost = x − decoded
    out = (out +) Σ_r decoded_r, in the order of r

N elements, B = ⌈N/block⌉ blocks, the last one may be shorter, R ranks, E bytes encoded. The codes are defined for
tiles [B, K] of elements of B blocks: see `quantise` and `sign_pack`. The reference in plain torch is the path on a
CPU. There a sum may be fused with the product that is added, which saves one of two roundings; kernels round both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from accel.kernels.support import Cost, runs_triton
from accel.profiler.errors import InvalidArgument

SMALLEST_BLOCK, LARGEST_BLOCK = 8, 2048
"""Elements of a block that a program of a kernel holds in registers; of 4,096 a thread would need up to 254."""
LARGEST_TILE = 1 << 17
"""Elements worked on at once on a CPU: three float32 temporaries stay in a 2 MB cache."""

EncodeTile = Callable[[Tensor, Tensor, Tensor, "Tensor | None", Tensor], None]
Units = Callable[[Tensor, Tensor], Tensor]


class Flops(NamedTuple):
    """Floating-point operations of an element."""

    encode: int
    lost: int
    """Additional operations where the new residual is written."""
    decode: int


class BlockCode:
    """One encoding by blocks; its methods are the public functions of the op.

    Args:
        name: of the op.
        bits: of an element's code, 8 or 1.
        block: elements that share a scale unless the caller says otherwise.
        encode_tile: (x [B, K], scales [B, 1], codes [B, K bits/8], lost [B, K] or None, room [B, K]) → None, writes all
            but x, in whose place lost may be.
        units: (codes [B, K bits/8], room for B K elements) → codes as numbers [B, ≥ K], which times the scales are what
            is decoded.
        flops: for costs.
    """

    def __init__(
        self, name: str, *, bits: int, block: int, encode_tile: EncodeTile, units: Units, flops: Flops
    ) -> None:
        self.name, self.bits, self.block = name, bits, block
        self._encode_name, self._decode_name = f"{name}.encode", f"{name}.decode_sum"
        self._encode_tile, self._units, self._flops = encode_tile, units, flops
        # torch.compile sees opaque ops; eager calls go around them, for half the overhead.
        self.encode_op = torch.library.custom_op(
            f"accel::{name}_encode", self._encode, mutates_args=("encoded", "lost")
        )
        self.decode_sum_op = torch.library.custom_op(
            f"accel::{name}_decode_sum", self._decode_sum, mutates_args=("out",)
        )

    def encoded_bytes(self, numel: int, block: int) -> int:
        """Return the size of `numel` encoded elements."""
        return 4 * -(-numel // block) + -(-numel * self.bits // 8)

    def encode(
        self,
        values: Tensor,
        encoded: Tensor,
        block: int | None = None,
        residual: Tensor | None = None,
        lost: Tensor | None = None,
        factor: float = 1.0,
    ) -> None:
        """Encode factor · values plus the residual of earlier steps, and write the residual of this one.

        Args:
            values: [N], floating-point, contiguous; not changed. Kernels take float32 on CUDA, plain torch the rest.
            encoded: [encoded_bytes(N, block)], uint8, written.
            block: elements that share a scale, a multiple of 8 for signs, default 1024 for integers and 256 for signs.
                Kernels take powers of two from 8 to 2048; other sizes run in plain torch.
            residual: [N], of the values' dtype, added to the product first; None (default) for zeros.
            lost: [N], of the values' dtype, written: the new residual, the sum less its decoded codes; None (default)
                doesn't write it. It may be `residual`.
            factor: of the values, default 1.

        Raises:
            InvalidArgument: if shapes, dtypes, devices or layouts don't fit.
        """
        block = self.block if block is None else block
        check_block(self._encode_name, block, 8 // self.bits)
        size = self.encoded_bytes(values.numel(), block)
        check_encode(self._encode_name, values, encoded, size, residual, lost)
        run = self.encode_op if torch.compiler.is_compiling() else self._encode
        run(values, encoded, block, residual, lost, factor)

    def decode_sum(self, encoded: Tensor, out: Tensor, block: int | None = None, add: bool = False) -> None:
        """Write the sum of what ranks encoded, in their order: the same bits in every run on one kind of device.

        Args:
            encoded: [R, encoded_bytes(N, block)], uint8, R ≥ 1; rows begin at multiples of 4 bytes.
            out: [N], floating-point, contiguous, written.
            block: as in `encode`.
            add: begin with what `out` holds, default False.

        Raises:
            InvalidArgument: if shapes, dtypes, devices or layouts don't fit.
        """
        block = self.block if block is None else block
        check_block(self._decode_name, block, 8 // self.bits)
        check_decode(self._decode_name, encoded, out, self.encoded_bytes(out.numel(), block))
        if out.numel() == 0:
            return
        run = self.decode_sum_op if torch.compiler.is_compiling() else self._decode_sum
        run(encoded, out, block, add)

    def encode_ref(
        self,
        values: Tensor,
        encoded: Tensor,
        block: int,
        residual: Tensor | None = None,
        lost: Tensor | None = None,
        factor: float = 1.0,
    ) -> None:
        """Encode in plain torch."""
        numel = values.numel()
        room = values.new_empty(min(max(LARGEST_TILE, block), numel))
        scales, codes = self._tiles(encoded, numel, block)
        x_tiles = tiles(values, numel, block, block)
        missing: list[Tensor | None] = [None] * len(x_tiles)
        residuals = missing if residual is None else tiles(residual, numel, block, block)
        losses = missing if lost is None else tiles(lost, numel, block, block)
        for x_BK, scale_B1, code, residual_BK, lost_BK in zip(x_tiles, scales, codes, residuals, losses, strict=True):
            if residual_BK is not None:
                x_BK = torch.add(residual_BK, x_BK, alpha=factor, out=lost_BK)
            elif factor != 1.0:
                x_BK = x_BK * factor
            self._encode_tile(x_BK, scale_B1, code, lost_BK, room.as_strided(x_BK.shape, x_BK.stride()))

    def decode_sum_ref(self, encoded: Tensor, out: Tensor, block: int, add: bool = False) -> None:
        """Sum in plain torch."""
        numel = out.numel()
        room = out.new_empty(min(max(LARGEST_TILE, block), numel))
        ranks = [self._tiles(encoded_E, numel, block) for encoded_E in encoded.unbind()]
        for index, out_BK in enumerate(tiles(out, numel, block, block)):
            for rank, (scales, codes) in enumerate(ranks):
                units_BK = self._units(codes[index], room)
                if units_BK.shape != out_BK.shape:
                    units_BK = units_BK[:, : out_BK.shape[1]]  # the last byte is full of bits
                scale_B1 = scales[index].to(units_BK.dtype)
                if add or rank:
                    out_BK.addcmul_(units_BK, scale_B1)
                else:
                    torch.mul(units_BK, scale_B1, out=out_BK)

    def scales(self, encoded: Tensor, numel: int, block: int) -> Tensor:
        """Return the scales [B] of encoded [E]."""
        scales = encoded[: 4 * -(-numel // block)]
        # torch.compile may have moved the row to where a float32 can't begin.
        return (scales.clone() if scales.storage_offset() % 4 else scales).view(torch.float32)

    def cost_encode(self, numel: int, block: int | None = None, residual: bool = True, lost: bool = True) -> Cost:
        """Return the least work of `encode`; `residual` and `lost`: whether these are passed."""
        flops = numel * (self._flops.encode + residual + self._flops.lost * lost)
        size = self.encoded_bytes(numel, self.block if block is None else block)
        return Cost(flops=flops, bytes=4 * numel * (1 + residual + lost) + size)

    def cost_decode_sum(self, numel: int, ranks: int, block: int | None = None, add: bool = False) -> Cost:
        """Return the least work of `decode_sum`."""
        flops = numel * (ranks * self._flops.decode + ranks - 1 + add)
        size = self.encoded_bytes(numel, self.block if block is None else block)
        return Cost(flops=flops, bytes=ranks * size + 4 * numel * (1 + add))

    def _tiles(self, encoded: Tensor, numel: int, block: int) -> tuple[list[Tensor], list[Tensor]]:
        scales = self.scales(encoded, numel, block)
        return tiles(scales, numel, block, 1), tiles(encoded, numel, block, block * self.bits // 8, 4 * len(scales))

    def _encode(
        self,
        values: Tensor,
        encoded: Tensor,
        block: int,
        residual: Tensor | None,
        lost: Tensor | None,
        factor: float,
    ) -> None:
        if takes(values, block):
            from accel.kernels.codes import triton

            return triton.encode(self.bits, values, encoded, block, residual, lost, factor)
        return self.encode_ref(values, encoded, block, residual, lost, factor)

    def _decode_sum(self, encoded: Tensor, out: Tensor, block: int, add: bool) -> None:
        if takes(out, block):
            from accel.kernels.codes import triton

            return triton.decode_sum(self.bits, encoded, out, block, add)
        return self.decode_sum_ref(encoded, out, block, add)


def takes(values: Tensor, block: int) -> bool:
    """Return whether kernels encode these values: float32 on CUDA with triton, blocks a power of two from 8 to 2048."""
    fits = SMALLEST_BLOCK <= block <= LARGEST_BLOCK and block & (block - 1) == 0
    return fits and values.dtype == torch.float32 and runs_triton(values)


def tiles(flat: Tensor, numel: int, block: int, width: int, begin: int = 0) -> list[Tensor]:
    """Return tiles [B, width] that cover `numel` elements, and the incomplete last block as [1, rest]."""
    full, step, offset = numel // block, max(LARGEST_TILE // block, 1), flat.storage_offset() + begin
    # One operator a tile: slices, views and splits take as long as the work on a small bucket.
    whole = [
        flat.as_strided((min(step, full - row), width), (width, 1), offset + row * width)
        for row in range(0, full, step)
    ]
    rest = flat.numel() - begin - full * width
    return [*whole, flat.as_strided((1, rest), (rest, 1), offset + full * width)] if rest else whole


# --- checks of arguments ----------------------------------------------------------------------------------------------


def check_block(op: str, block: int, multiple: int) -> None:
    """Raise InvalidArgument unless the block is a size."""
    if block < 1 or block % multiple:
        raise InvalidArgument(
            f"{op}: block must be a positive multiple of {multiple} elements. Found: {block}. Use 1024."
        )


def check_encode(
    op: str, values: Tensor, encoded: Tensor, size: int, residual: Tensor | None, lost: Tensor | None
) -> None:
    """Raise InvalidArgument unless the tensors of an encoding fit."""
    if _encodes(values, encoded, size, residual, lost):
        return
    for name, tensor in (("values", values), ("residual", residual), ("lost", lost)):
        if tensor is not None and not (_is_flat(tensor) and _alike(tensor, values)):
            kind = _name(values.dtype) if values.is_floating_point() else "floating-point"
            raise InvalidArgument(
                f"{op}: {name} must be contiguous {kind} [N], N as of values. Found: {_described(tensor)}."
            )
    if encoded.dtype != torch.uint8 or encoded.shape != (size,) or not encoded.is_contiguous():
        raise InvalidArgument(
            f"{op}: encoded must be contiguous uint8 [{size}]. Found: {_described(encoded)}. Allocate that size."
        )
    _check_place(op, encoded)
    _check_devices(op, values, encoded, residual, lost)


def check_decode(op: str, encoded: Tensor, out: Tensor, size: int) -> None:
    """Raise InvalidArgument unless the tensors of a decoding fit."""
    if _decodes(encoded, out, size):
        return
    if not _is_flat(out):
        raise InvalidArgument(f"{op}: out must be contiguous floating-point [N]. Found: {_described(out)}.")
    if encoded.dtype != torch.uint8 or encoded.dim() != 2 or encoded.shape[1] != size or encoded.shape[0] < 1:
        raise InvalidArgument(
            f"{op}: encoded must be uint8 [R, {size}], a row for each rank. Found: {_described(encoded)}."
        )
    if size and (encoded.stride(1) != 1 or (len(encoded) > 1 and encoded.stride(0) % 4)):
        raise InvalidArgument(
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
        raise InvalidArgument(
            f"{op}: encoded must begin at a multiple of 4 bytes, since its scales are float32. "
            f"Found: byte {encoded.storage_offset()} of its storage. Give it a tensor of its own."
        )


def _check_devices(op: str, first: Tensor, *others: Tensor | None) -> None:
    if any(other is not None and other.device != first.device for other in others):
        devices = {str(tensor.device) for tensor in (first, *others) if tensor is not None}
        raise InvalidArgument(f"{op}: all tensors must be on one device. Found: {sorted(devices)}. Move them.")


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{tensor.dtype} {list(tensor.shape)}{layout}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""What the tests of encodings by blocks share: values of all kinds, and calls into poisoned memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# Nothing; one; odd; a byte of bits and its neighbours; a block of 64 and its neighbours; a launch's 2,048 elements and
# its neighbours; several blocks of 1,024 with a rest.
SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 2047, 2048, 2049, 5003]
# The smallest; small; the compressors' own; the largest that a kernel takes.
BLOCKS = [8, 64, 256, 1024, 2048]

_FENCE = 4096  # elements or bytes behind each result, which must stay as they are


def values_of(size: int, seed: int = 0) -> Tensor:
    """Return values of very different sizes, some of them zeros of both signs and subnormal numbers."""
    generator = torch.Generator().manual_seed(1000 * seed + size)
    x = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-3, 3, (size,), generator=generator)
    kind = torch.randint(0, 12, (size,), generator=generator)
    x[kind == 0] = 0.0
    x[kind == 1] = -0.0
    x[kind == 2] *= 1e-39
    x[1000:1100] = 0.0  # all of some blocks of 8 and of one of 64
    x[1100:1300] *= 1e-40
    return x


def encoded(codec: Any, values: Tensor, block: int, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what a codec writes into poisoned memory, and nowhere else: the bytes, and what was lost."""
    size = codec.encoded_bytes(len(values), block)
    out = values.new_full((size + _FENCE,), 165, dtype=torch.uint8)
    lost = values.new_full((len(values) + _FENCE,), torch.nan)
    codec.encode(values, out[:size], block, residual, lost[: len(values)])
    assert out[size:].eq(165).all()
    assert lost[len(values) :].isnan().all()
    return out[:size].clone(), lost[: len(values)].clone()


def reference(codec: Any, values: Tensor, block: int, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what plain torch encodes, and what was lost."""
    out, lost = values.new_empty(codec.encoded_bytes(len(values), block), dtype=torch.uint8), torch.empty_like(values)
    codec.CODE.encode_ref(values, out, block, residual, lost)
    return out, lost


def summed(codec: Any, encoded_RE: Tensor, numel: int, block: int, start: Tensor | None = None) -> Tensor:
    """Return the sum with each product and each sum rounded: of what plain torch decodes of each rank."""
    total = start
    for row in encoded_RE:
        part = torch.empty(numel)
        codec.CODE.decode_sum_ref(row[None], part, block)
        total = part if total is None else total + part
    assert total is not None
    return total


def rows(codec: Any, ranks: list[Tensor], block: int) -> Tensor:
    """Return what the ranks encode, by the reference, in rows that begin at multiples of 16 bytes."""
    size = codec.encoded_bytes(len(ranks[0]), block)
    room = ranks[0].new_full((len(ranks), -(-size // 16) * 16), 255, dtype=torch.uint8)[:, :size]
    for row, values in zip(room, ranks, strict=True):
        row.copy_(reference(codec, values, block)[0])
    return room


def on_gpu(rows_RE: Tensor) -> Tensor:
    """Return rows on a GPU that begin at multiples of 16 bytes too: a copy of a cut has none of what was cut off."""
    ranks, size = rows_RE.shape
    room = rows_RE.new_empty(ranks, rows_RE.stride(0), device="cuda")[:, :size]
    return room.copy_(rows_RE)


def decoded(codec: Any, encoded_RE: Tensor, numel: int, block: int, start: Tensor | None = None) -> Tensor:
    """Return the sum that a codec writes into poisoned memory, or adds to `start`, and nowhere else."""
    out = torch.full((numel + _FENCE,), torch.nan, device=encoded_RE.device)
    if start is not None:
        out[:numel] = start
    codec.decode_sum(encoded_RE, out[:numel], block, start is not None)
    assert out[numel:].isnan().all()
    return out[:numel].clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two float32 tensors hold the same bits."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def refused(op: ModuleType) -> list[tuple[dict[str, Any], str]]:
    """Return changes to a right call of `encode` for 8 values in blocks of 8, and what is said of each."""
    size = op.encoded_bytes(8, 8)
    longer = torch.empty(size + 4, dtype=torch.uint8)
    return [
        ({"values": torch.zeros(8, dtype=torch.int32)}, "values must be contiguous floating-point.*int32"),
        ({"values": torch.zeros(16)[::2]}, r"values must be contiguous.*\[8\], not contiguous"),
        ({"values": torch.zeros(2, 4)}, r"Found: torch.float32 \[2, 4\]"),
        ({"residual": torch.zeros(7)}, r"residual must be.*N as of values. Found: torch.float32 \[7\]"),
        ({"lost": torch.zeros(8, dtype=torch.float64)}, "lost must be.*float64"),
        ({"encoded": longer}, rf"encoded must be contiguous uint8 \[{size}\]"),
        ({"encoded": longer[1 : size + 1]}, "begin at a multiple of 4 bytes.*Found: byte 1"),
        ({"lost": torch.zeros(8, device="meta")}, r"on one device. Found: \['cpu', 'meta'\]"),
        ({"block": 0}, "block must be a positive multiple.*Found: 0"),
    ]

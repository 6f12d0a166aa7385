"""How a window is laid out in the programs of each kernel of window attention.

Chosen by registers (benchmarks/aot.csv): without spills, and then the largest. What spills all the same stands in
benchmarks/kernels/aot_spills.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from accel.kernels.launching import ceil_div, next_power_of_2
from accel.kernels.window_attention.attention import Spec

_SINGLE_BLOCK_TOKENS = 64
"""Tokens up to which a window is one block of rows, and one backward kernel holds all of its gradients."""

Pass = Literal["forward", "rows", "columns"]


@dataclass(frozen=True)
class Tiles:
    """How a window of one block is laid out in a program."""

    columns: int
    channels: int
    warps: int
    stages: int

    def constants(self) -> dict[str, int]:
        """Return the compile-time arguments that say so."""
        return {"NP": self.columns, "BM": self.columns, "DP": self.channels}


@dataclass(frozen=True)
class BlockTiles:
    """How a window of several blocks is: a program has one block of `rows`, and walks along the other side."""

    tokens: int
    rows: int
    chunk: int
    channels: int
    warps: int
    stages: int

    @property
    def blocks(self) -> int:
        """Blocks of a window."""
        return ceil_div(self.tokens, self.rows)

    @property
    def tail(self) -> int:
        """Tokens of the last, smaller part; 0 if there is none."""
        rest = self.tokens % self.chunk
        return max(16, next_power_of_2(rest)) if rest else 0

    def constants(self) -> dict[str, int]:
        """Return the compile-time arguments that say so."""
        return {
            "NP": next_power_of_2(self.tokens),
            "BM": self.rows,
            "DP": self.channels,
            "CHUNK": self.chunk,
            "TAIL": self.tail,
            "PARTS": ceil_div(self.tokens, self.chunk),
        }


def precision_of(dtype: torch.dtype) -> str:
    """Return how products of a dtype are rounded; fp32 as torch's switches say."""
    # fp32_precision reflects either switch; torch raises where allow_tf32 is read after fp32_precision was set.
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# `precision` below: None for what torch's switches say now. The backward pass is planned when it is first needed, and
# gets that of its forward pass.


def is_one_block(spec: Spec, head_channels: int, dtype: torch.dtype, precision: str | None = None) -> bool:
    """Return whether a window is one block of rows; IEEE fp32 has room for 32 channels in it."""
    # Without tensor cores a product's operands lie in registers.
    exact = (precision or precision_of(dtype)) == "ieee"
    return spec.tokens <= _SINGLE_BLOCK_TOKENS and not (exact and head_channels > 32)


def tiles_of(
    spec: Spec, head_channels: int, dtype: torch.dtype, *, cosine: bool, backward: bool, precision: str | None = None
) -> Tiles:
    """Return the tiles of a window of one block: four warps that load ahead, else more that don't."""
    columns, channels = (max(16, next_power_of_2(size)) for size in (spec.tokens, head_channels))
    if dtype == torch.float32:
        exact = (precision or precision_of(dtype)) == "ieee"
        return Tiles(columns, channels, 16 if exact and backward else 8, 1)
    if backward and ((cosine and channels > 16) or channels > 32 or spec.tokens > 49):
        return Tiles(columns, channels, 8, 1)
    # One sweep on an H200, fp16, 7 x 7, 32 channels, 128 images, medians of 12 calls (torch.profiler). Backward: 252 µs
    # with three stages, 275 with two, 337 with one; 525 to 589 with eight warps. Forward: 113 with two stages, 119 with
    # three, 120 with one; 157 to 221 with eight warps.
    return Tiles(columns, channels, 4, 3 if backward else 2)


def block_tiles_of(
    spec: Spec,
    head_channels: int,
    dtype: torch.dtype,
    kind: Pass,
    *,
    cosine: bool,
    capability: int,
    precision: str | None = None,
) -> BlockTiles:
    """Return the tiles of a window of several blocks, on a GPU of a compute capability (times ten)."""
    channels, most = (max(16, next_power_of_2(size)) for size in (head_channels, spec.tokens))
    exact = (precision or precision_of(dtype)) == "ieee"
    shape = _exact_shape(kind) if exact else _shape(spec, channels, kind, dtype == torch.float32, cosine, capability)
    rows, chunk, warps, stages = shape
    return BlockTiles(spec.tokens, min(rows, most), min(chunk, most), channels, warps, stages)


_Shape = tuple[int, int, int, int]
"""Rows, chunk, warps, stages."""


def _exact_shape(kind: Pass) -> _Shape:
    return (16, 64, 8, 1) if kind == "forward" else (16, 128, 8, 1)


def _shape(spec: Spec, channels: int, kind: Pass, single: bool, cosine: bool, capability: int) -> _Shape:
    """Return the tiles where there are tensor cores; `single` is fp32, in TF32.

    Blocks of 64 rows read what lies along the other side half as often as those of 32, and from compute capability 9.0
    on their products are those of a whole warp group.
    """
    hopper, large = capability >= 90, spec.tokens > 160
    if kind == "forward":
        return 64, 32 if channels > 32 or (large and (single or not hopper)) else 64, 4, 2
    if kind == "rows":
        plain = not (single or cosine or spec.dropout > 0)
        return (64, 128, 8, 2) if hopper and plain and channels <= 32 and not large else (32, 128, 8, 1)
    if hopper:
        return 64, 128, 8, 2
    if channels > 32:
        return 32, 128, 8, 1
    return 32 if single or (cosine and large) else 64, 128, 8, 2


def _log2_mask(value: float) -> float:
    """Return log2(e) · value as a number of float32: the least one of a dtype is a common mask, and stays finite."""
    most = torch.finfo(torch.float32).max
    return max(-most, min(value * math.log2(math.e), most)) if math.isfinite(value) else value


def constants(
    spec: Spec, head_channels: int, dtype: torch.dtype, tiles: Tiles | BlockTiles, precision: str | None = None
) -> dict[str, Any]:
    """Return the compile-time arguments that all passes take."""
    return {
        "SCALE": spec.scale,
        "LOG2_MASK": _log2_mask(spec.mask_value),
        "DROPOUT": spec.dropout,
        "H": spec.heads,
        "D": head_channels,
        "WH": spec.window[0],
        "WW": spec.window[1],
        "SH": spec.shift[0],
        "SW": spec.shift[1],
        "PRECISION": precision or precision_of(dtype),
        **tiles.constants(),
    }

"""How the kernels of window attention are launched: tiles for a layer, and plans for calls of one kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from accel.kernels.launching import PLANS, LaunchPlan, ceil_div, next_power_of_2
from accel.kernels.window_attention import triton as kernels
from accel.kernels.window_attention.attention import CheckedCall, Spec

_SINGLE_BLOCK_TOKENS = 64
"""Tokens up to which a window is one block of rows, and its bias gradient stays in registers."""
_PROGRAMS_PER_CORE = 4


@dataclass(frozen=True)
class Tiles:
    """How a window is laid out in a program."""

    columns: int
    rows: int
    blocks: int
    channels: int
    warps: int
    stages: int


def tiles_of(spec: Spec, head_channels: int, dtype: torch.dtype, *, cosine: bool, backward: bool) -> Tiles:
    """Return the tiles for a layer: one block of rows up to 64 tokens, several above.

    Chosen by registers (benchmarks/aot.csv): without spills, four warps that load ahead, else more that don't. What
    spills all the same stands in benchmarks/kernels/aot_spills.py.
    """
    columns = max(16, next_power_of_2(spec.tokens))
    channels = max(16, next_power_of_2(head_channels))
    exact = _precision(dtype) == "ieee"  # without tensor cores a product's operands lie in registers
    rows = columns if columns <= _SINGLE_BLOCK_TOKENS and not (exact and channels > 32) else 16
    blocks = ceil_div(spec.tokens, rows)
    if columns > _SINGLE_BLOCK_TOKENS:
        return Tiles(columns, rows, blocks, channels, 8, 1 if backward or exact or channels == 16 else 2)
    if dtype == torch.float32:
        return Tiles(columns, rows, blocks, channels, 16 if exact and backward and blocks == 1 else 8, 1)
    if backward and ((cosine and channels > 16) or channels > 32 or spec.tokens > 49):
        return Tiles(columns, rows, blocks, channels, 8, 1)
    return Tiles(columns, rows, blocks, channels, 4, 2)


def constants(spec: Spec, head_channels: int, dtype: torch.dtype, tiles: Tiles) -> dict[str, Any]:
    """Return the compile-time arguments that both passes take."""
    return {
        "SCALE": spec.scale,
        "MASK_VALUE": spec.mask_value,
        "DROPOUT": spec.dropout,
        "H": spec.heads,
        "D": head_channels,
        "DP": tiles.channels,
        "WH": spec.window[0],
        "WW": spec.window[1],
        "SH": spec.shift[0],
        "SW": spec.shift[1],
        "NP": tiles.columns,
        "BM": tiles.rows,
        "PRECISION": _precision(dtype),
    }


def _precision(dtype: torch.dtype) -> str:
    # fp32_precision reflects either switch; torch raises where allow_tf32 is read after fp32_precision was set.
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _programs(windows: int, heads: int, device: torch.device) -> int:
    """Return how many programs share a head's windows: enough for every core, few enough for few partial sums."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return int(min(windows, ceil_div(_PROGRAMS_PER_CORE * cores, heads)))


_R = TypeVar("_R")


def sized(launch: Callable[..., _R]) -> Callable[..., _R]:
    """Let a launcher raise with a remedy where a GPU has too little shared memory for a layer."""

    @functools.wraps(launch)
    def launch_with_remedy(*args: Any) -> _R:
        try:
            return launch(*args)
        except OutOfResources as error:
            window = " x ".join(map(str, args[-1].spec.window))
            raise RuntimeError(
                f"window attention: windows of {window} in {args[0].dtype} must fit this GPU, they need "
                f"{error.required} of {error.name} and it has {error.limit}; use half precision, or the model's own "
                "attention"
            ) from error

    return launch_with_remedy


class _Layer(NamedTuple):
    """What decides how a pass is launched."""

    spec: Spec
    shape: torch.Size
    """Of qkv, [B, Y, X, 3·H·D]."""
    dtype: torch.dtype
    device: torch.device
    images: int
    """Windows that have regions of their own; 0 without regions."""
    cosine: bool
    precision: str

    @classmethod
    def of(cls, qkv: Tensor, head_scale: Tensor | None, regions: Tensor | None, spec: Spec) -> _Layer:
        """Return what decides it for these inputs."""
        dtype = qkv.dtype
        windows = 0 if regions is None else regions.shape[0]
        return cls(spec, qkv.shape, dtype, qkv.device, windows, head_scale is not None, _precision(dtype))

    def arguments(self, tiles: Tiles) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Return the numbers and the compile-time arguments of a pass."""
        numbers = (self.shape[:-1].numel() // self.spec.tokens, max(1, self.images), self.shape[1], self.shape[2])
        return numbers, {
            "WIDE": self.shape.numel() >= 2**31,
            "MASKED": self.images > 0,
            "COSINE": self.cosine,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
            **constants(self.spec, self.channels, self.dtype, tiles),
        }

    @property
    def channels(self) -> int:
        """Return those of a head."""
        return self.shape[-1] // (3 * self.spec.heads)

    def tiles(self, *, backward: bool) -> Tiles:
        """Return the tiles of a pass."""
        return tiles_of(self.spec, self.channels, self.dtype, cosine=self.cosine, backward=backward)


@functools.lru_cache(PLANS)
def _forward_plan(layer: _Layer) -> LaunchPlan:
    tiles, heads = layer.tiles(backward=False), layer.spec.heads
    numbers, fixed = layer.arguments(tiles)
    return kernels._fwd_kernel.plan(
        (_programs(numbers[0], heads, layer.device), heads, tiles.blocks), *numbers, **fixed
    )


@dataclass(frozen=True)
class _BackwardPlan:
    """Two launches, and how the sums between them are laid out."""

    windows: LaunchPlan
    table: LaunchPlan
    sums: tuple[int, ...]
    """Their shape, [P, H, N, N]."""
    zeroed: bool
    """Whether they are added to."""


@functools.lru_cache(PLANS)
def _backward_plan(layer: _Layer) -> _BackwardPlan:
    tiles, spec = layer.tiles(backward=True), layer.spec
    numbers, fixed = layer.arguments(tiles)
    programs = _programs(numbers[0], spec.heads, layer.device)
    return _BackwardPlan(
        kernels._bwd_kernel.plan((programs, spec.heads), *numbers, BLOCKS=tiles.blocks, **fixed),
        kernels._table_kernel.plan(
            (spec.entries, spec.heads),
            programs,
            H=spec.heads,
            WH=spec.window[0],
            WW=spec.window[1],
            NP=tiles.columns,
            BP=16,
        ),
        (programs, spec.heads, spec.tokens, spec.tokens),
        zeroed=tiles.blocks > 1,
    )


def _variant(qkv: Tensor, regions: Tensor | None, *, backward: bool = False) -> Hashable:
    """Return what a call that was checked does not tell: autocast's dtype, TF32, and regions that the loop chose."""
    dtype = qkv.dtype
    windows = 0 if regions is None else len(regions)
    return backward, windows, dtype if dtype != torch.float32 else _precision(dtype)


@sized
def forward(
    qkv: Tensor,
    table: Tensor,
    head_scale: Tensor | None,
    regions: Tensor | None,
    seed: Tensor | None,
    known: CheckedCall,
) -> Tensor:
    """Launch the forward pass on a map [B, Y, X, 3·H·D], and return [B, Y, X, H·D]."""
    variant = _variant(qkv, regions)
    shape, plan = known.plans.get(variant, (None, None))
    if plan is None:
        shape, plan = (
            (*qkv.shape[:-1], qkv.shape[-1] // 3),
            _forward_plan(_Layer.of(qkv, head_scale, regions, known.spec)),
        )
        known.plans[variant] = shape, plan
    out = qkv.new_empty(shape)
    plan(qkv, table, head_scale, regions, seed, out)
    return out


@sized
def backward(
    dout: Tensor,
    qkv: Tensor,
    table: Tensor,
    head_scale: Tensor | None,
    regions: Tensor | None,
    seed: Tensor | None,
    known: CheckedCall,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the backward pass, and return the gradients of qkv, table and head_scale."""
    variant = _variant(qkv, regions, backward=True)
    plan = known.plans.get(variant)
    if plan is None:
        plan = known.plans[variant] = _backward_plan(_Layer.of(qkv, head_scale, regions, known.spec))
    dqkv, dtable = torch.empty_like(qkv), torch.empty_like(table)
    make = qkv.new_zeros if plan.zeroed else qkv.new_empty
    dbias = make(plan.sums, dtype=torch.float32)
    dscale = None if head_scale is None else qkv.new_empty(plan.sums[:2], dtype=torch.float32)
    plan.windows(qkv, table, head_scale, regions, seed, dout.contiguous(), dqkv, dbias, dscale)
    plan.table(dbias, dtable)
    if head_scale is None or dscale is None:
        return dqkv, dtable, None
    return dqkv, dtable, dscale.sum(0).to(head_scale.dtype).view_as(head_scale)

"""How the kernels of window attention are launched: programs for a layer, and plans for calls of one kind."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from accel.kernels.launching import PLANS, LaunchPlan, LaunchSequence, ceil_div
from accel.kernels.window_attention import blocks_triton as block_kernels
from accel.kernels.window_attention import triton as kernels
from accel.kernels.window_attention.attention import CheckedCall, Spec
from accel.kernels.window_attention.tiles import (
    BlockTiles,
    Pass,
    Tiles,
    block_tiles_of,
    constants,
    is_one_block,
    precision_of,
    tiles_of,
)
from accel.profiler.errors import InvalidState

_PROGRAMS_PER_CORE = {"forward": 4, "backward": 2}
"""Of windows of one block: as many as have registers at a time, so that none waits and few partial sums are written."""
_BLOCK_PROGRAMS_PER_CORE = {4: 2, 8: 1}
"""Warps of a program → the same, of windows of several blocks, whose programs take all registers."""
_MOST_ROUNDS = 4
"""Rounds of programs over the cores, up to which more programs are tried where one round leaves cores idle."""
_BEGINNING = 8
"""Windows in whose time, roughly, a program gathers its bias, and its partial sum is written and read again."""


def _cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _capability(device: torch.device) -> int:
    """Return the compute capability times ten; the interpreter's tiles are those of 9.0."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _programs(windows: int, heads: int, per_core: int, device: torch.device) -> int:
    """Return how many programs share a head's windows: enough for every core, few enough for few partial sums."""
    return int(min(windows, ceil_div(per_core * _cores(device), heads)))


def block_programs(windows: int, groups: int, slots: int) -> int:
    """Return how many programs share the windows of one block of one head.

    Args:
        windows: W.
        groups: blocks of a window times heads, each of which has so many programs.
        slots: programs that the device runs at a time.

    Returns:
        The number with the least (rounds of all programs) · (windows of a program, and what begins and ends it).
    """
    most = min(windows, ceil_div(_MOST_ROUNDS * slots, groups))

    def cost(programs: int) -> int:
        return ceil_div(programs * groups, slots) * (ceil_div(windows, programs) + _BEGINNING)

    return min(range(1, most + 1), key=cost)


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
    """Of products, as the switches stood in the forward pass."""

    @classmethod
    def of(cls, qkv: Tensor, head_scale: Tensor | None, regions: Tensor | None, spec: Spec) -> _Layer:
        """Return what decides it for these inputs."""
        dtype = qkv.dtype
        windows = 0 if regions is None else regions.shape[0]
        return cls(spec, qkv.shape, dtype, qkv.device, windows, head_scale is not None, precision_of(dtype))

    def arguments(self, tiles: Tiles | BlockTiles) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Return the numbers and the compile-time arguments of a pass."""
        return (self.windows, max(1, self.images), self.shape[1], self.shape[2]), {
            "WIDE": self.shape.numel() >= 2**31,
            "MASKED": self.images > 0,
            "COSINE": self.cosine,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
            **constants(self.spec, self.channels, self.dtype, tiles, self.precision),
        }

    @property
    def channels(self) -> int:
        """Return those of a head."""
        return self.shape[-1] // (3 * self.spec.heads)

    @property
    def windows(self) -> int:
        """Return how many there are."""
        return self.shape[:-1].numel() // self.spec.tokens

    @property
    def is_one_block(self) -> bool:
        """Return whether a window is one block of rows."""
        return is_one_block(self.spec, self.channels, self.dtype, self.precision)

    def tiles(self, *, backward: bool) -> Tiles:
        """Return the tiles of a pass over windows of one block."""
        kind = self.spec, self.channels, self.dtype
        return tiles_of(*kind, cosine=self.cosine, backward=backward, precision=self.precision)

    def block_tiles(self, kind: Pass) -> BlockTiles:
        """Return the tiles of a pass over windows of several blocks."""
        layer, capability = (self.spec, self.channels, self.dtype), _capability(self.device)
        return block_tiles_of(*layer, kind, cosine=self.cosine, capability=capability, precision=self.precision)

    def block_grid(self, tiles: BlockTiles) -> tuple[int, int, int]:
        """Return the programs of such a pass."""
        slots = _BLOCK_PROGRAMS_PER_CORE[tiles.warps] * _cores(self.device)
        heads = self.spec.heads
        return block_programs(self.windows, heads * tiles.blocks, slots), heads, tiles.blocks


@functools.lru_cache(PLANS)
def _forward_plan(layer: _Layer) -> LaunchPlan:
    if not layer.is_one_block:
        tiles = layer.block_tiles("forward")
        numbers, fixed = layer.arguments(tiles)
        return block_kernels._fwd_blocks_kernel.plan(layer.block_grid(tiles), *numbers, **fixed)
    heads = layer.spec.heads
    numbers, fixed = layer.arguments(layer.tiles(backward=False))
    programs = _programs(layer.windows, heads, _PROGRAMS_PER_CORE["forward"], layer.device)
    return kernels._fwd_kernel.plan((programs, heads), *numbers, **fixed)


class _BackwardPlan(NamedTuple):
    """The launches of a backward pass, and the shapes of what they hand on."""

    gradients: LaunchPlan
    table: LaunchPlan
    sums: tuple[int, ...]
    """Of the bias gradient's partial sums, [P, H, N, N]."""
    scales: tuple[int, ...]
    """Of the scale gradient's, [P, H], or [P · blocks, H]."""
    softmax: tuple[int, ...] | None = None
    """Of the softmax's sums between the rows and the columns of windows of several blocks, [2, B·Y·X, H]."""


@functools.lru_cache(PLANS)
def _backward_plan(layer: _Layer) -> _BackwardPlan:
    spec = layer.spec
    pairs = (spec.heads, spec.tokens, spec.tokens)
    if layer.is_one_block:
        tiles = layer.tiles(backward=True)
        numbers, fixed = layer.arguments(tiles)
        programs = _programs(layer.windows, spec.heads, _PROGRAMS_PER_CORE["backward"], layer.device)
        launch = kernels._bwd_kernel.plan((programs, spec.heads), *numbers, **fixed)
        table = _table_plan(spec, programs, tiles.columns, 16)
        return _BackwardPlan(launch, table, (programs, *pairs), (programs, spec.heads))
    tiles_of_rows, tiles_of_columns = layer.block_tiles("rows"), layer.block_tiles("columns")
    grid = layer.block_grid(tiles_of_rows)
    numbers, fixed = layer.arguments(tiles_of_rows)
    rows = block_kernels._rows_kernel.plan(grid, *numbers, **fixed)
    numbers, fixed = layer.arguments(tiles_of_columns)
    columns = block_kernels._columns_kernel.plan(layer.block_grid(tiles_of_columns), *numbers, **fixed)
    *inputs, dqkv, softmax, dbias, dscale = range(10)
    return _BackwardPlan(
        LaunchSequence((rows, (*inputs, dqkv, softmax, dbias, dscale)), (columns, (*inputs, softmax, dqkv))),
        _table_plan(spec, 1, fixed["NP"], 1),
        (grid[0], *pairs),
        (grid[0] * tiles_of_rows.blocks, spec.heads),
        (2, layer.shape[:-1].numel(), spec.heads),
    )


def _table_plan(spec: Spec, programs: int, columns: int, at_a_time: int) -> LaunchPlan:
    """Return the launch that sums the partial sums of so many programs, `at_a_time` together."""
    fixed = {"H": spec.heads, "WH": spec.window[0], "WW": spec.window[1], "NP": columns, "BP": at_a_time}
    return kernels._table_kernel.plan((spec.entries, spec.heads), programs, **fixed)


class CallPlans:
    """The launches of one kind of call: of the forward pass, and of the backward pass from the first one on.

    Args:
        layer: what decides them.
    """

    __slots__ = ("_backward", "_layer", "forward", "shape")

    def __init__(self, layer: _Layer) -> None:
        self._layer, self.forward = layer, _forward_plan(layer)
        self.shape = (*layer.shape[:-1], layer.shape[-1] // 3)
        self._backward: _BackwardPlan | None = None

    @classmethod
    def of(cls, qkv: Tensor, head_scale: Tensor | None, regions: Tensor | None, known: CheckedCall) -> CallPlans:
        """Return those for these inputs."""
        # What a call that was checked does not tell: autocast's dtype, TF32, and regions that the loop chose.
        dtype, windows = qkv.dtype, 0 if regions is None else regions.shape[0]
        variant = windows, precision_of(dtype) if dtype is torch.float32 else dtype
        plans: CallPlans | None = known.plans.get(variant)
        if plans is None:
            plans = known.plans[variant] = cls(_Layer.of(qkv, head_scale, regions, known.spec))
        return plans

    @property
    def backward(self) -> _BackwardPlan:
        """The launches of the backward pass."""
        if self._backward is None:
            self._backward = _backward_plan(self._layer)
        return self._backward

    def too_large(self, error: OutOfResources) -> InvalidState:
        """Return an error with a remedy, for a GPU that has too little shared memory for this layer."""
        window = " x ".join(map(str, self._layer.spec.window))
        return InvalidState(
            f"window attention: windows of {window} in {self._layer.dtype} must fit this GPU, they need "
            f"{error.required} of {error.name} and it has {error.limit}; use half precision, or the model's own "
            "attention"
        )


def forward(
    qkv: Tensor,
    table: Tensor,
    head_scale: Tensor | None,
    regions: Tensor | None,
    seed: Tensor | None,
    plans: CallPlans,
) -> Tensor:
    """Launch the forward pass on a map [B, Y, X, 3·H·D], and return [B, Y, X, H·D]."""
    out = qkv.new_empty(plans.shape)
    try:
        plans.forward(qkv, table, head_scale, regions, seed, out)
    except OutOfResources as error:
        raise plans.too_large(error) from error
    return out


def backward(
    dout: Tensor,
    qkv: Tensor,
    table: Tensor,
    head_scale: Tensor | None,
    regions: Tensor | None,
    seed: Tensor | None,
    plans: CallPlans,
    needs_scale: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the backward pass, and return the gradients of qkv, table and, where it is needed, head_scale."""
    plan = plans.backward
    dqkv, dtable = torch.empty_like(qkv), torch.empty_like(table)
    dbias = qkv.new_empty(plan.sums, dtype=torch.float32)
    dscale = None if head_scale is None else qkv.new_empty(plan.scales, dtype=torch.float32)
    dout = dout.contiguous()
    try:
        if plan.softmax is None:
            plan.gradients(qkv, table, head_scale, regions, seed, dout, dqkv, dbias, dscale)
        else:
            softmax = qkv.new_empty(plan.softmax, dtype=torch.float32)
            plan.gradients(qkv, table, head_scale, regions, seed, dout, dqkv, softmax, dbias, dscale)
            # Whole rows at a time: the table's kernel goes along diagonals, of which it uses 4 of the 32 bytes it gets.
            dbias = dbias.sum(0, keepdim=True)
    except OutOfResources as error:
        raise plans.too_large(error) from error
    plan.table(dbias, dtable)
    if head_scale is None or dscale is None or not needs_scale:
        return dqkv, dtable, None
    return dqkv, dtable, dscale.sum(0).to(head_scale.dtype).view(head_scale.shape)

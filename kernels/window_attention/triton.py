# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The kernels of window attention: one launch forward, one backward, and a small one for the bias table's gradient.

A program owns one head and takes every P-th window. N tokens are padded to a tile of NP columns; rows go by blocks of
BM. Token t of window w lies in row (b·Y + y)·X + x of the map, with the roll in y and x: so nothing is ever cut out.

    S = scale · q kᵀ + bias + mask    P = softmax(S)    out = P v
    dv = Pᵀ do    dP = do vᵀ    dS = P ∘ (dP − rowsum(P ∘ dP))    dq = scale · dS k    dk = scale · dSᵀ q

A whole row fits one tile, so P is computed anew in the backward pass and neither the output nor the softmax's sums are
kept. The bias gradient is summed over windows by the program (in registers where the window is one row block), written
to [P, H, N, N] and reduced in fixed order: the same bits in every run on one kind of device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from accel.kernels.launching import LaunchPlan, PlannedKernel, ceil_div, next_power_of_2
from accel.kernels.window_attention.attention import Spec

_SINGLE_BLOCK_TOKENS = 64
"""Tokens up to which a window is one block of rows, and its bias gradient stays in registers."""
_LAYERS = 512
"""Layers and sizes of maps whose plans are kept."""
_PROGRAMS_PER_CORE = 4


@triton.jit
def _map_rows(w, t, Y, X, WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, WIDE: tl.constexpr):
    """Return the rows of the map in which the tokens `t` of window `w` lie."""
    across = X // WW
    per_image = across * (Y // WH)
    image, inside = w // per_image, w % per_image
    y = (inside // across) * WH + t // WW + SH
    x = (inside % across) * WW + t % WW + SW
    y = tl.where(y >= Y, y - Y, y)
    x = tl.where(x >= X, x - X, x)
    if WIDE:
        image = image.to(tl.int64)
    return (image * Y + y) * X + x


@triton.jit
def _bias(table, h, i, j, H: tl.constexpr, N: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr):
    """Return the bias [rows, columns] of one head, 0 outside the window."""
    down = (i // WW)[:, None] - (j // WW)[None, :] + WH - 1
    right = (i % WW)[:, None] - (j % WW)[None, :] + WW - 1
    inside = (i < N)[:, None] & (j < N)[None, :]
    entry = tl.where(inside, down * (2 * WW - 1) + right, 0)
    return tl.load(table + entry * H + h, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _normalised(x):
    """Return the rows in fp32 divided by their norms, and one over the norms."""
    x = x.to(tl.float32)
    inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)
    return x * inverse[:, None], inverse


@triton.jit
def _weights(
    q, k, bias, scale, regions, w, n_regions, i, j,
    N: tl.constexpr, MASKED: tl.constexpr, MASK_VALUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return softmax(scale · q kᵀ + bias + mask) in fp32; columns outside the window are 0."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION).to(tl.float32) * scale + bias
    if MASKED:
        here = regions + (w % n_regions) * N
        mine = tl.load(here + i, mask=i < N, other=0).to(tl.int32)
        theirs = tl.load(here + j, mask=j < N, other=0).to(tl.int32)
        scores += tl.where(mine[:, None] == theirs[None, :], 0.0, MASK_VALUE)
    scores = tl.where((j < N)[None, :], scores, float("-inf"))
    scores = tl.exp(scores - tl.max(scores, 1)[:, None])
    return scores / tl.sum(scores, 1)[:, None]


@triton.jit
def _kept(seed, w, h, i, j, H: tl.constexpr, NP: tl.constexpr, DROPOUT: tl.constexpr):
    """Return 1 ÷ (1 − dropout) where a weight is kept, else 0; the same in both passes.

    Philox keys each window and head; within, two rounds of a 32-bit mixer. Philox for every weight needs 128 registers
    more, which spill.
    """
    one, two, _, _ = tl.randint4x(tl.load(seed), w * H + h)
    x = (i[:, None] * NP + j[None, :]).to(tl.uint32) * 0x9E3779B9 + one.to(tl.uint32)
    x = _mixed(_mixed(x) ^ two.to(tl.uint32))
    return tl.where((x >> 8).to(tl.float32) >= DROPOUT * 16777216.0, 1.0 / (1.0 - DROPOUT), 0.0)


@triton.jit
def _mixed(x):
    """Mix 32 bits so that each depends on all."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@PlannedKernel
@triton.jit
def _fwd_kernel(
    qkv,  # [B·Y·X, 3, H, D]
    table,  # [T, H]
    head_scale,  # [H], cosine attention only
    regions,  # [n_regions, N] uint8, masked only
    seed,  # [1] int64, dropout only
    out,  # [B·Y·X, H, D]
    windows, n_regions, Y, X,
    SCALE: tl.constexpr, MASK_VALUE: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr, COSINE: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = WH * WW
    first, h = tl.program_id(0), tl.program_id(1)
    i = tl.program_id(2) * BM + tl.arange(0, BM)
    j = tl.arange(0, NP)
    d = tl.arange(0, DP)
    bias = _bias(table, h, i, j, H, N, WH, WW)
    scale = SCALE
    if COSINE:
        scale = tl.load(head_scale + h).to(tl.float32)
    own = (i < N)[:, None] & (d < D)[None, :]
    every = (j < N)[:, None] & (d < D)[None, :]
    for w in range(first, windows, tl.num_programs(0)):
        rows = _map_rows(w, i, Y, X, WH, WW, SH, SW, WIDE)
        columns = _map_rows(w, j, Y, X, WH, WW, SH, SW, WIDE)
        q = tl.load(qkv + (rows * 3 * H + h)[:, None] * D + d[None, :], mask=own, other=0.0)
        k = tl.load(qkv + (columns * 3 * H + H + h)[:, None] * D + d[None, :], mask=every, other=0.0)
        v = tl.load(qkv + (columns * 3 * H + 2 * H + h)[:, None] * D + d[None, :], mask=every, other=0.0)
        if COSINE:
            q_unit, _ = _normalised(q)
            k_unit, _ = _normalised(k)
            q, k = q_unit.to(v.dtype), k_unit.to(v.dtype)
        p = _weights(q, k, bias, scale, regions, w, n_regions, i, j, N, MASKED, MASK_VALUE, PRECISION)
        if DROPOUT > 0:
            p *= _kept(seed, w, h, i, j, H, NP, DROPOUT)
        o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        tl.store(out + (rows * H + h)[:, None] * D + d[None, :], o.to(out.dtype.element_ty), mask=own)


@triton.jit
def _accumulated(total, weights, x, BLOCKS: tl.constexpr, PRECISION: tl.constexpr):
    """Return total + weightsᵀ x. With several row blocks the total lies transposed: else 12 x 12 windows spill 1 kB."""
    if BLOCKS == 1:
        return total + tl.dot(tl.trans(weights), x, input_precision=PRECISION)
    else:
        return total + tl.dot(tl.trans(x), weights, input_precision=PRECISION)


@PlannedKernel
@triton.jit
def _bwd_kernel(
    qkv,  # [B·Y·X, 3, H, D]
    table,  # [T, H]
    head_scale,  # [H], cosine attention only
    regions,  # [n_regions, N] uint8, masked only
    seed,  # [1] int64, dropout only
    dout,  # [B·Y·X, H, D]
    dqkv,  # [B·Y·X, 3, H, D]
    dbias,  # [P, H, N, N] fp32; zeros at first if a window is several row blocks
    dscale,  # [P, H] fp32, cosine attention only
    windows, n_regions, Y, X,
    SCALE: tl.constexpr, MASK_VALUE: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr, COSINE: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr, BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = WH * WW
    first, h = tl.program_id(0), tl.program_id(1)
    j = tl.arange(0, NP)
    d = tl.arange(0, DP)
    every = (j < N)[:, None] & (d < D)[None, :]
    partial = dbias + (first * H + h).to(tl.int64) * N * N
    scale = SCALE
    if COSINE:
        scale = tl.load(head_scale + h).to(tl.float32)
    summed_scale = 0.0
    if BLOCKS == 1:
        bias = _bias(table, h, tl.arange(0, BM), j, H, N, WH, WW)
        summed = tl.zeros((BM, NP), tl.float32)
    for w in range(first, windows, tl.num_programs(0)):
        columns = _map_rows(w, j, Y, X, WH, WW, SH, SW, WIDE)
        at_k = (columns * 3 * H + H + h)[:, None] * D + d[None, :]
        at_v = at_k + H * D
        k = tl.load(qkv + at_k, mask=every, other=0.0)
        v = tl.load(qkv + at_v, mask=every, other=0.0)
        if COSINE:
            k, k_inverse = _normalised(k)
            k = k.to(v.dtype)
        if BLOCKS == 1:
            dk = tl.zeros((NP, DP), tl.float32)
            dv = tl.zeros((NP, DP), tl.float32)
        else:
            dk = tl.zeros((DP, NP), tl.float32)
            dv = tl.zeros((DP, NP), tl.float32)
        for block in range(BLOCKS):
            i = block * BM + tl.arange(0, BM)
            own = (i < N)[:, None] & (d < D)[None, :]
            rows = _map_rows(w, i, Y, X, WH, WW, SH, SW, WIDE)
            at_q = (rows * 3 * H + h)[:, None] * D + d[None, :]
            q = tl.load(qkv + at_q, mask=own, other=0.0)
            do = tl.load(dout + (rows * H + h)[:, None] * D + d[None, :], mask=own, other=0.0)
            if COSINE:
                q, q_inverse = _normalised(q)
                q = q.to(v.dtype)
            if BLOCKS > 1:
                bias = _bias(table, h, i, j, H, N, WH, WW)
            p = _weights(q, k, bias, scale, regions, w, n_regions, i, j, N, MASKED, MASK_VALUE, PRECISION)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            weights = p
            if DROPOUT > 0:
                kept = _kept(seed, w, h, i, j, H, NP, DROPOUT)
                dp *= kept
                weights = p * kept
            dv = _accumulated(dv, weights.to(v.dtype), do, BLOCKS, PRECISION)
            ds = p * (dp - tl.sum(p * dp, 1)[:, None])
            if BLOCKS == 1:
                summed += ds
            else:
                at = partial + i[:, None] * N + j[None, :]
                inside = (i < N)[:, None] & (j < N)[None, :]
                tl.store(at, tl.load(at, mask=inside, other=0.0) + ds, mask=inside)
            ds = ds.to(v.dtype)
            dq = tl.dot(ds, k, input_precision=PRECISION)
            dk = _accumulated(dk, ds, q, BLOCKS, PRECISION)
            if COSINE:
                q_unit = q.to(tl.float32)
                along = tl.sum(dq * q_unit, 1)
                summed_scale += tl.sum(along)
                dq = (dq - q_unit * along[:, None]) * q_inverse[:, None]
            tl.store(dqkv + at_q, (dq * scale).to(dqkv.dtype.element_ty), mask=own)
        if BLOCKS > 1:
            dk, dv = tl.trans(dk), tl.trans(dv)
        if COSINE:
            k_unit = k.to(tl.float32)
            dk = (dk - k_unit * tl.sum(dk * k_unit, 1)[:, None]) * k_inverse[:, None]
        tl.store(dqkv + at_k, (dk * scale).to(dqkv.dtype.element_ty), mask=every)
        tl.store(dqkv + at_v, dv.to(dqkv.dtype.element_ty), mask=every)
    if BLOCKS == 1:
        i = tl.arange(0, BM)
        inside = (i < N)[:, None] & (j < N)[None, :]
        tl.store(partial + i[:, None] * N + j[None, :], summed, mask=inside)
    if COSINE:
        tl.store(dscale + first * H + h, summed_scale)


@PlannedKernel
@triton.jit
def _table_kernel(
    dbias,  # [P, H, N, N] fp32
    dtable,  # [T, H]
    programs,
    H: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, NP: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of one entry of the table: over programs, and over the pairs of tokens so far apart."""
    N: tl.constexpr = WH * WW
    entry, h = tl.program_id(0), tl.program_id(1)
    down, right = entry // (2 * WW - 1) - (WH - 1), entry % (2 * WW - 1) - (WW - 1)
    i = tl.arange(0, NP)
    y, x = i // WW - down, i % WW - right
    inside = (i < N) & (y >= 0) & (y < WH) & (x >= 0) & (x < WW)
    pair = tl.where(inside, i * N + y * WW + x, 0)
    total = tl.zeros((BP, NP), tl.float32)
    for start in range(0, programs, BP):
        p = start + tl.arange(0, BP)
        at = dbias + (p * H + h).to(tl.int64)[:, None] * N * N + pair[None, :]
        total += tl.load(at, mask=(p < programs)[:, None] & inside[None, :], other=0.0)
    tl.store(dtable + entry * H + h, tl.sum(tl.sum(total, 1), 0).to(dtable.dtype.element_ty))


# -- launchers ---------------------------------------------------------------------------------------------------------


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
            window = " x ".join(map(str, args[-1].window))
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


@functools.lru_cache(_LAYERS)
def _forward_plan(layer: _Layer) -> LaunchPlan:
    tiles, heads = layer.tiles(backward=False), layer.spec.heads
    numbers, fixed = layer.arguments(tiles)
    return _fwd_kernel.plan((_programs(numbers[0], heads, layer.device), heads, tiles.blocks), *numbers, **fixed)


@dataclass(frozen=True)
class _BackwardPlan:
    """Two launches, and how the sums between them are laid out."""

    windows: LaunchPlan
    table: LaunchPlan
    programs: int
    zeroed: bool
    """Whether the sums are added to."""


@functools.lru_cache(_LAYERS)
def _backward_plan(layer: _Layer) -> _BackwardPlan:
    tiles, spec = layer.tiles(backward=True), layer.spec
    numbers, fixed = layer.arguments(tiles)
    programs = _programs(numbers[0], spec.heads, layer.device)
    return _BackwardPlan(
        _bwd_kernel.plan((programs, spec.heads), *numbers, BLOCKS=tiles.blocks, **fixed),
        _table_kernel.plan(
            (spec.entries, spec.heads),
            programs,
            H=spec.heads,
            WH=spec.window[0],
            WW=spec.window[1],
            NP=tiles.columns,
            BP=16,
        ),
        programs,
        zeroed=tiles.blocks > 1,
    )


@sized
def forward(
    qkv: Tensor, table: Tensor, head_scale: Tensor | None, regions: Tensor | None, seed: Tensor | None, spec: Spec
) -> Tensor:
    """Launch the forward pass on a map [B, Y, X, 3·H·D], and return [B, Y, X, H·D]."""
    shape = qkv.shape
    out = qkv.new_empty((*shape[:-1], shape[-1] // 3))
    _forward_plan(_Layer.of(qkv, head_scale, regions, spec))(qkv, table, head_scale, regions, seed, out)
    return out


@sized
def backward(
    dout: Tensor,
    qkv: Tensor,
    table: Tensor,
    head_scale: Tensor | None,
    regions: Tensor | None,
    seed: Tensor | None,
    spec: Spec,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the backward pass, and return the gradients of qkv, table and head_scale."""
    plan, tokens = _backward_plan(_Layer.of(qkv, head_scale, regions, spec)), spec.tokens
    dqkv, dtable = torch.empty_like(qkv), torch.empty_like(table)
    make = torch.zeros if plan.zeroed else torch.empty
    dbias = make((plan.programs, spec.heads, tokens, tokens), dtype=torch.float32, device=qkv.device)
    dscale = None
    if head_scale is not None:
        dscale = torch.empty((plan.programs, spec.heads), dtype=torch.float32, device=qkv.device)
    plan.windows(qkv, table, head_scale, regions, seed, dout.contiguous(), dqkv, dbias, dscale)
    plan.table(dbias, dtable)
    if head_scale is None or dscale is None:
        return dqkv, dtable, None
    return dqkv, dtable, dscale.sum(0).to(head_scale.dtype).view_as(head_scale)

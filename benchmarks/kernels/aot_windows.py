"""The variants of window attention's kernels that the ahead-of-time gate compiles: the layers of published models."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from accel.kernels.launching import PlannedKernel
from accel.kernels.window_attention import Spec
from benchmarks.kernels.aot_variants import Variant

_POINTEE = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class _Layer:
    window: int
    channels: int
    dtype: torch.dtype = torch.float16
    masked: bool = True
    cosine: bool = False
    dropout: float = 0.0
    wide: bool = False
    """Of 2**31 numbers or more: 64-bit addresses."""
    tf32: bool = False
    """Of fp32: products that torch.backends.cuda.matmul.allow_tf32 rounds."""
    given: bool = False
    """Its windows were cut out already, and any of them may hold several regions."""

    @property
    def spec(self) -> Spec:
        return Spec(
            heads=3,
            window=(self.window, self.window),
            shift=(self.window // 2, self.window // 2) if self.masked and not self.given else (0, 0),
            scale=self.channels**-0.5,
            dropout=self.dropout,
        )

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Set the precision of fp32 products to the layer's."""
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    @property
    def name(self) -> str:
        words = ("masked", "cosine", "dropout", "wide", "tf32", "given")
        extras = [word for word in words if getattr(self, word)]
        return " ".join([f"{self.window}x{self.window}", f"D{self.channels}", _POINTEE[self.dtype], *extras])


def _layers() -> Iterator[_Layer]:
    """Yield the published windows, head dims, dtypes and attentions; then what changes the code beside them."""
    published = product((7, 8, 12), (16, 32, 64), (torch.float32, torch.float16, torch.bfloat16))
    for window, channels, dtype in published:
        for cosine in (False, True):
            yield _Layer(window, channels, dtype, cosine=cosine)
        if channels == 32:
            yield _Layer(window, channels, dtype, dropout=0.1)
    for window in (7, 8, 12, 16):
        yield _Layer(window, 32, masked=False)
        yield _Layer(window, 32, torch.float32, tf32=True)
    yield _Layer(7, 32, wide=True)
    yield _Layer(12, 32, wide=True)
    for dtype, cosine in product((torch.float32, torch.float16, torch.bfloat16), (False, True)):
        yield _Layer(16, 32, dtype, cosine=cosine)
    for window in (8, 16):  # Swin V2's, whose every second block is not shifted
        yield _Layer(window, 32, masked=False, cosine=True)
    yield _Layer(7, 128)
    yield _Layer(12, 32, given=True)
    yield _Layer(16, 32, cosine=True, given=True)


def window_attention(architecture: int) -> Iterator[Variant]:
    """Yield the kernels of each layer, and those that sum the bias table's gradient."""
    from accel.kernels.window_attention import triton as kernels

    for layer in _layers():
        with layer.precision():
            yield from _kernels_of(layer, architecture)
    for window, columns in ((7, 64), (8, 64), (12, 256), (16, 256)):
        fixed = {"H": 3, "WH": window, "WW": window, "NP": columns, "BP": 16 if columns == 64 else 1}
        pointers = {"dbias": "fp32", "dtable": "fp32"}
        yield Variant(f"window_attention table {window}x{window}", kernels._table_kernel, pointers, fixed)


def _kernels_of(layer: _Layer, architecture: int) -> Iterator[Variant]:
    """Yield a layer's kernels: two if a window is one block of rows, else three."""
    from accel.kernels.window_attention import blocks_triton as block_kernels
    from accel.kernels.window_attention import tiles
    from accel.kernels.window_attention import triton as kernels

    spec, data = layer.spec, _POINTEE[layer.dtype]
    given = {"qkv": data, "table": "fp32", "head_scale": "fp32", "regions": "u8", "seed": "i64"}
    given |= {"out": data, "dout": data, "dqkv": data, "dbias": "fp32", "dscale": "fp32", "sums": "fp32"}
    absent = {"head_scale": not layer.cosine, "dscale": not layer.cosine}
    absent |= {"regions": not layer.masked, "seed": layer.dropout == 0}
    flags = {"WIDE": layer.wide, "MASKED": layer.masked, "COSINE": layer.cosine}

    def variant(kind: str, kernel: PlannedKernel, shape: Any) -> Variant:
        takes = inspect.signature(kernel.kernel.fn).parameters
        pointers = {name: kind for name, kind in given.items() if name in takes and not absent.get(name)}
        fixed: dict[str, Any] = {name: None for name, left_out in absent.items() if left_out and name in takes}
        fixed |= {**tiles.constants(spec, layer.channels, layer.dtype, shape), **flags}
        options = {"num_warps": shape.warps, "num_stages": shape.stages}
        return Variant(f"window_attention {kind} {layer.name}", kernel, pointers, fixed, options)

    if tiles.is_one_block(spec, layer.channels, layer.dtype):
        for kind, kernel in (("forward", kernels._fwd_kernel), ("backward", kernels._bwd_kernel)):
            backward = kind == "backward"
            shape = tiles.tiles_of(spec, layer.channels, layer.dtype, cosine=layer.cosine, backward=backward)
            yield variant(kind, kernel, shape)
        return
    passes: dict[tiles.Pass, PlannedKernel] = {
        "forward": block_kernels._fwd_blocks_kernel,
        "rows": block_kernels._rows_kernel,
        "columns": block_kernels._columns_kernel,
    }
    for step, kernel in passes.items():
        blocks = tiles.block_tiles_of(
            spec, layer.channels, layer.dtype, step, cosine=layer.cosine, capability=architecture
        )
        yield variant(step, kernel, blocks)

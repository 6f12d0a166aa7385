"""The kernel variants that the ahead-of-time gate compiles: what a layer of a published model launches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from accel.kernels.launching import PlannedKernel
from accel.kernels.window_attention import Spec
from benchmarks.kernels.aot_key import digest

_EXACT = {"enable_fp_fusion": False}
"""Of kernels whose results have the bits of plain torch."""
_POINTEE = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Variant:
    """One kernel with everything that is fixed at compile time."""

    name: str
    """Kernel, layer and dtype: the key of the table."""
    launched: PlannedKernel
    pointers: dict[str, str]
    """Argument → what it points to."""
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    """What the launcher asks of the compiler beside them: warps, stages, fusion."""
    scalars: dict[str, str] = field(default_factory=dict)
    """Argument → its type; all others are 32-bit integers."""

    @property
    def kernel(self) -> Any:
        """Return the function of `triton.jit`."""
        return self.launched.kernel

    @property
    def key(self) -> str:
        """Return a digest of all that decides what it compiles to."""
        return digest(self.kernel, self.signature(), self.constants, self.options)

    def signature(self) -> dict[str, str]:
        """Return the types of all arguments, in order."""
        return {name: self._type(name) for name in inspect.signature(self.kernel.fn).parameters}

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        return f"*{self.pointers[name]}" if name in self.pointers else self.scalars.get(name, "i32")


def variants() -> Iterator[Variant]:
    """Yield all."""
    from benchmarks.kernels.aot_optimizers import optimizers

    yield from _window_attention()
    yield from _simota()
    yield from _fcos()
    yield from _rows()
    yield from _codes()
    yield from _thresholds()
    yield from optimizers()


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

    @property
    def name(self) -> str:
        words = ("masked", "cosine", "dropout", "wide", "tf32")
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


def _window_attention() -> Iterator[Variant]:
    from accel.kernels.window_attention import triton as kernels

    for layer in _layers():
        spec = Spec(
            heads=3,
            window=(layer.window, layer.window),
            shift=(layer.window // 2, layer.window // 2) if layer.masked else (0, 0),
            scale=layer.channels**-0.5,
            dropout=layer.dropout,
        )
        data = _POINTEE[layer.dtype]
        optional = {"head_scale": layer.cosine, "regions": layer.masked, "seed": layer.dropout > 0}
        given = {"qkv": data, "table": "fp32", "head_scale": "fp32", "regions": "u8", "seed": "i64"}
        given = {name: kind for name, kind in given.items() if optional.get(name, True)}
        absent: dict[str, Any] = {name: None for name, there in optional.items() if not there}
        flags = {**absent, "WIDE": layer.wide, "MASKED": layer.masked, "COSINE": layer.cosine}
        tiles, fixed = _compiled_in(layer, spec, backward=False)
        fixed = {**fixed, **flags}
        yield Variant(
            f"window_attention forward {layer.name}",
            kernels._fwd_kernel,
            {**given, "out": data},
            fixed,
            _options(tiles),
        )
        tiles, fixed = _compiled_in(layer, spec, backward=True)
        fixed = {**fixed, **flags, "BLOCKS": tiles.blocks}
        outputs = {"dout": data, "dqkv": data, "dbias": "fp32"}
        if layer.cosine:
            outputs["dscale"] = "fp32"
        else:
            fixed["dscale"] = None
        yield Variant(
            f"window_attention backward {layer.name}", kernels._bwd_kernel, {**given, **outputs}, fixed, _options(tiles)
        )
    for window, columns in ((7, 64), (8, 64), (12, 256), (16, 256)):
        fixed = {"H": 3, "WH": window, "WW": window, "NP": columns, "BP": 16}
        pointers = {"dbias": "fp32", "dtable": "fp32"}
        yield Variant(f"window_attention table {window}x{window}", kernels._table_kernel, pointers, fixed)


def _compiled_in(layer: _Layer, spec: Spec, *, backward: bool) -> tuple[Any, dict[str, Any]]:
    """Return the tiles and constants of a pass, under the layer's setting of tf32."""
    from accel.kernels.window_attention import launchers

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = layer.tf32
    try:
        tiles = launchers.tiles_of(spec, layer.channels, layer.dtype, cosine=layer.cosine, backward=backward)
        return tiles, launchers.constants(spec, layer.channels, layer.dtype, tiles)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _options(tiles: Any) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}


def _simota() -> Iterator[Variant]:
    from accel.kernels.simota import triton as kernels

    weights = dict.fromkeys(("cls_weight", "iou_weight", "log_eps", "union_eps"), "fp32")
    for data, scored in product(("fp16", "bf16", "fp32"), (True, False)):
        name = data if scored else f"{data} without objectness"
        shared = {"boxes_ptr": "fp32", "cls_ptr": data, "obj_ptr": data, "absent_ptr": "fp32", "cells_ptr": "fp32"}
        shared |= {"gts_ptr": "fp32", "labels_ptr": "i64", "takers_ptr": "i32", "taker_ptr": "i32"}
        lists = {"list_ptr": "i32", "length_ptr": "i32"}
        results = {"fg_ptr": "i1", "matched_ptr": "i64", "iou_ptr": "fp32", "class_ptr": "i64"}
        for region, number in kernels._REGIONS.items():
            form = {"C": 80, "HAS_OBJ": scored, "REGION": number, "BLOCK": 256}
            match = {**form, "TOPK": 10}
            yield Variant(
                f"simota match {name} {region}", kernels._match_kernel, {**shared, **lists}, match, _EXACT, weights
            )
            yield Variant(
                f"simota resolve {name} {region}", kernels._resolve_kernel, {**shared, **results}, form, _EXACT, weights
            )
        absent = {"cls_ptr": data, "obj_ptr": data, "absent_ptr": "fp32", **lists}
        constants = {"C": 80, "HAS_OBJ": scored, "ROWS": 16, "BLOCK_C": 128}
        yield Variant(f"simota absent {name}", kernels._absent_kernel, absent, constants, _EXACT)
    near = {"cells_ptr": "fp32", "gts_ptr": "fp32", "near_ptr": "i8"}
    for region in ("center", "box"):
        form = {"REGION": kernels._REGIONS[region], "BLOCK": 256}
        yield Variant(f"simota near {region}", kernels._near_kernel, near, form)
    listed = {"near_ptr": "i8", "list_ptr": "i32", "length_ptr": "i32"}
    yield Variant("simota list", kernels._list_kernel, listed, {"BLOCK": 1024})


def _fcos() -> Iterator[Variant]:
    import triton.language as tl

    from accel.kernels.fcos_targets import triton as kernels

    for data, normalize in product(("fp32", "fp64"), (True, False)):
        words = " fp64" * (data == "fp64") + " in pixels" * (not normalize)
        points = {"xy": data, "regress_range": data, "stride": data, "boxes": data, "gt_labels": "i64", "valid": "i1"}
        work = tl.float64 if data == "fp64" else tl.float32
        form = {"BACKGROUND": 10, "RADIUS": 1.5, "NORMALIZE": normalize, "WORK": work, "BLOCK": 256}
        pointers = {**points, "labels": "i64", "sides": data, "centerness": data}
        for center, place in ((True, ""), (False, " whole boxes")):
            yield Variant(
                f"fcos targets{place}{words}", kernels._fcos_kernel, pointers, {**form, "CENTER": center}, _EXACT
            )
        outputs = {"labels": "i64", "targets": data, "centerness": data, "attributes": "i64"}
        pointers = {**points, **outputs, "code": data, "gt_attributes": "i64"}
        form = {**form, "C": 9, "ATTR_BACKGROUND": 9, "ALPHA": 2.5}
        yield Variant(f"fcos3d targets{words}", kernels._fcos3d_kernel, pointers, form, _EXACT)


def _rows() -> Iterator[Variant]:
    from accel.kernels.rows import compact_triton, gather_rows_triton

    for data in ("fp16", "bf16", "fp32", "fp64"):
        pointers = {"x": data, "index": "i64", "out": data}
        block = {"ROWS": 64, "COLUMNS": 16}
        yield Variant(f"gather_rows {data}", gather_rows_triton._gather_kernel, pointers, block)
        pointers = {"rows": data, "index": "i64", "out": data}
        yield Variant(f"gather_rows backward {data}", gather_rows_triton._scatter_kernel, pointers, {"SIZE": 512})
        pointers = {"x": data, "source": "i64", "out": data, "pad": data}
        yield Variant(f"compact {data}", compact_triton._take_kernel, pointers, block)
        pointers = {"rows": data, "source": "i64", "out": data}
        yield Variant(f"compact backward {data}", compact_triton._put_kernel, pointers, block)
    pointers = {"mask": "i1", "ends": "i64", "source": "i64"}
    yield Variant("compact sources", compact_triton._sources_kernel, pointers, {"BLOCK": 1024})


def _codes() -> Iterator[Variant]:
    from accel.kernels import quantise, sign_pack
    from accel.kernels.codes import triton as kernels
    from accel.kernels.codes.block_code import LARGEST_BLOCK

    data = {"values": "fp32", "encoded": "u8"}
    for code in (quantise.CODE, sign_pack.CODE):
        op, bits, largest = code.name, {"BITS": code.bits}, LARGEST_BLOCK
        for block, numel in ((256, 256), (1024, 1024), (largest, largest), (largest, largest - 1)):
            launch = next(kernels.launches(numel, block))
            name = f"{block}" if launch.whole else f"{block} rest"
            form = {**bits, "WHOLE": launch.whole, "ROWS": launch.rows, "BLOCK": block}
            pointers = {**data, "residual": "fp32", "lost": "fp32"}
            unscaled = {**form, "factor": None}
            yield Variant(f"{op} encode {name}", kernels._encode_kernel, pointers, unscaled, _EXACT)
            scaled = {"factor": "fp32"}
            yield Variant(f"{op} encode {name} scaled", kernels._encode_kernel, pointers, form, _EXACT, scaled)
            pointers = {"encoded": "u8", "out": "fp32"}
            yield Variant(f"{op} sum {name}", kernels._decode_sum_kernel, pointers, {**form, "ADD": True}, _EXACT)
        form = {**bits, "WHOLE": True, "ROWS": 2, "BLOCK": 1024}
        absent: dict[str, Any] = {**form, "residual": None, "lost": None, "factor": None}
        yield Variant(f"{op} encode 1024 plain", kernels._encode_kernel, data, absent, _EXACT)
        pointers = {"encoded": "u8", "out": "fp32"}
        yield Variant(f"{op} decode 1024", kernels._decode_sum_kernel, pointers, {**form, "ADD": False}, _EXACT)


def _thresholds() -> Iterator[Variant]:
    from accel.kernels.rows import threshold_triton as kernels
    from accel.kernels.threshold import BLOCK

    form = {"ROWS": kernels._ROWS, "WIDTH": BLOCK}
    yield Variant("threshold maxima", kernels._block_maxima_kernel, {"values": "fp32", "maxima": "fp32"}, form)
    for name, maxima in (("", False), (" by maxima", True)):
        given = {"values": "fp32", "least": "fp32", **({"maxima": "fp32"} if maxima else {})}
        fixed = form if maxima else {**form, "maxima": None}
        yield Variant(f"threshold tally{name}", kernels._tally_kernel, {**given, "counts": "i32"}, fixed)
        outputs = {"ends": "i64", "positions": "i64", "selected": "fp32"}
        yield Variant(f"threshold take{name}", kernels._take_kernel, {**given, **outputs}, fixed)

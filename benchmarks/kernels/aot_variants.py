"""The kernel variants that the ahead-of-time gate compiles: what a layer of a published model launches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from accel.kernels.launching import PlannedKernel
from benchmarks.kernels.aot_key import digest

_EXACT = {"enable_fp_fusion": False}
"""Of kernels whose results have the bits of plain torch."""


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


def variants(architecture: int) -> Iterator[Variant]:
    """Yield all, as they are for a compute capability (times ten): the names are the same for all."""
    from benchmarks.kernels.aot_optimizers import optimizers
    from benchmarks.kernels.aot_windows import window_attention

    yield from window_attention(architecture)
    yield from _simota()
    yield from _fcos()
    yield from _rows()
    yield from _codes()
    yield from _thresholds()
    yield from optimizers()


def _simota() -> Iterator[Variant]:
    from accel.kernels.simota import triton as kernels
    from accel.kernels.simota.launchers import REGIONS

    weights = dict.fromkeys(("cls_weight", "iou_weight", "log_eps", "union_eps"), "fp32")
    truths = {"gts_ptr": "fp32", "labels_ptr": "i64", "mask_ptr": "i1"}
    listed = {"ints_ptr": "i32"}
    places = {"points_ptr": "fp32", "strides_ptr": "fp32"}
    for data, scored in product(("fp16", "bf16", "fp32"), (True, False)):
        name = data if scored else f"{data} without objectness"
        predicted = {"boxes_ptr": data, "cls_ptr": data, "obj_ptr": data}
        match = {"cls_ptr": data, "planes_ptr": "fp32", **truths, **listed}
        results = {"fg_ptr": "i1", "matched_ptr": "i64", "iou_ptr": "fp32", "class_ptr": "i64", "count_ptr": "i64"}
        resolve = {**match, **results}
        for region, number in REGIONS.items():
            form = {"C": 80, "HAS_OBJ": scored, "HAS_MASK": True, "XYXY": False, "REGION": number, "BLOCK": 256}
            topk = {**form, "TOPK": 10}
            yield Variant(f"simota match {name} {region}", kernels.match_kernel, match, topk, _EXACT, weights)
            yield Variant(f"simota resolve {name} {region}", kernels.resolve_kernel, resolve, form, _EXACT, weights)
            kept = {"C": 80, "HAS_OBJ": scored, "XYXY": False, "REGION": number, "ROWS": 16, "BLOCK_C": 128}
            absent: dict[str, Any] = {} if scored else {"obj_ptr": None}
            absent |= dict.fromkeys(places) if region == "given" else {}
            given = {**predicted, **places, **listed, "planes_ptr": "fp32"}
            yield Variant(
                f"simota candidate {name} {region}",
                kernels.candidate_kernel,
                given,
                {**kept, **absent},
                _EXACT,
                {"radius": "fp32"},
            )
    near = {**places, "gts_ptr": "fp32", "near_ptr": "i1"}
    for region, masked in product(("center", "box"), (True, False)):
        near["mask_ptr"] = "i1" if masked else "i64"  # the classes, not read
        fixed = {"HAS_MASK": masked, "XYXY": False, "REGION": REGIONS[region], "BLOCK": 256}
        words = "" if masked else " unmasked"
        yield Variant(
            f"simota near {region}{words}", kernels.near_kernel, dict(near), fixed, _EXACT, {"radius": "fp32"}
        )
    yield Variant("simota list", kernels.list_kernel, {"near_ptr": "i1", "count_ptr": "i64", **listed}, {"BLOCK": 1024})


def _fcos() -> Iterator[Variant]:
    import triton.language as tl

    from accel.kernels.fcos_targets import triton as kernels

    for data, normalize in product(("fp32", "fp64"), (True, False)):
        words = " fp64" * (data == "fp64") + " in pixels" * (not normalize)
        points = {"xy": data, "regress_range": data, "stride": data, "boxes": data, "gt_labels": "i64", "valid": "i1"}
        work = tl.float64 if data == "fp64" else tl.float32
        form = {
            "BACKGROUND": 10,
            "RADIUS": 1.5,
            "NORMALIZE": normalize,
            "WORK": work,
            "BLOCK": kernels._BLOCK,
            "BOXES": kernels._BOXES,
        }
        pointers = {**points, "labels": "i64", "sides": data, "centerness": data}
        for center, place in ((True, ""), (False, " whole boxes")):
            yield Variant(
                f"fcos targets{place}{words}",
                kernels._fcos_kernel,
                pointers,
                {**form, "CENTER": center},
                kernels._ONE_WARP,
            )
        outputs = {"labels": "i64", "targets": data, "centerness": data, "attributes": "i64"}
        pointers = {**points, **outputs, "code": data, "gt_attributes": "i64"}
        form = {**form, "BLOCK": kernels._BLOCK_3D, "C": 9, "ATTR_BACKGROUND": 9, "ALPHA": 2.5}
        yield Variant(f"fcos3d targets{words}", kernels._fcos3d_kernel, pointers, form, kernels._ONE_WARP)


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
    from accel.kernels.rows import BLOCK
    from accel.kernels.rows import threshold_triton as kernels

    form = {"ROWS": kernels._ROWS, "WIDTH": BLOCK}
    yield Variant("threshold maxima", kernels._block_maxima_kernel, {"values": "fp32", "maxima": "fp32"}, form)
    for name, maxima in (("", False), (" by maxima", True)):
        given = {"values": "fp32", "least": "fp32", **({"maxima": "fp32"} if maxima else {})}
        fixed = form if maxima else {**form, "maxima": None}
        yield Variant(f"threshold tally{name}", kernels._tally_kernel, {**given, "counts": "i32"}, fixed)
        outputs = {"ends": "i64", "positions": "i64", "selected": "fp32"}
        yield Variant(f"threshold take{name}", kernels._take_kernel, {**given, **outputs}, fixed)

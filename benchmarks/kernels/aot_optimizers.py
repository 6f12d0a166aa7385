"""The optimizers' kernel variants that the ahead-of-time gate compiles."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from benchmarks.kernels.aot_variants import Variant

_TABLES = {"addresses": "i64", "layout": "i64", "work": "i32"}
_WALKED = {**_TABLES, "scalars": "fp64", "overflow": "fp32"}


def optimizers() -> Iterator[Variant]:
    """Yield the updates in all dtypes, then what comes before them."""
    for form, name in _forms():
        yield from _updates(form, name)
        yield from _sums(form, name)
    yield from _scalars()


def _forms() -> Iterator[tuple[Any, str]]:
    """Yield what parameters of a model are: of one dtype, 16-bit with gradients in fp32, at odd addresses."""
    from accel.kernels.optimizers.device import Form

    kinds = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
    plain = Form(torch.float32, torch.float32, False, True, True, False, False)
    for dtype, word in kinds.items():
        half = dtype in (torch.float16, torch.bfloat16)
        yield plain._replace(param=dtype, grad=dtype, has_master=half), word + " master" * half
        if half:
            yield plain._replace(param=dtype, grad=dtype), word
    yield plain._replace(param=torch.bfloat16, has_master=True), "bf16 master fp32 gradients"
    yield plain._replace(aligned=False), "fp32 unaligned"
    yield (
        plain._replace(param=torch.bfloat16, grad=torch.bfloat16, has_master=True, aligned=False),
        ("bf16 master unaligned"),
    )


def _updates(form: Any, name: str) -> Iterator[Variant]:
    from accel.kernels.optimizers.device import constants
    from accel.kernels.optimizers.triton import update_kernel

    fixed = {**constants(form), "HAS_BUFFER": True, "NESTEROV": False, "AMSGRAD": False}
    squares = {"weight_squares": "fp64", "update_squares": "fp64"}
    kinds: list[tuple[str, str, dict[str, bool]]] = [("sgd", "", {}), ("adam", "", {})]
    if name in ("fp32", "bf16 master"):
        kinds += [("sgd", " nesterov", {"NESTEROV": True}), ("sgd", " plain", {"HAS_BUFFER": False})]
        kinds += [("adam", " amsgrad", {"AMSGRAD": True})]
    for kind, word, own in kinds:
        chosen = {**fixed, "KIND": kind, **own, **dict.fromkeys(squares)}
        yield Variant(f"optimizer {kind} {name}{word}", update_kernel, _WALKED, chosen)
    moments = {**fixed, "KIND": "moments"}
    yield Variant(f"optimizer lamb moments {name}", update_kernel, {**_WALKED, **squares}, moments)
    apply = {**fixed, "KIND": "apply", **dict.fromkeys(squares)}
    yield Variant(f"optimizer lamb apply {name}", update_kernel, _WALKED, apply)


def _sums(form: Any, name: str) -> Iterator[Variant]:
    from accel.kernels.optimizers.device import constants
    from accel.kernels.optimizers.triton_scalars import sums_kernel

    fixed = constants(form)
    outputs = {"grad_squares": "fp64", "infinite": "i32"}
    given = {**_TABLES, **outputs, "grad_scale": "fp32"}
    yield Variant(f"optimizer sums {name}", sums_kernel, given, {**fixed, "weight_squares": None})
    given = {**_TABLES, **outputs, "weight_squares": "fp64"}
    yield Variant(f"optimizer sums {name} weights", sums_kernel, given, {**fixed, "grad_scale": None})


def _scalars() -> Iterator[Variant]:
    from accel.kernels.optimizers.device import CHUNK, TENSORS
    from accel.kernels.optimizers.triton_scalars import ratio_kernel, scalars_kernel

    tables = {"addresses": "i64", "layout": "i64", "hypers": "fp64", "scalars": "fp64"}
    outputs = {"norm": "fp32", "overflow": "fp32"}
    optional = {"grad_scale": "fp32", "found_inf": "fp32", "grad_squares": "fp64", "infinite": "i32"}
    given_by = {"": (), " by a scaler": ("grad_scale", "found_inf"), " clipped": ("grad_squares", "infinite")}
    given_by[" checked"] = ("grad_scale", "grad_squares", "infinite")
    for (words, there), (kind, adaptive, layerwise) in product(
        given_by.items(), (("sgd", False, False), ("adam", True, False), ("lamb", True, True), ("lars", False, True))
    ):
        given = {**tables, **outputs, **{name: optional[name] for name in there}}
        absent: dict[str, Any] = {name: None for name in optional if name not in there}
        form = {"ADAPTIVE": adaptive, "LAYERWISE": layerwise, "CHECKS": words == " checked", "BLOCK": TENSORS}
        yield Variant(f"optimizer scalars {kind}{words}", scalars_kernel, given, {**absent, **form})
    given = {"layout": "i64", "hypers": "fp64", "scalars": "fp64", "overflow": "fp32"}
    given |= {"first_squares": "fp64", "second_squares": "fp64"}
    yield Variant("optimizer ratio lamb", ratio_kernel, given, {"grad_scale": None, "ADAPTIVE": True, "CHUNK": CHUNK})
    for words, scale in (("", None), (" scaled", "fp32")):
        fixed: dict[str, Any] = {"ADAPTIVE": False, "CHUNK": CHUNK}
        scaled = {**given, "grad_scale": "fp32"} if scale else given
        fixed |= {} if scale else {"grad_scale": None}
        yield Variant(f"optimizer ratio lars{words}", ratio_kernel, scaled, fixed)

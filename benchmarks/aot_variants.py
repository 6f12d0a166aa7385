"""The kernel variants that the ahead-of-time gate compiles: what a layer of a published model launches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from accel.kernels.window_attention import Spec

_POINTEE = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Variant:
    """One kernel with everything that is fixed at compile time."""

    name: str
    """Kernel, layer and dtype: the key of the table."""
    kernel: Any
    pointers: dict[str, str]
    """Argument → what it points to; scalars are 32-bit integers."""
    constants: dict[str, Any]
    warps: int
    stages: int = 3

    def signature(self) -> dict[str, str]:
        """Return the types of all arguments, in order."""
        return {name: self._type(name) for name in inspect.signature(self.kernel.fn).parameters}

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        return f"*{self.pointers[name]}" if name in self.pointers else "i32"


def variants() -> Iterator[Variant]:
    """Yield all."""
    yield from _window_attention()


@dataclass(frozen=True)
class _Layer:
    window: int
    channels: int
    dtype: torch.dtype = torch.float16
    masked: bool = True
    cosine: bool = False
    dropout: float = 0.0

    @property
    def name(self) -> str:
        extras = [
            word for word, on in (("masked", self.masked), ("cosine", self.cosine), ("dropout", self.dropout)) if on
        ]
        return " ".join([f"{self.window}x{self.window}", f"D{self.channels}", _POINTEE[self.dtype], *extras])


_LAYERS = (
    _Layer(7, 32),
    _Layer(7, 32, masked=False),
    _Layer(7, 32, dropout=0.1),
    _Layer(7, 16),
    _Layer(7, 64),
    _Layer(8, 32),
    _Layer(8, 32, cosine=True),
    _Layer(12, 32),
    _Layer(12, 32, cosine=True),
    _Layer(7, 32, torch.bfloat16),
    _Layer(12, 32, torch.bfloat16),
    _Layer(7, 32, torch.float32),
    _Layer(12, 32, torch.float32),
)


def _window_attention() -> Iterator[Variant]:
    from accel.kernels import window_attention_triton as kernels

    for layer in _LAYERS:
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
        flags = {**absent, "WIDE": False, "MASKED": layer.masked, "COSINE": layer.cosine}
        tiles = kernels.tiles_of(spec, layer.channels, layer.dtype, backward=False)
        fixed = {**kernels.constants(spec, layer.channels, layer.dtype, tiles), **flags}
        yield Variant(
            f"window_attention forward {layer.name}",
            kernels._fwd_kernel,
            {**given, "out": data},
            fixed,
            tiles.warps,
            tiles.stages,
        )
        tiles = kernels.tiles_of(spec, layer.channels, layer.dtype, backward=True)
        fixed = {**kernels.constants(spec, layer.channels, layer.dtype, tiles), **flags, "BLOCKS": tiles.blocks}
        outputs = {"dout": data, "dqkv": data, "dbias": "fp32"}
        if layer.cosine:
            outputs["dscale"] = "fp32"
        else:
            fixed["dscale"] = None
        yield Variant(
            f"window_attention backward {layer.name}",
            kernels._bwd_kernel,
            {**given, **outputs},
            fixed,
            tiles.warps,
            tiles.stages,
        )
    for window, columns in ((7, 64), (12, 256)):
        fixed = {"H": 3, "WH": window, "WW": window, "NP": columns, "BP": 16}
        pointers = {"dbias": "fp32", "dtable": "fp32"}
        yield Variant(f"window_attention table {window}x{window}", kernels._table_kernel, pointers, fixed, 4)

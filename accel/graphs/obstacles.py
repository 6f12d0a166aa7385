"""Why a function can't be captured: the operators that wait for the device, and the lines that call them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_READS = "it reads a value from the device; keep it there as a tensor (torch.where in place of if)"
_SHAPE = "the shape of its result depends on values; use a mask, or accel.kernels.compact with a fixed size"
_MASKED = "an index of bool is turned into positions, whose number depends on values; use torch.where or a fixed size"
_REPEATS = "repeats lie on the device; give output_size"
_COPIES = "it copies between host and device and waits; copy before the captured step, from pinned memory"
_HERE, _TORCH = str(Path(__file__).resolve().parents[1]), str(Path(torch.__file__).resolve().parent)


@dataclass(frozen=True)
class Obstacle:
    """One operator that keeps a function from being captured."""

    operator: str
    """As torch names it: `aten._local_scalar_dense`."""
    line: str
    """File and line of the user's code that led to it."""
    remedy: str
    """Why it waits, and what to do."""

    def __str__(self) -> str:
        return f"{self.line}: {self.operator}: {self.remedy}"


def why_not_capturable(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Obstacle]:
    """Run a function once, eagerly, and name the operators that a CUDA graph can't hold.

    It runs as any call does: a training step trains. It works on a CPU too, where only what depends on the device
    (copies between host and device) can't be seen.

    Args:
        function: what is to be captured.
        *args: its arguments.
        **kwargs: the same.

    Returns:
        One obstacle for each operator and line, in order; [] if none was seen.

    Example:
        >>> [obstacle.operator for obstacle in why_not_capturable(lambda x: x[x > 0].sum(), torch.ones(3))]
        ['aten.index']
    """
    seen = _Seen()
    with seen:
        function(*args, **kwargs)
    return list(dict.fromkeys(seen.obstacles))


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.obstacles: list[Obstacle] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if remedy := _remedy(func, args, kwargs):
            name = f"{func.namespace}.{func._schema.name.split('::')[1]}"
            self.obstacles.append(Obstacle(name, _line(), remedy))
        return func(*args, **kwargs)


def _remedy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why an operator waits and what to do; '' if it doesn't."""
    name, tags = func._schema.name.split("::")[1], func.tags
    if torch.Tag.data_dependent_output in tags:
        return _READS
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        return _MASKED if any(index.dtype in (torch.bool, torch.uint8) for index in indices) else ""
    if torch.Tag.dynamic_output_shape in tags and name != "_ctc_loss":  # of that only the size of a buffer varies
        if name != "repeat_interleave":
            return _SHAPE
        return _REPEATS if kwargs.get("output_size") is None else ""
    if name in ("_to_copy", "copy_") and not kwargs.get("non_blocking", len(args) > 2 and args[2]):
        return _COPIES if _crosses(name, args, kwargs) else ""
    return ""


def _crosses(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a copy is from the host to a device or back."""
    target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or args[0].device)
    source = args[1].device if name == "copy_" else args[0].device
    return bool((target.type == "cpu") != (source.type == "cpu"))


def _line() -> str:
    """Return the innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        # An environment may be reached through a link.
        if not path.startswith("<frozen") and not os.path.realpath(path).startswith((_HERE, _TORCH)):
            return f"{path}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "unknown"

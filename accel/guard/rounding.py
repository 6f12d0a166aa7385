"""How coarse the numbers within a call are: a loss in float32 may come from layers that have rounded to bfloat16.

Another order of summation moves each of these roundings, whatever the dtype of what is compared in the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from accel.exactness import Exactness
from accel.precision import convolutions_use_tf32, fp32_precision, products_use_tf32

FINEST = torch.float64
MOST_REORDERED = 0.4
"""By which all gradients together may be off where sums are reordered, in 16 bits: the roundings of 16 layers with
BatchNorm in bfloat16 gave 0.37; a backward pass with other masks of dropout (p = 0.1) than the forward pass, 0.45."""
_HALVES = frozenset({torch.float16, torch.bfloat16})
_TF32 = torch.float16
_USE_TF32 = ("Convolution", "Rnn")
"""In the names of autograd's nodes."""


def eps_of(dtype: torch.dtype) -> float:
    """Return ε of a dtype, 0 for whole numbers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype with the larger ε."""
    return max(one, other, key=eps_of)


@dataclass(frozen=True)
class Rounding:
    """What a plain call has computed with."""

    coarsest: torch.dtype
    """The coarsest format of 16 bits in it, or else `FINEST`."""
    convolves: bool

    def now(self, device: str) -> torch.dtype:
        """Return the coarsest format of such a call made now, on a device of this type: TF32 is switched elsewhere."""
        uses_tf32 = device == "cuda" and (products_use_tf32() or (self.convolves and convolutions_use_tf32()))
        return coarser(self.coarsest, _TF32) if uses_tf32 else self.coarsest


def rounding_of(
    model: nn.Module, autocast: tuple[bool, torch.dtype], outputs: Iterable[Tensor], before: Iterable[Any] = ()
) -> Rounding:
    """Return what a call has computed with, as far as it shows.

    The graph behind its outputs tells of an autocast within the model, too; modules and parameters of what that hides:
    parts that are compiled, or that run without gradients.

    Args:
        before: nodes of the graph that its inputs come from, such as those of another model: they are not its own.
    """
    enabled, dtype = autocast
    dtypes = {parameter.dtype for parameter in model.parameters()} | ({dtype} if enabled else set())
    convolves = any(isinstance(module, _ConvNd | nn.RNNBase) for module in model.modules())
    for node in _nodes(outputs, before):
        dtypes.update(each.dtype for each in getattr(node, "_input_metadata", ()))
        convolves = convolves or any(kind in type(node).__name__ for kind in _USE_TF32)
    return Rounding(max(dtypes & _HALVES, key=eps_of, default=FINEST), convolves)


def _nodes(outputs: Iterable[Tensor], before: Iterable[Any]) -> Iterator[Any]:
    seen = set(before)
    waiting: list[Any] = list({tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None} - seen)
    seen |= set(waiting)
    while waiting:
        yield (node := waiting.pop())
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting += new


def without_tf32(
    rounding: Rounding | None, device: torch.device, exactness: Exactness, *, compiles: bool
) -> contextlib.AbstractContextManager[Any]:
    """Let a call compute in float32 where a strategy that reorders sums is compared on a GPU.

    Not where nothing would be finer for it: cuDNN's plans are made for one precision, and would all be made anew. Nor
    where the user has set products to TF32 and calls are compiled: graphs look at that switch, and would be compiled
    again.

    Args:
        rounding: of the call that is compared; None if it is not known.
        compiles: a compiled call is compared.
    """
    if device.type != "cuda" or exactness != Exactness.REORDERED or (compiles and products_use_tf32()):
        return contextlib.nullcontext()
    return fp32_precision("ieee") if _is_finer_without(rounding) else contextlib.nullcontext()


def _is_finer_without(rounding: Rounding | None) -> bool:
    if rounding is not None and rounding.coarsest != FINEST:
        return False
    return products_use_tf32() or (convolutions_use_tf32() and (rounding is None or rounding.convolves))

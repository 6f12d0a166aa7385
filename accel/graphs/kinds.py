"""What a graph is captured for: the structure of the arguments, how each tensor lies in memory, and the modes of torch.

torch copies a new input into a graph's own with `copy_`, which broadcasts: an input of [1, C]
silently fills one of [B, C]. Here each kind of call has a graph of its own; `Buckets` pads inputs
of many sizes to a few kinds.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from accel.errors import InvalidArgument, InvalidType

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum)


class TensorForm(NamedTuple):
    """How a tensor lies in memory."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", requires grad" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)} on {self.device}{grad}"


class _Sequence(NamedTuple):
    kind: type
    items: tuple[Hashable, ...]


class _Mapping(NamedTuple):
    kind: type
    items: tuple[tuple[Hashable, Hashable], ...]


class _Value(NamedTuple):
    kind: type  # True, 1 and 1.0 are equal, and no two of them the same argument
    value: Hashable


_REMEDY = "let the function find other objects itself"


def described(value: Any, tensors: list[Tensor], what: str, remedy: str = _REMEDY) -> Hashable:
    """Describe a value, and add its tensors to a list, in order.

    Args:
        value: tensors, numbers, words, None, or tuples, lists and dicts of them.
        what: the value is, for the message.

    Raises:
        InvalidType: for anything else: a graph would go on with what it was at the capture.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return TensorForm(value.shape, value.dtype, value.stride(), value.device, value.requires_grad)
    if isinstance(value, tuple | list):
        return _Sequence(type(value), tuple(described(item, tensors, what, remedy) for item in value))
    if isinstance(value, dict):
        items = tuple((key, described(item, tensors, what, remedy)) for key, item in value.items())
        return _Mapping(type(value), items)
    if isinstance(value, _PLAIN):
        return _Value(type(value), value)
    raise InvalidType(
        f"capture: {what} must be tensors, numbers, words, None, or tuples, lists and dicts of them. "
        f"Found: {type(value).__name__}; {remedy}"
    )


def rebuilt(description: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a value of this description, with these tensors."""
    if isinstance(description, TensorForm):
        return next(tensors)
    if isinstance(description, _Sequence):
        items = [rebuilt(item, tensors) for item in description.items]
        return description.kind(*items) if hasattr(description.kind, "_fields") else description.kind(items)
    if isinstance(description, _Mapping):
        return description.kind((key, rebuilt(item, tensors)) for key, item in description.items)
    return description.value


def difference(known: Any, new: Any, at: str = "") -> str:
    """Say where two descriptions differ first, '' if they don't."""
    if known == new:
        return ""
    if type(known) is type(new) and isinstance(known, _Sequence | _Mapping) and len(known.items) == len(new.items):
        pairs = enumerate(zip(known.items, new.items, strict=True))
        for number, (one, other) in pairs:
            if isinstance(known, _Mapping):
                number, one, other = one[0], one[1], other[1]  # type: ignore[index]
            if text := difference(one, other, f"{at}[{number!r}]"):
                return text
    return f"{at or 'value'}: {_words(known)} → {_words(new)}"


def _words(description: Any) -> str:
    if isinstance(description, TensorForm):
        return str(description)
    if isinstance(description, _Sequence | _Mapping):
        return f"{description.kind.__name__} of {len(description.items)}"
    return repr(description.value)


# -- modes of torch, and switches of its libraries ---------------------------------------------------------------------


def modes(kind: str) -> Hashable:
    """Return all that a graph goes on with as it was at its capture.

    Args:
        kind: of the device that it runs on, "cuda": its autocast counts.
    """
    backends: Any = torch.backends
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.are_deterministic_algorithms_enabled(),
        default_device(),
        tuple([backend.fp32_precision for backend in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]),
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        (
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
    )


def default_device() -> torch.device | None:
    """Return where tensors are made that are given no device, None if nobody has set it."""
    own = [mode for mode in _function_modes() if isinstance(mode, DeviceContext)]
    return own[-1].device if own else None


def is_watched() -> bool:
    """Return whether a mode of torch looks at each function; a default device is one that doesn't."""
    return any(not isinstance(mode, DeviceContext) for mode in _function_modes())


def _function_modes() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(place) for place in range(count)]


def without_cached_casts(kind: str) -> AbstractContextManager[Any]:
    """Return autocast as it is, with no weight taken from its cache or kept there: such a copy is a graph's own."""
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


# -- few sizes for many ------------------------------------------------------------------------------------------------


class Buckets:
    """Pads one dimension to the next of a few sizes.

        padded = x, filled up to min{s in sizes : s ≥ n}

    Args:
        sizes: increasing, at least 1 each.
        dim: which dimension, default 0.

    Raises:
        InvalidArgument: if the sizes are not increasing whole numbers above 0.

    Example:
        >>> buckets = Buckets([4, 8])
        >>> buckets.pad(torch.ones(5, 2)).shape, buckets.mask(5, device="cpu").sum()
        (torch.Size([8, 2]), tensor(5))
    """

    def __init__(self, sizes: Sequence[int], dim: int = 0) -> None:
        if not sizes or any(type(size) is not int or size < 1 for size in sizes) or sorted(set(sizes)) != list(sizes):
            raise InvalidArgument(f"Buckets: sizes must be increasing whole numbers above 0. Found: {list(sizes)}")
        self.sizes, self.dim = tuple(sizes), dim

    def size(self, count: int) -> int:
        """Return the size that a count is padded to.

        Raises:
            InvalidArgument: if the count is beyond the largest.
        """
        place = bisect.bisect_left(self.sizes, count)
        if place == len(self.sizes):
            raise InvalidArgument(f"Buckets: at most {self.sizes[-1]} fit. Found: {count}; give a larger size")
        return self.sizes[place]

    def pad(self, x: Tensor, value: float = 0) -> Tensor:
        """Return the tensor padded at its end; the same one if it has such a size already.

        Args:
            x: any tensor with that dimension.
            value: of the padding, default 0. A target that the loss ignores (`ignore_index`) keeps padding out of it.
        """
        count = x.shape[self.dim]
        missing = self.size(count) - count
        if not missing:
            return x
        shape = list(x.shape)
        shape[self.dim] = missing
        return torch.cat([x, x.new_full(shape, value)], self.dim)

    def mask(self, count: int, device: torch.device | str) -> Tensor:
        """Return bool [size]: True for what is no padding."""
        return torch.arange(self.size(count), device=device) < count

    def cut(self, x: Tensor, count: int) -> Tensor:
        """Return an output without its padding."""
        return x.narrow(self.dim, 0, count)

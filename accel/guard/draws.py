"""Random numbers in a replay: noted, and drawn in one order whatever the memory layout.

`bernoulli_` fills a channels_last tensor in the order of memory, and takes other numbers for
bfloat16 than for float32. In a canonical replay each draw is made in float32 on contiguous memory
and copied over, so that paths that draw alike are alike. The dropout of a fused attention, which
draws within its kernel and by dtype, is left out there, forward and backward; its probability is
noted. What is noted shows whether two paths draw from the same distributions.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Draw = tuple[str, tuple[int, ...], tuple[Any, ...]]
"""Operator, shape and parameters of one draw, such as the probability."""
_ATTENTION = "left out: "
"""What the name of an operator begins with whose draw was left out."""
_DROPOUT = "dropout_p"
"""What all of torch's fused attentions call it, and others after them."""


class ReplayedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note the draws in a block.

    Args:
        canonical: whether to draw in float32 on contiguous memory.
        with_attention: whether a fused attention draws, since it does so in what this is compared with, out of sight.

    Attributes:
        noted: the draws so far, in their order.
        other_order: whether a draw that was canonical would have come out otherwise.
    """

    def __init__(self, canonical: bool, *, with_attention: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._canonical, self._with_attention = canonical, with_attention
        self.noted: list[Draw] = []
        self.other_order = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; one that draws is noted first."""
        kwargs = kwargs or {}
        if self._canonical and not self._with_attention and (dropout := _dropout_of_attention(func)):
            args, kwargs, p = dropout.taken_out(args, kwargs)
            if p and not dropout.is_backward:
                self.noted.append((f"{_ATTENTION}{func}", tuple(args[0].shape), (p,)))
            if p:
                return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        like = args[0] if args and isinstance(args[0], Tensor) else None
        self.noted.append(_draw(func, like, args, kwargs))
        others = any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values()))  # such as the noise of rrelu
        if like is None or others or not self._canonical or _is_plain(like):
            return func(*args, **kwargs)
        self.other_order = True
        return _canonically(func, like, args, kwargs)


class _AttentionDropout(NamedTuple):
    """Where a fused attention has its dropout."""

    place: int
    is_backward: bool

    def taken_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return arguments that drop nothing, and the probability that they had."""
        if self.place < len(args) and args[self.place]:
            return (*args[: self.place], 0.0, *args[self.place + 1 :]), kwargs, args[self.place]
        return args, {**kwargs, _DROPOUT: 0.0} if kwargs.get(_DROPOUT) else kwargs, kwargs.get(_DROPOUT)


@functools.cache
def _dropout_of_attention(func: Any) -> _AttentionDropout | None:
    arguments, returns = func._schema.arguments, func._schema.returns
    names = [argument.name for argument in arguments]
    if _DROPOUT not in names or not any("Tensor" in str(each.type) for each in returns):  # as the choice of a kernel
        return None
    place = names.index(_DROPOUT)
    if str(arguments[place].type) not in ("float", "Optional[float]"):
        return None
    return _AttentionDropout(place, names[0].startswith(("grad", "dout")))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dtype not in (torch.float16, torch.bfloat16)


def _draw(func: Any, like: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    values = [*args, *kwargs.values()]
    parameters = tuple(value for value in values if isinstance(value, int | float | bool))
    if like is None:
        shapes = [tuple(value) for value in args if isinstance(value, list | tuple)]
        return str(func), shapes[0] if shapes else (), parameters
    return str(func), tuple(like.shape), parameters


def _canonically(func: Any, like: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw for contiguous float32 in the place of `like`, and lay the results out as those for `like` would be."""
    wide = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
    in_place = func._schema.arguments[0].alias_info is not None
    given = torch.empty(like.shape, dtype=wide, device=like.device) if in_place else like.to(wide).contiguous()
    drawn = func(given, *args[1:], **kwargs)
    if in_place:
        return like.copy_(drawn)
    results = drawn if isinstance(drawn, tuple | list) else (drawn,)
    laid_out = tuple(_as(like, result) if isinstance(result, Tensor) else result for result in results)
    return laid_out if isinstance(drawn, tuple | list) else laid_out[0]


def _as(like: Tensor, result: Tensor) -> Tensor:
    if result.shape != like.shape:
        return result
    dtype = like.dtype if result.is_floating_point() else result.dtype
    return torch.empty_like(like, dtype=dtype).copy_(result)


def difference(plain: list[Draw], candidate: list[Draw]) -> str:
    """Return how the draws of two paths differ in number, kind or parameters; '' if they don't."""
    for number, (expected, actual) in enumerate(zip(plain, candidate, strict=False), 1):
        if expected != actual:
            return f"random draw {number} is {_text(actual)}, that of the plain path {_text(expected)}"
    if len(plain) != len(candidate):
        return f"it draws random numbers {len(candidate)} times, the plain path {len(plain)}"
    return ""


def leave_out_alike(plain: list[Draw], candidate: list[Draw]) -> bool:
    """Return whether the draws of attention that were left out of two paths have the same probabilities."""
    probabilities = [[parameters for _, _, parameters in _left_out(draws)] for draws in (plain, candidate)]
    return probabilities[0] == probabilities[1]


def by_other_kernels(plain: list[Draw], candidate: list[Draw]) -> bool:
    """Return whether draws that were left out are those of other kernels, which draw other numbers."""
    operators = [[operator for operator, _, _ in _left_out(draws)] for draws in (plain, candidate)]
    return operators[0] != operators[1]


def _left_out(draws: list[Draw]) -> list[Draw]:
    return [draw for draw in draws if draw[0].startswith(_ATTENTION)]


def _text(draw: Draw) -> str:
    operator, shape, parameters = draw
    return f"{operator.removeprefix('aten.')}({', '.join(map(str, parameters))}) of shape {shape}"

"""The order in which a tensor's dimensions lie in memory: on this depends where `.view` in a loop works."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor from the outermost to the innermost; none of one that has no strides.

    A dimension of a single element, or one that is expanded, lies anywhere and is left out.

    Args:
        tensor: of any kind.

    Example:
        >>> import torch
        >>> order(torch.ones(2, 3, 4, 5)), order(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
        ((0, 1, 2, 3), (0, 2, 3, 1))
    """
    if tensor.layout != torch.strided or tensor.is_nested:
        return ()
    strides = tensor.stride()
    lying = [place for place, size in enumerate(tensor.shape) if size > 1 and strides[place]]
    return tuple(sorted(lying, key=lambda place: -strides[place]))


def in_order(tensor: Tensor, places: Sequence[int] | None = None) -> Tensor:
    """Return a tensor with its dimensions in an order in memory; itself, if they are.

    Args:
        tensor: of any kind.
        places: as of `order`. By default, and where they are those of a tensor of another kind, their own order; in it
            matrices are left alone, which are often transposed.

    Example:
        >>> import torch
        >>> images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        >>> in_order(images).is_contiguous(), order(in_order(torch.ones(2, 3), (1, 0)))
        (True, (1, 0))
    """
    own = order(tensor)
    if places is None or sorted(places) != sorted(own):
        places = own if tensor.dim() < 3 else sorted(own)
    if list(own) == list(places):
        return tensor
    if list(places) == sorted(own):
        return tensor.contiguous()
    turned = [*(place for place in range(tensor.dim()) if place not in places), *places]
    back = sorted(range(tensor.dim()), key=turned.__getitem__)
    return tensor.permute(turned).contiguous().permute(back)


def is_kept(plain: Tensor, other: Tensor) -> bool:
    """Return whether what can be viewed in one tensor can be in another one of the same shape.

    Args:
        plain: the tensor that the loop knows.
        other: what it gets in the place of it.
    """
    if plain.layout != torch.strided or other.layout != torch.strided or plain.is_nested or other.is_nested:
        return True
    if plain.is_contiguous():
        return other.is_contiguous()
    places = order(plain)
    return tuple(place for place in order(other) if place in places) == places

"""A few sizes for many: batches padded to the next of them, so that few graphs are captured."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from accel.errors import InvalidArgument


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

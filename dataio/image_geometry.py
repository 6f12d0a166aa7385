"""Which part of an image goes where: random resized crops, centre crops, plain resizing.

A transform turns the size of an image and a few uniform random numbers into a `Placement`: cut `box` out of the source,
resize it to `size`, take the window of the output's size at `offset`, mirror it. It touches no pixel, so two backends
that carry out the same placements give the same crops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from numbers import Real
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from accel.dataio.sampling.permutation import mixed
from accel.profiler.errors import InvalidArgument

Pair = tuple[int, int]

_STEP = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64
_ATTEMPTS = 10  # as torchvision's


class Placement(NamedTuple):
    """What becomes of one image; heights before widths, in pixels."""

    box: tuple[int, int, int, int]
    """Top, left, height and width of the part of the source that is used."""
    size: Pair
    """What the box is resized to."""
    offset: Pair
    """Top and left of the output within the resized box."""
    flip: bool
    """Whether the output is mirrored, left to right."""


class Transform(Protocol):
    """Turn sizes and random numbers into placements."""

    size: Pair
    """Height and width of the output, pixels."""
    draws: int
    """Uniform random numbers that one placement takes."""

    def place(self, height: int, width: int, draws: Sequence[float]) -> Placement:
        """Return the placement of an image of this size.

        Args:
            height: of the source, pixels, at least 1.
            width: the same.
            draws: `self.draws` numbers in [0, 1).
        """


class RandomResizedCrop:
    """Cut out a random part of random shape, resize it, mirror it half the time: torchvision's distribution.

    Area uniform in `scale` × the image's, log of the aspect ratio uniform in that of `ratio`, place uniform; up to ten
    attempts, then the largest centred part with an allowed ratio.

    Args:
        size: of the output, pixels, one number or (height, width).
        scale: least and most share of the area, default (0.08, 1).
        ratio: least and most width ÷ height, default (3/4, 4/3).
        flip: probability of mirroring, default 0.5.

    Raises:
        InvalidArgument: if an argument is out of range.

    Example:
        >>> RandomResizedCrop(224).place(375, 500, [0.5] * 41).size
        (224, 224)

    Source: Szegedy et al., "Going deeper with convolutions", arXiv 1409.4842, section 6.
    """

    draws = 1 + 4 * _ATTEMPTS

    def __init__(
        self,
        size: int | Pair,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
    ) -> None:
        self.size, self.scale, self.ratio, self.flip = _pair(size, "size"), scale, ratio, flip
        if not 0 < scale[0] <= scale[1] <= 1:
            raise InvalidArgument(f"scale must be two shares of the area with 0 < least <= most <= 1, got {scale}")
        if not 0 < ratio[0] <= ratio[1] < math.inf:
            raise InvalidArgument(f"ratio must be two quotients width ÷ height with 0 < least <= most, got {ratio}")
        if not 0 <= flip <= 1:
            raise InvalidArgument(f"flip must be a probability, 0 to 1, got {flip}")
        self._logs = math.log(ratio[0]), math.log(ratio[1])

    def place(self, height: int, width: int, draws: Sequence[float]) -> Placement:
        """Return the placement for 41 uniform draws."""
        return Placement(self._box(height, width, draws), self.size, (0, 0), draws[0] < self.flip)

    def _box(self, height: int, width: int, draws: Sequence[float]) -> tuple[int, int, int, int]:
        (least, most), (low, high) = self.scale, self._logs
        for at in range(1, self.draws, 4):
            area = height * width * (least + (most - least) * draws[at])
            ratio = math.exp(low + (high - low) * draws[at + 1])
            wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                top, left = int(draws[at + 2] * (height - tall + 1)), int(draws[at + 3] * (width - wide + 1))
                return top, left, tall, wide
        return self._centred(height, width)

    def _centred(self, height: int, width: int) -> tuple[int, int, int, int]:
        tall, wide = height, width
        if width / height < self.ratio[0]:
            tall = min(height, max(1, round(width / self.ratio[0])))
        elif width / height > self.ratio[1]:
            wide = min(width, max(1, round(height * self.ratio[1])))
        return (height - tall) // 2, (width - wide) // 2, tall, wide


class ResizeCenterCrop:
    """Resize the shorter side, cut out the centre: torchvision's `Resize` and `CenterCrop`.

    Args:
        size: of the output, pixels, one number or (height, width).
        resize: length of the shorter side before the crop, pixels, at least the larger of `size`; default that ÷ 0.875,
            256 for 224.

    Raises:
        InvalidArgument: if an argument is out of range.

    Example:
        >>> ResizeCenterCrop(224).place(375, 500, [])
        Placement(box=(0, 0, 375, 500), size=(256, 341), offset=(16, 58), flip=False)
    """

    draws = 0

    def __init__(self, size: int | Pair, resize: int | None = None) -> None:
        self.size = _pair(size, "size")
        self.resize = round(max(self.size) / 0.875) if resize is None else resize
        if self.resize < max(self.size):
            raise InvalidArgument(f"resize must be at least the output's {max(self.size)} pixels, got {self.resize}")

    def place(self, height: int, width: int, draws: Sequence[float]) -> Placement:
        """Return the placement; nothing is random."""
        long = int(self.resize * max(height, width) / min(height, width))
        tall, wide = (self.resize, long) if height <= width else (long, self.resize)
        offset = round((tall - self.size[0]) / 2), round((wide - self.size[1]) / 2)
        return Placement((0, 0, height, width), (tall, wide), offset, False)


class Resize:
    """Resize the whole image to one size, whatever its shape.

    Args:
        size: of the output, pixels, one number or (height, width).

    Raises:
        InvalidArgument: if it is less than 1.
    """

    draws = 0

    def __init__(self, size: int | Pair) -> None:
        self.size = _pair(size, "size")

    def place(self, height: int, width: int, draws: Sequence[float]) -> Placement:
        """Return the placement; nothing is random."""
        return Placement((0, 0, height, width), self.size, (0, 0), False)


def _pair(size: int | Pair, name: str) -> Pair:
    pair = tuple(size) if isinstance(size, Iterable) else (size, size)
    if len(pair) != 2 or not all(isinstance(each, Real) for each in pair):
        raise InvalidArgument(f"{name} must be one number of pixels or (height, width), got {size!r}")
    if min(pair) < 1:
        raise InvalidArgument(f"{name} must be at least 1 pixel, got {size}")
    return int(pair[0]), int(pair[1])


def uniforms(seed: int, epoch: int, indices: Sequence[int], count: int) -> NDArray[np.float64]:
    """Return random numbers that depend on nothing but the arguments, in particular not on the order of `indices`.

    Args:
        seed: any whole number.
        epoch: any whole number.
        indices: samples, each 0 or more.
        count: numbers for each, at most 64.

    Returns:
        (samples, count) in [0, 1): number k of sample i is output 64·i + k of the SplitMix64 stream that (seed, epoch)
        begins.
    """
    assert count <= 64
    begin = blake2b(repr((seed, epoch)).encode(), digest_size=8).digest()
    at = np.asarray(indices, np.uint64)[:, None] * np.uint64(64) + np.arange(count, dtype=np.uint64)
    word = mixed(np.frombuffer(begin, "<u8") + at * _STEP)
    return np.asarray((word >> np.uint64(11)).astype(np.float64) * 2.0**-53)

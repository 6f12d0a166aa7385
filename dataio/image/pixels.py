"""From the bytes of an image file to the pixels that a placement needs, as (height, width, 3) uint8 RGB.

JPEG goes to libjpeg-turbo through simplejpeg. Measured on 500 x 375 photographs, quality 80 to 92: simplejpeg 0.44
CPU-ms, OpenCV 0.46, Pillow 0.55, the same bits from all three. Everything else goes to Pillow: other formats, CMYK,
and every JPEG of which libjpeg-turbo has something to say; so what Pillow reads is read, what it refuses is refused.

DCT scaling: libjpeg can leave out the high frequencies of a block and give 4, 2 or 1 instead of 8 pixels a side. With
1/2, 1/4 and 1/8 that is faster than the full size; with the factors between (5/8: 0.58 CPU-ms) it is slower.

Resizing is antialiased, as Pillow does it.

torch's uint8 kernel for channels-last images is Pillow-SIMD's: on 500 x 375 to 224 x 224 it takes 0.11 to 0.22 CPU-ms,
OpenCV's bilinear without antialiasing 0.14, its area filter 0.65, Pillow 0.84. Results differ from Pillow's by at most
1, in a few values of 1,000, or in a quarter of them where torch takes the other axis first. Bicubic overshoots; what
is clipped between the axes can differ by more at hard edges.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel.dataio.image.libraries import pillow, simplejpeg
from accel.dataio.image_geometry import Pair, Placement
from accel.profiler.errors import InvalidArgument
from accel.profiler.interruptions import ours

Pixels = NDArray[np.uint8]
Interpolation = Literal["bilinear", "bicubic"]

_JPEG = b"\xff\xd8\xff"
_ORIENTATION = 0x0112  # the EXIF tag
_FACTORS = (8, 4, 2)
# Fresh pages for each image cost 40 CPU-µs: the kernel clears them.
_kept = threading.local()
_MOST_KEPT = 16 << 20  # bytes a thread keeps for each use after a large image


class Decoded(NamedTuple):
    """Pixels, and how they lie in the image."""

    pixels: Pixels
    """The placement's box, (height, width, 3)."""
    place: Placement
    """With the box within the whole image."""


def decode(
    data: bytes, place: Callable[[int, int], Placement], *, exif: bool = False, reducing_gap: float | None = 2.0
) -> Decoded:
    """Decode the part of an image that a placement uses.

    Args:
        data: the whole file.
        place: takes height and width of the image, returns the placement.
        exif: turn the image as its EXIF orientation says.
        reducing_gap: decode a JPEG at 1/2, 1/4 or 1/8 as long as the box still has this many times the pixels a side
            that it is resized to, at least 1; None: never. The box's edges are then rounded to the coarser grid, by at
            most 1/(2 · reducing_gap) pixels of the output.

    Raises:
        InvalidArgument: if it is no image that Pillow reads.
    """
    decoded = _decode_jpeg(data, place, exif, reducing_gap) if data[:3] == _JPEG else None
    if decoded is not None:
        return decoded
    pixels, turn = _with_pillow(data, exif)
    pixels = _turned(pixels, turn)
    placement = place(*pixels.shape[:2])
    top, left, height, width = placement.box
    return Decoded(pixels[top : top + height, left : left + width], placement)


def size_of(data: bytes, *, exif: bool = False) -> tuple[int, int]:
    """Return height and width of an image, read from its header.

    Args:
        data: the whole file.
        exif: after turning it as its EXIF orientation says.

    Raises:
        InvalidArgument: if it is no image that Pillow knows.
    """
    if data[:3] == _JPEG:
        try:
            height, width, _, _ = simplejpeg().decode_jpeg_header(data)
            return (width, height) if exif and _orientation(data) >= 5 else (height, width)
        except ValueError:
            pass  # Pillow says whether it can be read all the same
    with _opened(data) as image:
        turn = _turn(image) if exif else 1
        return (image.width, image.height) if turn >= 5 else (image.height, image.width)


def _decode_jpeg(data: bytes, place: Callable[[int, int], Placement], exif: bool, gap: float | None) -> Decoded | None:
    """Return None where Pillow is to have a look: CMYK, warnings, errors."""
    library = simplejpeg()
    try:
        height, width, space, _ = library.decode_jpeg_header(data)
        if space in ("CMYK", "YCCK"):
            return None
        turn = _orientation(data) if exif else 1
        tall, wide = (width, height) if turn >= 5 else (height, width)
        placement = place(tall, wide)
        factor = _factor(placement, gap)
        low = {"min_height": -(-height // factor), "min_width": -(-width // factor)} if factor > 1 else {}
        pixels = _turned(library.decode_jpeg(data, **low), turn)
    except ValueError:
        return None
    top, left, height, width = _scaled(placement.box, (tall, wide), pixels.shape[:2])
    return Decoded(pixels[top : top + height, left : left + width], placement)


def _factor(placement: Placement, gap: float | None) -> int:
    """Return the largest of 8, 4 and 2 that leaves `gap` times the pixels that are needed, else 1."""
    if gap is None:
        return 1
    (_, _, height, width), (tall, wide) = placement.box, placement.size
    room = min(height / tall, width / wide) / gap
    return next((factor for factor in _FACTORS if room >= factor), 1)


def _scaled(box: tuple[int, int, int, int], full: tuple[int, int], got: Any) -> tuple[int, int, int, int]:
    """Return the box in an image of `got` instead of `full` pixels, its edges rounded."""
    if full == got:
        return box
    edges = []
    for axis in (0, 1):
        scale = got[axis] / full[axis]
        begin, end = round(box[axis] * scale), round((box[axis] + box[axis + 2]) * scale)
        begin = min(begin, got[axis] - 1)
        edges.append((begin, max(end - begin, 1)))
    (top, height), (left, width) = edges
    return top, left, height, width


def _with_pillow(data: bytes, exif: bool) -> tuple[Pixels, int]:
    """Return what `Image.open(…).convert("RGB")` does, torchvision's way to read, and the EXIF orientation."""
    with _opened(data) as image:
        return np.array(image.convert("RGB")), _turn(image) if exif else 1


def _orientation(data: bytes) -> int:
    """Return the EXIF orientation of a JPEG, 1 to 8; 1 if there is none."""
    # EXIF stands in one of the first segments, which end before the first scan; without it Pillow need not look.
    if data.find(b"Exif\0\0", 0, 1 << 17) < 0:
        return 1
    with _opened(data) as image:
        return _turn(image)


def _turn(image: Any) -> int:
    turn = image.getexif().get(_ORIENTATION, 1)
    return int(turn) if turn in range(1, 9) else 1


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    library = pillow()
    try:
        with library.open(io.BytesIO(data)) as image:
            yield image
    except ours() as error:  # of a broken file Pillow says so in a dozen ways: struct.error, EOFError, SyntaxError …
        raise InvalidArgument(f"{type(error).__name__}: {error}") from error


def _turned(pixels: Pixels, turn: int) -> Pixels:
    """Return a view of the pixels as EXIF orientation `turn` says."""
    if turn >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if turn in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if turn in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


class Resizer:
    """Carry out placements.

    Args:
        interpolation: "bilinear", a triangle of twice the source pixels that go into one output pixel, or "bicubic",
            Keys' kernel with a = -0.5 over four times as many; both as Pillow's.

    Raises:
        InvalidArgument: if it is neither.
    """

    def __init__(self, interpolation: Interpolation = "bilinear") -> None:
        if interpolation not in get_args(Interpolation):
            raise InvalidArgument(f"interpolation must be one of {get_args(Interpolation)}, got {interpolation!r}")
        self.interpolation = interpolation

    def into(self, slot: Tensor, pixels: Pixels, placement: Placement) -> None:
        """Write one image.

        Args:
            slot: (height, width, 3) uint8, contiguous: an image of the batch.
            pixels: (height, width, 3) uint8, the placement's box.
            placement: what to do with it.
        """
        size, whole = placement.size, (slot.shape[0], slot.shape[1])
        if size == whole and not placement.flip:
            self._resize(pixels, size, slot)
            return
        resized = _scratch("resized", *size)
        self._resize(pixels, size, torch.from_numpy(resized))
        top, left = placement.offset
        window = resized[top : top + whole[0], left : left + whole[1]]
        _copy(slot.numpy(), window, placement.flip)

    def _resize(self, pixels: Pixels, size: Pair, out: Tensor) -> None:
        if pixels.shape[:2] == size:
            _copy(out.numpy(), pixels, False)
            return
        if not pixels.flags.c_contiguous:
            # torch would copy it too, but with threads of its own: 2 cores busy for the work of one.
            contiguous = _scratch("box", *pixels.shape[:2])
            np.copyto(contiguous, pixels)
            pixels = contiguous
        image = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
        operator: Any = getattr(torch.ops.aten, f"_upsample_{self.interpolation}2d_aa").out
        # Straight into the batch: 60 µs less than an output of its own that is then copied.
        operator(image, size, False, None, None, out=out.permute(2, 0, 1).unsqueeze(0))


def _scratch(use: str, height: int, width: int) -> Pixels:
    """Return memory of this thread, uninitialised, (height, width, 3); valid until the next call for the same use."""
    size = height * width * 3
    kept = getattr(_kept, use, None)
    if kept is None or not size <= len(kept) <= max(_MOST_KEPT, size):
        kept = np.empty(size, np.uint8)
        setattr(_kept, use, kept)
    return kept[:size].reshape(height, width, 3)


def _copy(to: Pixels, of: Pixels, flip: bool) -> None:
    # numpy, not torch: a copy of this size would start torch's threads, a team of them under each of ours.
    if flip:
        # A pixel as one element of three bytes: 69 µs, 155 with the bytes one by one.
        of = np.ascontiguousarray(of) if of.strides[2] != 1 or of.strides[1] != 3 else of
        np.copyto(to.view("V3")[..., 0], of.view("V3")[:, ::-1, 0])
    else:
        np.copyto(to, of)

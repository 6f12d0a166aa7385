"""Decoding: Pillow's pixels, whatever the format; what Pillow refuses is refused."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.dataio.image import pixels as image_decode
from accel.dataio.image.pixels import decode, size_of
from accel.dataio.image_geometry import Placement, RandomResizedCrop, Resize
from tests import warm
from tests.dataio.pictures import Image, encoded, jpeg, scene, turned
from tests.sampling import examples

simplejpeg = pytest.importorskip("simplejpeg", reason="needs simplejpeg, which the extra `images` brings")


def whole(height: int, width: int) -> Placement:
    return Placement((0, 0, height, width), (height, width), (0, 0), False)


def pillows(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


@pytest.fixture
def without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a JPEG is handed on."""

    def refuse() -> Any:
        raise AssertionError("Pillow was asked")

    monkeypatch.setattr(image_decode, "pillow", refuse)


# One pixel, odd sizes that end within a block, chroma at full, half and quarter resolution, progressive.
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (37, 53), (240, 320)])
@pytest.mark.parametrize("options", [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True}])
def test_jpeg_is_bit_for_bit_pillows(size: tuple[int, int], options: dict[str, Any], without_pillow: None) -> None:
    data = jpeg(*size, **options)
    assert np.array_equal(decode(data, whole).pixels, pillows(data))


FORMATS = {
    "CMYK JPEG": lambda: encoded(scene(33, 47).convert("CMYK")),
    "PNG": lambda: encoded(scene(33, 47), "PNG"),
    "grey PNG": lambda: encoded(scene(33, 47).convert("L"), "PNG"),
    "PNG with transparency": lambda: encoded(scene(33, 47).convert("RGBA"), "PNG"),
    "PNG with a palette": lambda: encoded(scene(33, 47).convert("P"), "PNG"),
    "one-bit PNG": lambda: encoded(scene(33, 47).convert("1"), "PNG"),
    "16-bit PNG": lambda: encoded(Image.fromarray(np.arange(1551, dtype=np.uint16).reshape(33, 47) * 40), "PNG"),
    "one pixel": lambda: encoded(scene(1, 1), "PNG"),
    "WebP": lambda: encoded(scene(33, 47), "WEBP"),
    "BMP": lambda: encoded(scene(33, 47), "BMP"),
    "TIFF": lambda: encoded(scene(33, 47), "TIFF"),
    "GIF": lambda: encoded(scene(33, 47), "GIF"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_what_libjpeg_does_not_read_is_read_as_pillow_reads_it(kind: str) -> None:
    data = FORMATS[kind]()
    assert np.array_equal(decode(data, whole).pixels, pillows(data))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_exif_orientation(orientation: int, kind: str) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(scene(33, 47), kind, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        upright = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert np.array_equal(decode(data, whole, exif=True).pixels, upright)
    assert size_of(data, exif=True) == upright.shape[:2]
    assert size_of(data) == (33, 47)
    assert np.array_equal(decode(data, whole).pixels, pillows(data)), "torchvision's ImageFolder does not turn images"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_box_is_cut_from_the_turned_image_at_lower_resolution_too(orientation: int) -> None:
    from PIL import ImageOps

    data = turned(scene(160, 480), orientation)
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
    width, height = upright.size
    box = (0, 0, height // 2, width // 2)
    found = decode(data, lambda h, w: Placement(box, (20, 20), (0, 0), False), exif=True, reducing_gap=1)
    assert found.pixels.shape[0] in (box[2] // 2, box[2] // 4)
    small = upright.crop((0, 0, box[3], box[2])).resize(found.pixels.shape[1::-1], Image.Resampling.BOX)
    assert np.abs(np.asarray(small).astype(int) - found.pixels.astype(int)).mean() < 4


# Which factor: the box must keep `gap` times the pixels needed on both axes.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("size", "target", "gap", "factor"),
    [
        ((375, 500), 224, 1, 1),
        ((448, 600), 224, 1, 2),
        ((447, 600), 224, 1, 1),
        ((600, 600), 100, 2, 2),
        ((600, 600), 100, 1.5, 4),
        ((600, 600), 100, 1, 4),
        ((1600, 1600), 100, 2, 8),
        ((1600, 1600), 10, 1, 8),
        ((1600, 1600), 100, None, 1),
        ((1601, 1603), 100, 2, 8),
    ],
)
def test_dct_scaling(
    size: tuple[int, int], target: int, gap: float | None, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = jpeg(*size)
    decoded = []
    real = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *a, **k: decoded.append(real(*a, **k)) or decoded[-1])
    found = decode(data, lambda h, w: Resize(target).place(h, w, []), reducing_gap=gap)
    assert decoded[0].shape[:2] == tuple(-(-side // factor) for side in size)
    assert found.pixels.shape == decoded[0].shape


@given(
    st.integers(1, 700),
    st.integers(1, 700),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=41, max_size=41),
    st.sampled_from([8, 31, 64]),
    st.sampled_from([None, 1.0, 2.0]),
)
@settings(max_examples=examples(60))
def test_box_of_any_crop_lies_where_it_should(
    height: int, width: int, draws: list[float], size: int, gap: float | None
) -> None:
    """Brightness grows to the right in red and downward in green, so that pixels tell where they come from."""
    ramp = np.zeros((height, width, 3), np.uint8)
    ramp[..., 0] = np.linspace(0, 255, width)[None, :]
    ramp[..., 1] = np.linspace(0, 255, height)[:, None]
    data = encoded(Image.fromarray(ramp), quality=95, subsampling=0)
    found = decode(data, lambda h, w: RandomResizedCrop(size).place(h, w, draws), reducing_gap=gap)
    top, left, tall, wide = found.place.box
    expected = ramp[top : top + tall, left : left + wide].reshape(-1, 3).mean(0)[:2]
    # Half a pixel of the coarser grid at either edge, and what quality 95 loses.
    edge = [255 * 8 / side / 2 if gap and side > 8 * size * gap else 255 * 4 / side / 2 for side in (width, height)]
    loss = 6 + np.array(edge if gap else [0, 0])
    assert (np.abs(found.pixels.reshape(-1, 3).mean(0)[:2] - expected) <= loss).all()


@pytest.mark.parametrize(("gap", "bound"), [(1.0, 3.0), (2.0, 1.0), (None, 0.01)])
def test_error_of_dct_scaling_is_bounded(gap: float | None, bound: float) -> None:
    """Mean absolute difference, of 255, from Pillow at full resolution."""
    import torch

    from accel.dataio.image.pixels import Resizer

    data = jpeg(1200, 1600)
    found = decode(data, lambda h, w: Resize(224).place(h, w, []), reducing_gap=gap)
    slot = torch.empty(224, 224, 3, dtype=torch.uint8)
    Resizer().into(slot, found.pixels, found.place)
    theirs = Image.fromarray(pillows(data)).resize((224, 224), Image.Resampling.BILINEAR)
    assert np.abs(slot.numpy().astype(int) - np.asarray(theirs).astype(int)).mean() <= bound


# Broken files


def test_a_file_that_pillow_reads_in_spite_of_a_warning_is_read() -> None:
    """ImageNet has some: libjpeg counts bytes it does not know before a marker."""
    data = jpeg(40, 40)
    at = data.index(b"\xff\xda")
    odd = data[:at] + b"\x00\x11\x22" + data[at:]
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(odd)
    assert np.array_equal(decode(odd, whole).pixels, pillows(odd))


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 10, 100, 0.3, 0.9])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_truncated_file_is_refused(keep: float, kind: str) -> None:
    data = encoded(scene(64, 64), kind)
    with pytest.raises(ValueError, match=r"Error"):
        decode(data[: int(keep if keep >= 1 or keep == 0 else keep * len(data))], whole)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xd8\xff", b"no image", b"\x89PNG\r\n\x1a\n", b"II*\0" + b"\xff" * 60],
    ids=["empty", "JPEG's first bytes", "text", "PNG's first bytes", "TIFF's first bytes"],
)
@pytest.mark.parametrize("exif", [False, True])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_what_is_no_image_is_refused(data: bytes, exif: bool) -> None:
    with pytest.raises(ValueError, match=r"Error"):
        decode(data, whole, exif=exif)
    with pytest.raises(ValueError, match=r"Error"):
        size_of(data, exif=exif)


@given(st.data(), st.sampled_from(["JPEG", "PNG", "WEBP"]), st.booleans())
@settings(max_examples=examples(150))
@pytest.mark.filterwarnings("ignore")
def test_damaged_file_gives_an_image_or_a_value_error(data: st.DataObject, kind: str, exif: bool) -> None:
    damaged = bytearray(DAMAGED[kind])
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(damaged), lambda h, w: RandomResizedCrop(8).place(h, w, [0.5] * 41), exif=exif)
    except ValueError:
        return
    assert found.pixels.shape[:2] == found.place.box[2:]
    assert found.pixels.size > 0


DAMAGED = {
    "JPEG": turned(scene(20, 30), 6),
    "PNG": encoded(scene(20, 30), "PNG"),
    "WEBP": encoded(scene(20, 30), "WEBP"),
}


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from accel.dataio.image import libraries as image_libraries

    image_libraries.simplejpeg.cache_clear()
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(ImportError, match=r"simplejpeg, which cannot .*pip install 'accel-train\[images\]'"):
        decode(jpeg(8, 8), whole)
    image_libraries.simplejpeg.cache_clear()


def test_import_asks_for_no_library(tmp_path: Path) -> None:
    (tmp_path / "imports.py").write_text(
        "import sys, accel.dataio.images, accel.dataio.image_normalize\n"
        "print(sorted({'simplejpeg', 'PIL', 'cv2', 'nvidia'} & set(sys.modules)))\n"
    )
    assert warm.run(["imports.py"], cwd=tmp_path).stdout == "[]\n"


def test_a_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 60000, 60000, 8, 2, 0, 0, 0)
    with pytest.raises(ValueError, match=r"Error"):
        decode(header + b"\0" * 20, whole)

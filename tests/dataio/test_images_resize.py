"""Resizing: Pillow's result within 1, whatever the sizes, cut, mirrored or turned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from accel.dataio.image.pixels import Resizer
from accel.dataio.image_geometry import Placement
from accel.dataio.image_normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize

Image = pytest.importorskip("PIL.Image", reason="needs Pillow, which the extra `images` brings")
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def resized(pixels: np.ndarray, place: Placement, out: tuple[int, int], interpolation: str = "bilinear") -> np.ndarray:
    batch = torch.full((3, *out, 3), 77, dtype=torch.uint8)
    Resizer(interpolation).into(batch[1], pixels, place)  # type: ignore[arg-type]
    assert (batch[0] == 77).all(), "wrote beside its place"
    assert (batch[2] == 77).all(), "wrote beside its place"
    return batch[1].numpy()


def whole(size: tuple[int, int], flip: bool = False) -> Placement:
    return Placement((0, 0, 0, 0), size, (0, 0), flip)


def check(ours: np.ndarray, theirs: np.ndarray, most: int = 1) -> None:
    """Each rounds to whole numbers twice, after either axis, and not always the same axis first."""
    difference = np.abs(ours.astype(int) - theirs.astype(int))
    assert difference.max(initial=0) <= most


# Down by a third, to one pixel, up, one axis up and one down, from one pixel, odd to odd, the same size.
@pytest.mark.parametrize("source", [(375, 500), (1, 1), (3, 800), (227, 113)])
@pytest.mark.parametrize("size", [(224, 224), (1, 1), (31, 57), (400, 5), (227, 113)])
@pytest.mark.parametrize("interpolation", list(FILTERS))
def test_result_is_pillows(source: tuple[int, int], size: tuple[int, int], interpolation: str) -> None:
    # Bicubic overshoots by up to 1/4 of a step, once for each axis; what is clipped in between is lost, and which of
    # the values that hits depends on the axis that comes first. From 80 to 175 nothing is clipped.
    pixels = picture(*source) if interpolation == "bilinear" else 80 + picture(*source) % 96
    theirs = Image.fromarray(pixels).resize(size[::-1], FILTERS[interpolation])
    check(
        resized(pixels, whole(size), size, interpolation), np.asarray(theirs), 1 if interpolation == "bilinear" else 2
    )


@pytest.mark.parametrize("interpolation", list(FILTERS))
def test_mean_difference_from_pillow_at_the_usual_sizes(interpolation: str) -> None:
    """Noise is the worst case; of 255."""
    pixels = picture(375, 500)
    theirs = np.asarray(Image.fromarray(pixels).resize((224, 224), FILTERS[interpolation]))
    ours = resized(pixels, whole((224, 224)), (224, 224), interpolation)
    assert np.abs(ours.astype(int) - theirs.astype(int)).mean() <= 0.01


@example(25, 25, 20, 20, False, 20)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 30), st.integers(1, 30), st.booleans(), st.integers(0, 999)
)
def test_any_size_mirrored_or_not(height: int, width: int, tall: int, wide: int, flip: bool, seed: int) -> None:
    pixels = picture(height, width, seed)
    theirs = np.asarray(Image.fromarray(pixels).resize((wide, tall), Image.Resampling.BILINEAR))
    # Two roundings: either is within 1 of the exact value, so that they are at most 2 apart.
    check(resized(pixels, whole((tall, wide), flip), (tall, wide)), theirs[:, ::-1] if flip else theirs, 2)


@pytest.mark.parametrize("flip", [False, True])
def test_window_is_cut_after_resizing(flip: bool) -> None:
    pixels = picture(75, 100)
    theirs = np.asarray(Image.fromarray(pixels).resize((51, 40), Image.Resampling.BILINEAR))[3:38, 11:46]
    place = Placement((0, 0, 75, 100), (40, 51), (3, 11), flip)
    check(resized(pixels, place, (35, 35)), theirs[:, ::-1] if flip else theirs)


@pytest.mark.parametrize(
    "view",
    [
        lambda p: p[10:60, 20:71],
        lambda p: p[:, ::-1],
        lambda p: p[::-1],
        lambda p: p.transpose(1, 0, 2),
        lambda p: p.transpose(1, 0, 2)[::-1, ::-1][5:, :9],
    ],
    ids=["cut", "mirrored", "upside down", "turned", "turned and cut"],
)
@pytest.mark.parametrize("same_size", [False, True])
def test_pixels_may_be_any_view(view: object, same_size: bool) -> None:
    pixels = view(picture(80, 90))  # type: ignore[operator]
    size = pixels.shape[:2] if same_size else (16, 16)
    theirs = Image.fromarray(np.ascontiguousarray(pixels)).resize(size[::-1], Image.Resampling.BILINEAR)
    check(resized(pixels, whole(size), size), np.asarray(theirs))


def test_scratch_of_one_image_does_not_show_in_the_next() -> None:
    resizer = Resizer()
    big, small = picture(300, 300, 1), picture(30, 30, 2)
    alone = torch.empty(8, 8, 3, dtype=torch.uint8)
    after = torch.empty(8, 8, 3, dtype=torch.uint8)
    place = Placement((0, 0, 0, 0), (9, 9), (1, 0), True)
    resizer.into(alone, small[:, 3:], place)
    resizer.into(torch.empty(8, 8, 3, dtype=torch.uint8), big[:, 3:], Placement((0, 0, 0, 0), (90, 90), (1, 0), True))
    resizer.into(after, small[:, 3:], place)
    assert torch.equal(alone, after)


def test_unknown_filter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"interpolation must be one of \('bilinear', 'bicubic'\), got 'lanczos'"):
        Resizer("lanczos")  # type: ignore[arg-type]


# Normalising: the formula to one rounding, in any layout and type, and no constant that a cast of the model moves


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def exact(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (images.double() / 255 - mean) / std


def pixels(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 3, 17, 9), (1, 3, 1, 1), (0, 3, 4, 4), (3, 5, 7)])
def test_result_is_the_formula_rounded_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    images = pixels(*shape)
    result = Normalize(dtype=dtype)(images)
    assert result.dtype == dtype
    # x·scale and shift in float32, each at most 4.5 large here, then one rounding to the result's type.
    bound = 4.5 * 2 * torch.finfo(torch.float32).eps + exact(images).abs() * torch.finfo(dtype).eps / 2
    assert ((result.double() - exact(images)).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_is_kept_or_as_asked(dtype: torch.dtype) -> None:
    last = pixels(2, 3, 8, 6).contiguous(memory_format=torch.channels_last)
    assert Normalize(dtype=dtype)(last).is_contiguous(memory_format=torch.channels_last)
    assert Normalize(dtype=dtype)(last.contiguous()).is_contiguous()
    planes = Normalize(dtype=dtype, memory_format=torch.contiguous_format)(last)
    assert planes.is_contiguous()
    assert torch.equal(planes, Normalize(dtype=dtype)(last))


def test_a_model_cast_to_half_keeps_the_constants() -> None:
    model = torch.nn.Sequential(Normalize(), torch.nn.Conv2d(3, 2, 1)).bfloat16()
    images = pixels(1, 3, 8, 8)
    assert torch.equal(model[0](images), Normalize()(images))
    assert not [name for name in model.state_dict() if name.startswith("0.")]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_gpu_gives_the_same(dtype: torch.dtype) -> None:
    images = pixels(8, 3, 33, 21).contiguous(memory_format=torch.channels_last)
    result = Normalize(dtype=dtype)(images.cuda())
    assert result.is_contiguous(memory_format=torch.channels_last)
    bound = 4.5 * 2 * torch.finfo(torch.float32).eps + exact(images).abs() * torch.finfo(dtype).eps / 2
    assert ((result.cpu().double() - exact(images)).abs() <= bound).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normalize((0.5, 0.5), (0.5,)), "mean and std must be as many"),
        (lambda: Normalize((0.5,), (0.0,)), "std more than 0"),
        (lambda: Normalize(dtype=torch.uint8), "dtype must be a floating-point one, got torch.uint8"),
        (lambda: Normalize()(torch.zeros(1, 3, 2, 2)), "images must be uint8, 0 to 255, got torch.float32"),
        (lambda: Normalize()(pixels(2, 4, 4, 3)), r"must be \(B, 3, H, W\) or without B, got \(2, 4, 4, 3\)"),
    ],
)
def test_wrong_argument_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]

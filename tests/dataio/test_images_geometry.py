"""Placements: in bounds for any size, torchvision's by value or by distribution, the same whoever asks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.dataio.image_geometry import RandomResizedCrop, Resize, ResizeCenterCrop, uniforms
from tests.kernels.hosts import need

SIZES = st.integers(1, 6000)
UNIT = st.floats(0, 1, exclude_max=True)


@given(SIZES, SIZES, st.lists(UNIT, min_size=41, max_size=41), st.sampled_from([(0.08, 1.0), (1.0, 1.0), (1e-4, 0.01)]))
def test_random_crop_lies_within_the_image(height: int, width: int, draws: list[float], scale: tuple) -> None:
    place = RandomResizedCrop(224, scale=scale).place(height, width, draws)
    top, left, tall, wide = place.box
    assert top >= 0
    assert left >= 0
    assert tall >= 1
    assert wide >= 1
    assert top + tall <= height
    assert left + wide <= width
    assert place.size == (224, 224)
    assert place.flip == (draws[0] < 0.5)


@given(st.integers(1, 600), st.integers(1, 600), st.integers(1, 64), st.integers(0, 9))
def test_centre_crop_is_inside_what_is_resized(height: int, width: int, size: int, more: int) -> None:
    place = ResizeCenterCrop((size, size), resize=size + more).place(height, width, [])
    assert place.box == (0, 0, height, width)
    assert min(place.size) == size + more
    for axis in (0, 1):
        assert 0 <= place.offset[axis] <= place.size[axis] - size


# Landscape, portrait, square, odd, one pixel, narrow.
@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (64, 64), (333, 127), (1, 1), (7, 300)])
@pytest.mark.parametrize(("size", "resize"), [(224, 256), (224, 224), (15, 18), (16, 19)])
def test_centre_crop_is_torchvisions(shape: tuple[int, int], size: int, resize: int) -> None:
    need("torchvision")
    from torchvision.transforms import functional as tv

    marked = torch.zeros(1, *shape, dtype=torch.uint8)
    resized = tv.resize(marked, resize)
    place = ResizeCenterCrop(size, resize).place(*shape, [])
    assert place.size == tuple(resized.shape[1:])
    # A coordinate in each pixel shows which window torchvision takes.
    rows = torch.arange(resized.shape[1])[:, None].expand(resized.shape[1:])
    columns = torch.arange(resized.shape[2])[None, :].expand(resized.shape[1:])
    window = tv.center_crop(torch.stack([rows, columns]), [size, size])
    assert place.offset == tuple(window[:, 0, 0].tolist())


def quantiles(values: list[float]) -> np.ndarray:
    return np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])


# 375 x 500 as most photographs; 40 x 400 needs the attempts, 10 x 400 the way out after ten of them.
@pytest.mark.parametrize(
    "shape", [*(pytest.param(shape, marks=pytest.mark.slow) for shape in ((375, 500), (10, 400))), (40, 400)]
)
def test_random_crop_has_torchvisions_distribution(shape: tuple[int, int]) -> None:
    need("torchvision")
    from torchvision.transforms import RandomResizedCrop as Theirs

    torch.manual_seed(0)
    image = torch.empty(1, *shape)
    theirs = [Theirs.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(1000)]
    ours = [RandomResizedCrop(8).place(*shape, row).box for row in uniforms(0, 0, range(1000), 41).tolist()]
    for field in range(4):
        high = max(shape)
        difference = quantiles([box[field] for box in ours]) - quantiles([box[field] for box in theirs])
        # Standard error of a quantile of 1,000 draws spread over `high` pixels: < high / √1000; 2 of them.
        assert np.abs(difference).max() <= 2 * high / math.sqrt(1000)
    areas = [[tall * wide / shape[0] / shape[1] for _, _, tall, wide in boxes] for boxes in (ours, theirs)]
    assert np.mean(areas[0]) == pytest.approx(np.mean(areas[1]), abs=2 * 0.3 / math.sqrt(500))


def test_crop_of_a_narrow_image_has_the_nearest_allowed_ratio() -> None:
    # Ratio 40 is out of reach, whatever is drawn.
    place = RandomResizedCrop(8, scale=(1.0, 1.0)).place(10, 400, [0.5] * 41)
    assert place.box == (0, 193, 10, 13)


def test_half_of_the_images_are_flipped_and_none_or_all_if_asked() -> None:
    draws = uniforms(3, 1, range(4000), 41).tolist()
    share = {
        flip: np.mean([RandomResizedCrop(8, flip=flip).place(9, 9, row).flip for row in draws]) for flip in (0, 0.5, 1)
    }
    assert share[0] == 0
    assert share[1] == 1
    assert share[0.5] == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(4000))


def test_draws_depend_on_seed_epoch_and_sample_only() -> None:
    whole = uniforms(7, 2, range(100), 41)
    assert np.array_equal(uniforms(7, 2, [42, 3], 41), whole[[42, 3]])
    assert np.array_equal(uniforms(7, 2, range(100), 5), whole[:, :5])
    for other in (uniforms(8, 2, range(100), 41), uniforms(7, 3, range(100), 41), uniforms(2, 7, range(100), 41)):
        assert not (other == whole).any()


def test_draws_never_change() -> None:
    """A training that is resumed after an update must see the same crops."""
    assert uniforms(1, 2, [3], 2).tolist() == [[pytest.approx(value, abs=0) for value in PINNED]]


PINNED = [0.6311744419663204, 0.8037364052642524]


def test_draws_are_uniform_and_independent() -> None:
    drawn = uniforms(0, 0, range(5000), 41)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, bins=64, range=(0, 1))[0]
    expected = drawn.size / 64
    # χ² with 63 degrees of freedom is above 117 once in 100,000 times.
    assert ((counts - expected) ** 2 / expected).sum() < 117
    along, across = drawn[:, :-1] * drawn[:, 1:], drawn[:-1] * drawn[1:]
    for products in (along, across):
        # E[uv] = 1/4 and Var = 7/144 for independent numbers.
        assert products.mean() == pytest.approx(0.25, abs=5 * math.sqrt(7 / 144 / products.size) * 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomResizedCrop(0), "size must be at least 1 pixel, got 0"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.1)), "scale must be .* got"),
        (lambda: RandomResizedCrop(8, scale=(0, 1)), "scale must be .* got"),
        (lambda: RandomResizedCrop(8, ratio=(2, 1)), "ratio must be .* got"),
        (lambda: RandomResizedCrop(8, flip=1.5), "flip must be a probability, 0 to 1, got 1.5"),
        (lambda: ResizeCenterCrop(224, 223), "resize must be at least the output's 224 pixels, got 223"),
        (lambda: Resize((3, -1)), r"size must be at least 1 pixel, got \(3, -1\)"),
    ],
)
def test_argument_out_of_range_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]

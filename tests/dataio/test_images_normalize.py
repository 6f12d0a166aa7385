"""Normalising: the formula to one rounding, in any layout and type, and no constant that a cast of the model moves."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from accel.dataio.image_normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize

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


def test_copies_and_pickles() -> None:
    normalize = Normalize((0.5,), (0.25,), dtype=torch.float16)
    images = pixels(2, 1, 4, 4)
    before = normalize(images)
    for other in (copy.deepcopy(normalize), pickle.loads(pickle.dumps(normalize))):
        assert torch.equal(other(images), before)
    assert "std=(0.25,)" in repr(normalize)


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

"""Regions of a shifted map, masks read back as regions, and the index of the bias table."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.kernels.window_attention import attention, shifted_window_attention
from accel.kernels.window_attention.regions import merge, partition, regions_of_mask, relative_index, shift_regions

CPU = torch.device("cpu")


def mask_of(size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]) -> torch.Tensor:
    """Number the bands of the shifted map one by one, as the published code does."""
    image = torch.zeros(1, *size, 1)
    bands = [
        [slice(0, -w), slice(-w, -s), slice(-s, None)] if s else [slice(None)]
        for w, s in zip(window, shift, strict=True)
    ]
    for number, (rows, columns) in enumerate((r, c) for r in bands[0] for c in bands[1]):
        image[:, rows, columns] = number
    cut = partition(image, window).squeeze(-1)
    return torch.where(cut[:, None] == cut[:, :, None], 0.0, -100.0)


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_regions_are_the_published_mask(
    windows: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]
) -> None:
    shift = (min(shift[0], window[0] - 1), min(shift[1], window[1] - 1))
    size = (windows[0] * window[0], windows[1] * window[1])
    regions = shift_regions(size, window, shift, CPU)
    found = torch.where(regions[:, None] == regions[:, :, None], 0.0, -100.0)

    assert torch.equal(found, mask_of(size, window, shift))


@pytest.mark.parametrize("value", [-100.0, -200.0, float("-inf")])
def test_a_mask_is_read_back(value: float) -> None:
    mask = mask_of((14, 14), (7, 7), (3, 3))
    mask[mask < 0] = value
    found = regions_of_mask(mask)

    assert found is not None
    regions, told = found
    assert told == value
    assert torch.equal(torch.where(regions[:, None] == regions[:, :, None], 0.0, value), mask)


def test_a_mask_of_as_many_regions_as_the_largest_window_has_tokens() -> None:
    mask = torch.full((1, 256, 256), -100.0)
    mask[0].fill_diagonal_(0)
    found = regions_of_mask(mask)
    assert found is not None and found[0].tolist() == [[*range(256)]]
    assert regions_of_mask(torch.zeros(1, 257, 257)) is None


def test_a_mask_that_hides_nothing() -> None:
    found = regions_of_mask(torch.zeros(2, 4, 4))
    assert found is not None and not found[0].any()


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(4, 4),
        torch.zeros(0, 4, 4),
        torch.randn(2, 4, 4),
        torch.full((1, 4, 4), -100.0),
        torch.tril(torch.ones(1, 4, 4)).sub(1) * 100,
    ],
    ids=["not one per window", "none", "a bias", "hides a token from itself", "causal"],
)
def test_masks_that_are_no_regions(mask: torch.Tensor) -> None:
    assert regions_of_mask(mask) is None


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "not captured"])
def test_regions_that_a_graph_reads_stay(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph holds their address alone: it read what later lay there, after a loop over many sizes."""
    layer = {"heads": 1, "window": (2, 2), "shift": (1, 1)}
    shifted_window_attention(torch.zeros(1, 4, 6, 3), torch.zeros(9, 1), **layer)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: captured)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        shifted_window_attention(torch.zeros(1, 4, 6, 3), torch.zeros(9, 1), **layer)
    regions = weakref.ref(shift_regions((4, 6), (2, 2), (1, 1), CPU))
    attention._checked_calls.clear()
    for tall in range(1, 300):  # more than are kept
        shift_regions((2 * tall, 2), (2, 2), (1, 0), CPU)
    gc.collect()
    assert (regions() is not None) == captured


def test_partition_and_merge_are_inverse() -> None:
    x = torch.randn(2, 6, 8, 3)
    cut = partition(x, (3, 2))
    assert cut.shape == (16, 6, 3)
    assert torch.equal(merge(cut, (3, 2), (6, 8)), x)


def test_relative_index_of_two_by_two() -> None:
    expected = [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    assert relative_index((2, 2), CPU).tolist() == expected

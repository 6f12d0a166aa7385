"""Batches padded to a few sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.graphs import Buckets


@given(st.sets(st.integers(1, 40), min_size=1), st.integers(0, 40), st.integers(0, 1))
def test_padded_and_cut_it_is_the_same(sizes: set[int], count: int, dim: int) -> None:
    buckets = Buckets(sorted(sizes), dim)
    x = torch.randn((count, 3) if dim == 0 else (3, count))
    if count > max(sizes):
        with pytest.raises(ValueError, match=f"at most {max(sizes)} fit. Found: {count}"):
            buckets.pad(x)
        return
    padded = buckets.pad(x, -1.0)
    assert padded.shape[dim] == min(size for size in sizes if size >= count)
    assert torch.equal(buckets.cut(padded, count), x)
    assert (padded.narrow(dim, count, padded.shape[dim] - count) == -1).all()
    mask = buckets.mask(count, "cpu")
    assert (len(mask), int(mask.sum())) == (padded.shape[dim], count)


@pytest.mark.parametrize("sizes", [[], [0, 4], [4, 4], [8, 4], [2.0]])
def test_sizes_must_increase(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="sizes must be increasing whole numbers above 0"):
        Buckets(sizes)


def test_what_has_a_size_is_not_copied() -> None:
    x = torch.ones(4, 2)
    assert Buckets([4]).pad(x) is x

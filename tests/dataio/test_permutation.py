"""A computed order must be one to one, and show no pattern that chance would not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from accel.dataio.sampling.permutation import TABLE, Permutation


@pytest.mark.parametrize("length", [0, 1, 2, 3, TABLE, TABLE + 1, 4225, 65_536, 100_003])
def test_permutation_is_one(length: int) -> None:
    items = Permutation(length, seed=3)(np.arange(length))
    assert np.array_equal(np.sort(items), np.arange(length))


def test_part_of_a_permutation_needs_no_whole() -> None:
    order = Permutation(2**62 - 1, seed=0)
    places = np.arange(10**18, 10**18 + 1000)
    items = order(places)
    assert len(set(items.tolist())) == 1000
    assert 0 <= items.min() <= items.max() < 2**62 - 1
    assert np.array_equal(order(places[500:])[::-1], order(places[:499:-1]))


def test_permutation_is_the_same_on_every_machine() -> None:
    assert Permutation(10, seed=1)(np.arange(10)).tolist() == [6, 4, 9, 3, 0, 7, 1, 5, 2, 8]
    assert Permutation(10**6, seed=1, epoch=2)(np.arange(4)).tolist() == [677181, 431683, 258639, 313198]


def deviations(counts: Any) -> float:
    """Return by how many standard deviations chi-square exceeds that of equally likely cells."""
    counts = np.asarray(counts, dtype=float).ravel()
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2 / expected).sum() - counts.size + 1) / np.sqrt(2 * (counts.size - 1)))


def patterns(length: int, seeds: int = 100) -> dict[str, float]:
    """Return how far from chance the joint place of neighbours and the steps between items 1, √n, … apart are."""
    joint, place = np.zeros((16, 16)), np.zeros((16, 16))
    gaps: dict[str, Any] = {f"gap {apart}": 0 for apart in (1, 2, int(np.ceil(np.sqrt(length))))}
    residues = np.zeros(64)
    before = np.arange(length) * 16 // length
    for seed in range(seeds):
        items = Permutation(length, seed=seed)(np.arange(length))
        cell = items * 16 // length
        joint += np.bincount(cell[:-1] * 16 + cell[1:], minlength=256).reshape(16, 16)
        place += np.bincount(before * 16 + cell, minlength=256).reshape(16, 16)
        residues += np.bincount((items[1:] - items[:-1]) % length % 64, minlength=64)
        for name in gaps:
            apart = int(name.split()[1])
            gap = (items[apart:] - items[:-apart]) % length
            gaps[name] = gaps[name] + np.bincount(gap * 64 // length, minlength=64)
    return {
        "joint": deviations(joint),
        "place": deviations(place),
        "residue": deviations(residues),
        **{name: deviations(counts) for name, counts in gaps.items()},
    }


# 4,097 has one more than a square and many pairs outside; 65,536 is a square, where no position is sent twice.
@pytest.mark.parametrize("length", [4097, 5000, 65_536])
def test_permutation_shows_no_pattern(length: int) -> None:
    found = patterns(length)
    # Three to four standard deviations are chance among 18 figures; a pattern shows in tens to millions.
    assert max(found.values()) < 5, found


def test_small_permutations_are_equally_likely() -> None:
    seen = Counter(tuple(Permutation(4, seed=1, epoch=epoch)(np.arange(4)).tolist()) for epoch in range(4800))
    assert len(seen) == 24
    assert deviations(list(seen.values())) < 5


def test_permutation_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="length must be from"):
        Permutation(2**62, seed=0)


def test_position_outside_the_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"positions must lie in \[0, 10\), got 3 to 10"):
        Permutation(10, seed=0)(np.array([3, 10]))
    assert Permutation(10, seed=0)(np.arange(3)).dtype == np.int64

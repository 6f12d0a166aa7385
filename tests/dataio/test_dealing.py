"""Places of a step go to ranks like cards, and no rank takes itself for the only one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.dataio.sampling.round_robin import RoundRobin, Tail, world


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_a_step_is_dealt_like_cards(sizes: list[int]) -> None:
    piles: list[list[int]] = [[] for _ in sizes]
    place = 0
    while any(len(pile) < size for pile, size in zip(piles, sizes, strict=True)):
        for pile, size in zip(piles, sizes, strict=True):
            if len(pile) < size:
                pile.append(place)
                place += 1
    assert [RoundRobin(sizes, rank, "pad").mine(place).tolist() for rank in range(len(sizes))] == piles


def test_a_rank_does_not_take_itself_for_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world() == (1, 0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"got None and WORLD_SIZE=4; call torch\.distributed\.init"):
        world()


@given(st.integers(1, 6), st.integers(4, 9), st.integers(0, 200), st.sampled_from(["uneven", "fill"]))
def test_no_rank_has_a_single_sample_in_a_step_where_there_are_enough(
    ranks: int, size: int, more: int, tail: Tail
) -> None:
    left = length = 2 * ranks + more
    deals = [RoundRobin([size] * ranks, rank, tail, least=2) for rank in range(ranks)]
    steps = deals[0].steps(length)
    for _ in range(steps):
        counts = [deal.count(deal.width(left)) for deal in deals]
        assert 2 <= min(counts) <= max(counts) <= size
        left -= sum(counts)
    assert left == 0


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 60))
def test_batches_too_small_for_that_are_dealt_as_without(ranks: int, size: int, length: int) -> None:
    left = length
    deals = [RoundRobin([size] * ranks, rank, "uneven", least=2) for rank in range(ranks)]
    plain = RoundRobin([size] * ranks, 0, "uneven")
    assert deals[0].steps(length) == plain.steps(length)
    while width := deals[0].width(left):
        counts = [deal.count(width) for deal in deals]
        assert sum(counts) == width and max(counts) <= size
        assert min(counts) >= 1 or length < 2 * ranks or size == 1
        left -= width
    assert left == 0

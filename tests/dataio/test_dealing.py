"""Places of a step go to ranks like cards, and no rank takes itself for the only one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.dataio.sampling.round_robin import RoundRobin, world


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

"""Small objects up a tree and an answer down: right on every rank, with few messages of each."""

from __future__ import annotations

import math
from typing import Any

import pytest

from accel.comm.ranks.object_group import ObjectGroup
from accel.comm.ranks.post_mortem import CommError
from tests.comm.simulated import Mailed, together


def exchanged(line: Mailed) -> dict[str, Any]:
    talk = ObjectGroup(line)  # type: ignore[arg-type]
    mine = "x" * (line.rank + 1)
    found: dict[str, Any] = {"collect": talk.collect(mine)}
    found["messages"] = line.messages
    found["first"] = talk.first(mine)
    found["decide"] = talk.decide(line.rank, max)
    found["peers"] = len(line.peers)
    found["gather"] = talk.gather(mine) if line.size < 20 else None
    found["gather more"] = talk.gather(mine * 5000) if line.size < 20 else None
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64])
def test_each_hears_what_it_should_from_few(size: int) -> None:
    everyone = ["x" * (rank + 1) for rank in range(size)]
    steps = math.ceil(math.log2(size)) if size > 1 else 0
    found = together(size, exchanged)
    for rank, one in enumerate(found):
        assert one["collect"] == (everyone if rank == 0 else [])
        assert one["first"] == "x"
        assert one["decide"] == size - 1
        assert one["gather"] in (everyone, None)
        assert one["gather more"] in ([text * 5000 for text in everyone], None)
        assert one["peers"] <= max(steps, 1)
    # One from each rank but rank 0; what its children said may take a second.
    messages = sum(one["messages"] for one in found)
    assert messages == size - 1 if size < 16 else messages < 1.2 * size


@pytest.mark.parametrize("size", [2, 250, 1000])
def test_a_thousand_ranks_have_a_tree_of_ten_levels(size: int) -> None:
    class Line:
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, size

    talks = [ObjectGroup(Line(rank)) for rank in range(size)]  # type: ignore[arg-type]
    steps = math.ceil(math.log2(size))
    assert sorted(child for one in talks for child in one._children) == list(range(1, size))
    for rank, one in enumerate(talks):
        assert len(one._children) <= steps
        assert all(talks[child]._parent == rank for child in one._children)


def test_what_rank_0_raises_is_raised_everywhere() -> None:
    def decided(line: Mailed, error: Exception) -> str:
        def decision(told: list[int]) -> None:
            raise error

        with pytest.raises((ValueError, CommError)) as caught:
            ObjectGroup(line).decide(0, decision)  # type: ignore[arg-type]
        return f"{type(caught.value).__name__}: {caught.value}"

    assert together(3, lambda line: decided(line, ValueError("unlike"))) == ["ValueError: unlike"] * 3
    failed = "CommError: rank 0 failed to decide for all: KeyError: 'way'"
    assert together(3, lambda line: decided(line, KeyError("way"))) == [failed] * 3

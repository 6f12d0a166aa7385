"""A meeting of ranks that must have come for the same thing, and what they agree on there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from accel.errors import InvalidArgument
from accel.run.ranks import Ranks

T = TypeVar("T")

_START_S = 30.0
"""By which ranks may come to `accel.optimize` at different times: twice as much is waited for."""


def first_of(reasons: list[str]) -> str:
    """Return the first reason that a rank brings; "" if none does."""
    return next((reason for reason in reasons if reason), "")


def met(ranks: Ranks, what: str, mine: Any, answer: Callable[[list[Any]], T]) -> T:
    """Return rank 0's answer to what the ranks bring, on all of them.

    Args:
        ranks: that meet.
        what: they have come to do.
        mine: what this one brings.
        answer: makes it of what all of them bring, by rank; called on rank 0 only.

    Raises:
        RuntimeError: on all ranks, if one has come for something else.
    """

    def checked(brought: list[tuple[str, Any]]) -> T:
        if any(other != what for other, _ in brought):
            raise RuntimeError(f"ranks are not at the same point: {', '.join(other for other, _ in brought)}")
        return answer([own for _, own in brought])

    return ranks.decide((what, mine), checked, f"did not come to {what}")


def alike(ranks: Ranks, mine: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return by what all ranks deal their samples: where that differs some come twice, and others never.

    Args:
        ranks: that have just come to `accel.optimize`.
        mine: by what this one does, by name; None if it has joined the others, and does as they do.

    Raises:
        InvalidArgument: on all ranks, for the first name by which two of them differ.
    """

    def answer(brought: list[Any]) -> tuple[str, dict[str, Any]]:
        for (name, first), (rank, each) in itertools.product(brought[0].items(), enumerate(brought)):
            if each is not None and each[name] != first:
                return f"got {name} {first} on rank 0 and {each[name]} on rank {rank}", brought[0]
        return "", brought[0]

    problem, first = ranks.decide(mine, answer, "did not come to accel.optimize", _START_S)
    if problem:
        raise InvalidArgument(
            f"loader and settings must be the same on all ranks, {problem}; if batches are to have several sizes, give "
            "every rank batch_sampler=accel.dataio.elastic_sampler.ElasticSampler(..., batch_size=[one for each rank])"
        )
    return first

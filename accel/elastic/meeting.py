"""A meeting of ranks that must have come for the same thing, and what they agree on there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from accel.elastic.batch_decision import BatchDecision
from accel.goodput.efficiency import NoiseInterval
from accel.run.ranks import Ranks

T = TypeVar("T")


class AgreedBatch(NamedTuple):
    """What rank 0 decides for all."""

    decision: BatchDecision
    most_ahead: int
    """Batches that a rank's loader has dealt ahead, at most."""
    is_settled: bool
    noise: NoiseInterval | None
    """The last one that says something, by which all ranks scale their rates."""


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

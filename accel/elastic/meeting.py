"""A meeting of ranks that must have come for the same thing, and what they agree on there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from accel.dataio.elastic_sampler import ElasticSampler
from accel.errors import InvalidArgument, InvalidState
from accel.run.ranks import Ranks

if TYPE_CHECKING:
    from accel.settings import OptimizeSettings

T = TypeVar("T")

_DEALT_BY = "shuffle", "seed", "order", "drop_last", "tail"
"""Attributes by which a sampler deals, beside the batch size."""
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
        InvalidState: on all ranks, if one has come for something else.
    """

    def checked(brought: list[tuple[str, Any]]) -> T:
        if any(other != what for other, _ in brought):
            raise InvalidState(f"ranks are not at the same point: {', '.join(other for other, _ in brought)}")
        return answer([own for _, own in brought])

    return ranks.decide((what, mine), checked, f"did not come to {what}")


def deal_alike(sampler: ElasticSampler, settings: OptimizeSettings, *, is_new: bool) -> None:
    """Have all ranks deal samples in the same form: where that differs some come twice, and others never.

    Args:
        sampler: of this rank, which has just come to `accel.optimize`.
        settings: that it was passed there.
        is_new: this process has joined the others, and deals as they do.

    Raises:
        InvalidArgument: on all ranks, for the first setting by which two of them differ.
    """
    sizes, rule = sampler.batch_sizes, settings.scaling_rule
    mine = {name: getattr(sampler, name) for name in _DEALT_BY} | {
        "samples": sampler.length,
        "batch_size": sizes[sampler.rank] if len(set(sizes)) == 1 else sizes,
        "max_batch_size": settings.max_batch_size,
        "scaling_rule": getattr(rule, "__qualname__", rule and type(rule).__qualname__),
        "checkpoint": settings.checkpoint is not None,
    }

    def answer(brought: list[Any]) -> tuple[str, dict[str, Any]]:
        for (name, first), (rank, each) in itertools.product(brought[0].items(), enumerate(brought)):
            if each is not None and each[name] != first:
                return f"got {name} {first} on rank 0 and {each[name]} on rank {rank}", brought[0]
        return "", brought[0]

    ranks = Ranks()
    ranks.join(since=time.time())
    problem, first = ranks.decide(None if is_new else mine, answer, "did not come to accel.optimize", _START_S)
    if problem:
        raise InvalidArgument(
            f"loader and settings must be the same on all ranks, {problem}; if batches are to have several sizes, give "
            "every rank batch_sampler=accel.ElasticSampler(..., batch_size=[one for each rank])"
        )
    if is_new:
        vars(sampler).update({name: first[name] for name in _DEALT_BY})
        sampler.share_among(sampler.num_replicas, sampler.rank, first["batch_size"])

"""Predicted step of every scheme, once a few plain DDP steps were observed: the same on every rank.

What buckets cost by a scheme is timed on all ranks at once, since they share memory, caches and cores in training too.
Rank 0 predicts and broadcasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from accel.comm.catalogue import Scheme
from accel.comm.cost_model.choice import (
    ObservedStep,
    Option,
    calibrated,
    mean_of,
    options,
    worthwhile,
)
from accel.comm.cost_model.cost import Network, Stages
from accel.comm.cost_model.dry_run import copy_byte_s, costs, shared_out
from accel.comm.layout import Layout
from accel.comm.ranks.failure import CommError
from accel.comm.ranks.object_group import ObjectGroup
from accel.comm.ranks.topology import Topology
from accel.profiler.interruptions import ours

Costs = dict[Scheme, tuple[Stages, ...]]


class BucketFacts(NamedTuple):
    """What a prediction must know of a module's buckets."""

    layouts: Sequence[Layout]
    topology: Topology
    device: torch.device
    gradients_are_views: bool
    """Of the buckets, so that nothing is copied out of them."""


@dataclass
class Choice:
    """The prediction for every candidate, and the measured step of those tried."""

    options: list[Option]
    """Best first: the shortest predicted step, or about as short and more exact."""
    measured: dict[Option, float]
    """Steps of the options that were tried; from the beginning that of DDP's own all-reduce."""

    @property
    def plain(self) -> Option:
        """Return DDP's own all-reduce."""
        return next(option for option in self.options if option.scheme is None)

    @property
    def plain_s(self) -> float:
        """Return DDP's own step, measured."""
        return self.measured[self.plain]

    @property
    def candidates(self) -> list[Option]:
        """Return what is predicted to beat DDP's own all-reduce, best first."""
        return worthwhile(self.options)

    @property
    def best_predicted(self) -> str:
        """Return in words which scheme comes nearest to DDP's own step, or beats it."""
        best = next((option for option in self.options if option.scheme is not None), None)
        if best is None:
            return "no scheme fits these gradients"
        return f"the best, {best}, is predicted to take {best.step_s * 1e3:.1f} ms"

    def table(self, chosen: Option | None = None) -> str:
        """Return the candidates, one a line: predicted step, communication that backward does not hide, measured."""
        width = max(len(str(option)) for option in self.options)
        lines = [f"{'way':{width}}  predicted     exposed    measured"]
        for option in self.options:
            step_s = self.measured.get(option)
            measured = f"{step_s * 1e3:8.1f} ms" if step_s is not None else " " * 11
            predicted = f"{option.step_s * 1e3:8.1f} ms {option.exposed_s * 1e3:8.1f} ms"
            mark = "  <- chosen" if option == chosen else ""
            lines.append(f"{option!s:{width}} {predicted} {measured}{mark}".rstrip())
        return "\n".join(lines)


def costs_of(schemes: Sequence[Scheme], facts: BucketFacts, objects: ObjectGroup) -> list[Costs]:
    """Return on rank 0 what buckets cost by each scheme, as each rank has timed it; all ranks call this together."""
    own: Costs | str
    try:
        own = costs(schemes, facts.layouts, facts.topology, facts.device)
    except ours() as error:  # perhaps on this rank alone: the others wait for its result
        own = f"rank {objects.rank} could not time the schemes: {type(error).__name__}: {error}"
    by_rank = objects.gather(own)
    if problem := next((costs for costs in by_rank if isinstance(costs, str)), ""):
        raise CommError(problem)
    return [costs for costs in by_rank if not isinstance(costs, str)]


def choose(
    observed: ObservedStep, facts: BucketFacts, network: Network, costs_by_rank: Sequence[Costs], objects: ObjectGroup
) -> Choice:
    """Return the predictions, the same on every rank; all ranks call this together.

    Args:
        observed: this rank's steps under DDP's own all-reduce.
        facts: of their buckets.
        network: from `accel.comm.cost_model.probe.probe`.
        costs_by_rank: from `costs_of`, of the candidates; on rank 0.
        objects: exchanged between the ranks.
    """
    own = (observed, float(torch.get_num_threads()))
    copying = 0.0 if facts.gradients_are_views else copy_byte_s(facts.layouts, facts.device)

    def decision(by_rank: list[tuple[ObservedStep, float]]) -> Choice:
        mean = mean_of([step for step, _ in by_rank])
        profile, fitted = calibrated(mean, network, by_rank[0][1], copying)
        choice = Choice(options(profile, fitted, shared_out(costs_by_rank)), {})
        choice.measured[choice.plain] = mean.step_s - mean.extra_s
        return choice

    return objects.decide(own, decision)

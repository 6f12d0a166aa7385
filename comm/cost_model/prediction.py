"""Predicted step of every plan, once a few plain DDP steps were observed: the same on every rank.

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
    in_better_buckets,
    mean_of,
    options,
    worthwhile,
)
from accel.comm.cost_model.cost import Network, Profile, Stages
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
    cap_mb: float
    """As `bucket_cap_mb` of DDP."""
    can_resize: bool
    """Whether DDP can get buckets of another size."""


@dataclass
class Choice:
    """The prediction for every candidate, and the measured step of those tried."""

    options: list[Option]
    """In the buckets there are, best first: the shortest predicted step, or about as short and more exact."""
    resized: list[Option]
    """In buckets of another size that is predicted to be better for the scheme."""
    profile: Profile
    network: Network
    measured: dict[Option, float]
    """Steps of the options that were tried; from the beginning that of DDP's own all-reduce."""
    can_resize: bool = True
    """Whether DDP can get buckets of another size."""

    @property
    def plain(self) -> Option:
        """Return DDP's own all-reduce in the buckets there are."""
        return next(option for option in self.options if not any(option.plan))

    @property
    def plain_s(self) -> float:
        """Return DDP's own step, measured."""
        return self.measured[self.plain]

    @property
    def candidates(self) -> list[Option]:
        """Return what is predicted to beat DDP's own all-reduce, best first."""
        resized = worthwhile([self.plain, *self.resized]) if self.can_resize else []
        return sorted([*worthwhile(self.options), *resized], key=lambda option: option.step_s)

    def table(self, chosen: Option | None = None) -> str:
        """Return the candidates, one a line: predicted step, communication that backward does not hide, measured."""
        listed = [*self.options, *self.resized]
        width = max(len(str(option)) for option in listed)
        lines = [f"{'way':{width}}  predicted     exposed    measured"]
        for option in listed:
            step_s = self.measured.get(option)
            measured = f"{step_s * 1e3:8.1f} ms" if step_s is not None else " " * 11
            predicted = f"{option.step_s * 1e3:8.1f} ms {option.exposed_s * 1e3:8.1f} ms"
            mark = "  <- chosen" if option == chosen else ""
            lines.append(f"{option!s:{width}} {predicted} {measured}{mark}".rstrip())
        if self.resized and not self.can_resize:
            lines += ["", "buckets of another size must be asked for: DistributedDataParallel(bucket_cap_mb=...)"]
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
        costs = shared_out(costs_by_rank)
        better = [in_better_buckets(scheme, profile, fitted, costs, facts.cap_mb) for scheme in (None, *costs)]
        predicted = options(profile, fitted, costs)
        choice = Choice(predicted, [option for option in better if option], profile, fitted, {}, facts.can_resize)
        choice.measured[choice.plain] = mean.step_s - mean.extra_s
        return choice

    return objects.decide(own, decision)

"""Which scheme the buckets of a module should use: predictions for every candidate, best first.

Candidates are DDP's own all-reduce and each scheme, for all buckets alike, in the buckets that DDP has made. Mixtures
of schemes and buckets of another size were candidates once: none of 19 choices that were measured was one of these
(`python -m benchmarks.comm_choice`).

What buckets cost by a scheme is timed on all ranks at once, since they share memory, caches and cores in training too.
Rank 0 predicts by its own costs, once a few plain DDP steps were observed, and broadcasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import torch

from accel.comm.catalogue import CATALOGUE, Scheme
from accel.comm.cost_model.cost import Network, Profile, Stages, core_seconds, plain, simulate
from accel.comm.cost_model.dry_run import copy_byte_s, costs
from accel.comm.layout import Layout
from accel.comm.ranks.failure import CommError
from accel.comm.ranks.object_group import ObjectGroup
from accel.comm.ranks.topology import Topology
from accel.profiler.interruptions import ours

WORTH = 0.02
"""Least gain, as a share of the step, for which anything is done at all."""
_ALIKE = 0.03
"""Of predictions within this of each other the more exact comes first."""
_SCALE = (0.5, 4.0)
_BUSY = 0.92
"""Of cores that bound a step, the share in use: 0.90 to 0.93 measured, as ranks that share them wait for each other
(2 hosts of 2 ranks on 2 cores, PowerSGD and DGC at 1 Gbit). Plain steps may show that it is more."""
_ROUNDS = 12


class Option(NamedTuple):
    """A candidate and its prediction."""

    scheme: Scheme | None
    """None is DDP's own all-reduce."""
    step_s: float
    exposed_s: float
    """Communication that the backward pass does not hide."""

    def __str__(self) -> str:
        return "plain" if self.scheme is None else str(self.scheme)


class ObservedStep(NamedTuple):
    """What plain steps were measured to take: medians of seconds since the first bucket was ready, means over ranks."""

    bytes: tuple[int, ...]
    ready_s: tuple[float, ...]
    done_s: float
    """When the last bucket was averaged."""
    step_s: float
    extra_s: float = 0.0
    """Of the step, at most so much was the hook's own, which DDP without one does not take."""
    core_s: float = 0.0
    """Seconds of cores that the step took, communication included; 0 where that is not known."""
    own_s: float = 0.0
    """Those of the thread that trains."""


def calibrated(
    observed: ObservedStep, network: Network, threads: float, copy_byte_s: float = 0.0
) -> tuple[Profile, Network]:
    """Return the profile and the network under which the model reproduces the observed plain steps.

    Two unknowns, two observations: the backward pass alone is faster than under communication that takes cores; and
    links under load are not what a short probe shows. What can't be seen stays as it is: a network that the backward
    pass hides altogether says nothing of its links. What transfers take of the cores is, where one thread trains, what
    the others used, or less if a probe says so.
    """
    stages = [plain(nbytes) for nbytes in observed.bytes]
    network, core_s = _known_work(observed, network, threads, stages)
    work, rate = 1.0, 1.0
    hidden = observed.done_s - observed.ready_s[-1] < 0.05 * observed.step_s
    for _ in range(_ROUNDS):
        profile = Profile(
            observed.bytes, tuple(work * ready_s for ready_s in observed.ready_s), 0.0, threads, copy_byte_s
        )
        timeline = simulate(profile, stages, network.slower(rate))
        if observed.ready_s[-1] > 0:
            work = _within(work * observed.ready_s[-1] / max(timeline.ready_s[-1], 1e-9), (0.1, 1.0))
        if not hidden:
            rate = _within(rate * observed.done_s / max(max(timeline.done_s), 1e-9), _SCALE)
    profile = profile._replace(ready_s=tuple(work * ready_s for ready_s in observed.ready_s))
    fitted = network.slower(rate)
    rest = max(observed.step_s - simulate(profile, stages, fitted).step_s, 0.0)
    busy = _within(observed.core_s / max(fitted.cores * observed.step_s, 1e-9), (_BUSY, 1.0))
    return profile._replace(rest_s=rest, core_s=core_s, busy=busy), fitted


def _known_work(
    observed: ObservedStep, network: Network, threads: float, buckets: Sequence[Stages]
) -> tuple[Network, float]:
    """Return the network with what its transfers take of the cores, and what the rest of a plain step takes of them."""
    moved = sum(core_seconds(stages, network, threads) for stages in buckets)
    if threads == 1 and moved > 0 and observed.core_s > 0:
        used = min(max(observed.core_s - observed.own_s, 0.0), moved)
        network = replace(network, core_byte_s=network.core_byte_s * used / moved)
        moved = used
    return network, max(observed.core_s - observed.extra_s - moved, 0.0)


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def predict(
    scheme: Scheme | None, profile: Profile, network: Network, costs: Mapping[Scheme, Sequence[Stages]]
) -> Option:
    """Return the prediction for a scheme.

    Args:
        scheme: of all buckets.
        profile: of the backward pass.
        network: links and cores.
        costs: of each bucket by each scheme.
    """
    stages = [plain(nbytes) for nbytes in profile.bytes] if scheme is None else costs[scheme]
    timeline = simulate(profile, stages, network)
    return Option(scheme, timeline.step_s, timeline.exposed_s)


def options(profile: Profile, network: Network, costs: Mapping[Scheme, Sequence[Stages]]) -> list[Option]:
    """Return every candidate, best first: the shortest predicted step, or about as short and more exact.

    Args:
        profile: of the backward pass.
        network: links and cores.
        costs: of each bucket, for each scheme that is allowed.

    Example:
        >>> best = options(profile, network, costs)[0]
        >>> best.scheme, best.step_s
    """
    ranked = [predict(scheme, profile, network, costs) for scheme in (None, *costs)]
    ranked.sort(key=lambda option: option.step_s)
    alike = [option for option in ranked if option.step_s <= ranked[0].step_s * (1 + _ALIKE)]
    return sorted(alike, key=fidelity) + ranked[len(alike) :]


def fidelity(option: Option) -> int:
    """Return the place of an option in the order of the catalogue: the less, the more exact."""
    return -1 if option.scheme is None else list(CATALOGUE).index(option.scheme.compressor)


def preferred(tried: Mapping[Option, float]) -> Option:
    """Return the option with the shortest step, or one about as short and more exact."""
    alike = [option for option, step_s in tried.items() if step_s <= min(tried.values()) * (1 + _ALIKE)]
    return min(alike, key=lambda option: (fidelity(option), tried[option]))


def worthwhile(ranked: Sequence[Option]) -> list[Option]:
    """Return the options that are predicted to beat DDP's own all-reduce by more than `WORTH`, best first."""
    plain_s = next(option.step_s for option in ranked if option.scheme is None)
    return [option for option in ranked if option.step_s < plain_s * (1 - WORTH)]


def mean_of(steps: Sequence[ObservedStep]) -> ObservedStep:
    """Return the mean of what the ranks observed; all have the same buckets."""
    ready_s = tuple(fmean(times) for times in zip(*(step.ready_s for step in steps), strict=True))
    return ObservedStep(steps[0].bytes, ready_s, *map(fmean, zip(*(step[2:] for step in steps), strict=True)))


# -- on all ranks -----------------------------------------------------------------------------------------------------

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


def costs_of(schemes: Sequence[Scheme], facts: BucketFacts, objects: ObjectGroup) -> Costs:
    """Return what buckets cost by each scheme, as timed on this rank; all ranks call this together."""
    own: Costs = {}
    problem = ""
    try:
        own = costs(schemes, facts.layouts, facts.topology, facts.device)
    except ours() as error:  # perhaps on this rank alone: the others wait for its result
        problem = f"rank {objects.rank} could not time the schemes: {type(error).__name__}: {error}"
    if problem := next(filter(None, objects.gather(problem)), ""):
        raise CommError(problem)
    return own


def choose(observed: ObservedStep, facts: BucketFacts, network: Network, costs: Costs, objects: ObjectGroup) -> Choice:
    """Return the predictions, the same on every rank; all ranks call this together.

    Args:
        observed: this rank's steps under DDP's own all-reduce.
        facts: of their buckets.
        network: from `accel.comm.cost_model.probe.probe`.
        costs: from `costs_of`, of the candidates; those of rank 0 count.
        objects: exchanged between the ranks.
    """
    own = (observed, float(torch.get_num_threads()))
    copying = 0.0 if facts.gradients_are_views else copy_byte_s(facts.layouts, facts.device)

    def decision(by_rank: list[tuple[ObservedStep, float]]) -> Choice:
        mean = mean_of([step for step, _ in by_rank])
        profile, fitted = calibrated(mean, network, by_rank[0][1], copying)
        choice = Choice(options(profile, fitted, costs), {})
        choice.measured[choice.plain] = mean.step_s - mean.extra_s
        return choice

    return objects.decide(own, decision)

"""Which scheme each bucket should use: predictions for every candidate, best first.

Candidates are DDP's own all-reduce, each scheme for all buckets alike, and a mixture of the best of these, bucket by
bucket, where that is predicted to be shorter by more than the model's error.

Buckets of another size are candidates too: small ones are sent early and pay α each time, large ones are sent late.
With compression little is left to overlap, so larger ones win.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from accel.comm.catalogue import CATALOGUE, Scheme
from accel.comm.cost_model.cost import Network, Profile, Stages, between, core_seconds, plain, simulate
from accel.comm.engine.plan import Plan

WORTH = 0.02
"""Least gain, as a share of the step, for which anything is done at all."""
_ALIKE = 0.03
"""Of predictions within this of each other the more exact comes first; a mixture must gain more."""
_LEAST = 0.005
"""Least gain of giving one bucket a scheme of its own."""
_SCALE = (0.5, 4.0)
_BUSY = 0.92
"""Of cores that bound a step, the share in use: 0.90 to 0.93 measured, as ranks that share them wait for each other
(2 hosts of 2 ranks on 2 cores, PowerSGD and DGC at 1 Gbit). Plain steps may show that it is more."""
_ROUNDS = 12
CAPS_MB = (1.0, 5.0, 25.0, 50.0, 100.0)
"""Sizes of buckets that are predicted."""


class Option(NamedTuple):
    """A candidate and its prediction."""

    plan: Plan
    step_s: float
    exposed_s: float
    """Communication that the backward pass does not hide."""
    cap_mb: float | None = None
    """Size of the buckets, as `bucket_cap_mb` of DDP; None for the one they have."""

    def __str__(self) -> str:
        schemes = describe(self.plan)
        return schemes if self.cap_mb is None else f"{schemes} in buckets of {self.cap_mb:g} MB"


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


def describe(plan: Plan) -> str:
    """Return a plan in words: "int8 by hosts (0-2), plain (3)"."""
    groups: dict[str, list[int]] = {}
    for index, scheme in enumerate(plan):
        groups.setdefault("plain" if scheme is None else str(scheme), []).append(index)
    if len(groups) == 1:
        return next(iter(groups))
    return ", ".join(f"{name} ({_numbers(indices)})" for name, indices in groups.items())


def _numbers(indices: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


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


def predict(plan: Plan, profile: Profile, network: Network, costs: Mapping[Scheme, Sequence[Stages]]) -> Option:
    """Return the prediction for a plan.

    Args:
        plan: a scheme for each bucket.
        profile: of the backward pass.
        network: links and cores.
        costs: of each bucket by each scheme in the plan.
    """
    stages = [plain(profile.bytes[i]) if scheme is None else costs[scheme][i] for i, scheme in enumerate(plan)]
    timeline = simulate(profile, stages, network, list(plan))
    return Option(plan, timeline.step_s, timeline.exposed_s)


def options(
    profile: Profile, network: Network, costs: Mapping[Scheme, Sequence[Stages]], *, mix: int = 3
) -> list[Option]:
    """Return every candidate, best first: the shortest predicted step, or about as short and more exact.

    Args:
        profile: of the backward pass.
        network: links and cores.
        costs: of each bucket, for each scheme that is allowed.
        mix: how many of the best candidates are refined bucket by bucket, with each other's schemes.

    Example:
        >>> best = options(profile, network, costs)[0]
        >>> best.plan, best.step_s
    """
    count = len(profile.bytes)
    ranked = [predict((scheme,) * count, profile, network, costs) for scheme in (None, *costs)]
    ranked.sort(key=lambda option: option.step_s)
    alike = [option for option in ranked if option.step_s <= ranked[0].step_s * (1 + _ALIKE)]
    ranked = sorted(alike, key=lambda option: _fidelity(option.plan[0])) + ranked[len(alike) :]
    used = list(dict.fromkeys([option.plan[0] for option in ranked[:mix]] + [None]))
    mixed = _refined(ranked[0], used, lambda plan: predict(plan, profile, network, costs)) if count > 1 else ranked[0]
    if mixed.step_s < ranked[0].step_s * (1 - _ALIKE):
        ranked.insert(0, mixed)
    return ranked


def _fidelity(scheme: Scheme | None) -> int:
    return -1 if scheme is None else list(CATALOGUE).index(scheme.compressor)


def preferred(tried: Mapping[Option, float]) -> Option:
    """Return the option with the shortest step, or one about as short and more exact."""
    alike = [option for option, step_s in tried.items() if step_s <= min(tried.values()) * (1 + _ALIKE)]
    return min(alike, key=lambda option: (max(map(_fidelity, option.plan)), tried[option]))


def _refined(best: Option, schemes: Sequence[Scheme | None], estimate: Callable[[Plan], Option]) -> Option:
    """Give single buckets other schemes, the last buckets first, as long as that pays."""
    # The last buckets are those that nothing hides.
    for index in reversed(range(len(best.plan))):
        for scheme in schemes:
            if scheme == best.plan[index]:
                continue
            other = estimate((*best.plan[:index], scheme, *best.plan[index + 1 :]))
            if other.step_s < best.step_s * (1 - _LEAST):
                best = other
    return best


def worthwhile(ranked: Sequence[Option]) -> list[Option]:
    """Return the options that are predicted to beat plain DDP by more than `WORTH`, best first."""
    plain_s = next(option.step_s for option in ranked if not any(option.plan))
    return [option for option in ranked if option.step_s < plain_s * (1 - WORTH)]


def rebucketed(profile: Profile, cap_bytes: float) -> tuple[Profile, list[float]]:
    """Return the profile with buckets of at most `cap_bytes` (the first 1 MB, as DDP makes it), and these.

    Gradients are taken to become ready evenly between the times at which buckets were.
    """
    total, ends = sum(profile.bytes), []
    at = min(float(1 << 20), cap_bytes)
    while at < total:
        ends.append(at)
        at += cap_bytes
    ends.append(float(total))
    boundaries = [0.0]
    for nbytes in profile.bytes:
        boundaries.append(boundaries[-1] + nbytes)
    # The first bucket became ready at 0, at the pace of the others its gradients began before.
    pace = profile.ready_s[-1] / max(boundaries[-1] - boundaries[1], 1.0)
    times = [-pace * boundaries[1], *profile.ready_s]
    ready = np.interp(ends, boundaries, times).tolist()
    sizes = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    first = ready[0]
    moved = Profile(
        tuple(round(size) for size in sizes),
        tuple(ready_s - first for ready_s in ready),
        max(profile.rest_s + first, 0.0),
        profile.threads,
        profile.copy_byte_s,
        profile.core_s,
    )
    return moved, sizes


def in_better_buckets(
    scheme: Scheme | None,
    profile: Profile,
    network: Network,
    costs: Mapping[Scheme, Sequence[Stages]],
    cap_mb: float = 25.0,
) -> Option | None:
    """Return a scheme in buckets of the size with which it is predicted to be fastest.

    Args:
        scheme: of all buckets; None is DDP's own all-reduce.
        profile: of the backward pass.
        network: links and cores.
        costs: of each bucket by each scheme.
        cap_mb: the present size, MiB.

    Returns:
        None unless it is better by more than `WORTH`, and where nothing can be predicted: what a compressor does with
        other shapes in a bucket is known only by running it.
    """
    if scheme is not None and not CATALOGUE[scheme.compressor].linear:
        return None
    ends = sorted(range(len(profile.bytes)), key=lambda i: profile.bytes[i])
    small, large = ends[0], ends[-1]
    timelines = {}
    for cap in {cap_mb, *CAPS_MB}:
        moved, sizes = rebucketed(profile, cap * (1 << 20))
        cost = [plain(size) for size in sizes]
        if scheme is not None:
            anchors = [(profile.bytes[end], costs[scheme][end]) for end in (small, large)]
            cost = [between(anchors[0], anchors[1], size) for size in sizes]
        timelines[cap] = simulate(moved, cost, network, [scheme] * len(sizes))
    best = min(timelines, key=lambda cap: timelines[cap].step_s)
    step_s, exposed_s = timelines[best].step_s, timelines[best].exposed_s
    return Option((scheme,), step_s, exposed_s, best) if step_s < timelines[cap_mb].step_s * (1 - WORTH) else None


def mean_of(steps: Sequence[ObservedStep]) -> ObservedStep:
    """Return the mean of what the ranks observed; all have the same buckets."""
    return ObservedStep(
        steps[0].bytes,
        tuple(fmean(times) for times in zip(*(step.ready_s for step in steps), strict=True)),
        fmean(step.done_s for step in steps),
        fmean(step.step_s for step in steps),
        fmean(step.extra_s for step in steps),
        fmean(step.core_s for step in steps),
        fmean(step.own_s for step in steps),
    )

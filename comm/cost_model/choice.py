"""Which way each bucket should go: predictions for every candidate, best first.

Candidates are DDP's own all-reduce, each way for all buckets alike, and from the best of these a mixture, bucket by
bucket, where that is predicted to be shorter by more than the model can be wrong about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from accel.comm.catalogue import CATALOGUE, Scheme
from accel.comm.cost_model.cost import Network, Profile, Stages, core_seconds, plain, simulate
from accel.comm.engine.plan import Plan

WORTH = 0.02
"""Least gain, as a share of the step, for which anything is done at all."""
_ALIKE = 0.03
"""Of predictions this near to each other the one of more fidelity comes first; a mixture must win more."""
_LEAST = 0.005
"""Least gain of giving one bucket a way of its own."""
_SCALE = (0.5, 4.0)
_BUSY = 0.92
"""Of cores that bound a step, the share in use: 0.90 to 0.93 measured, as ranks that share them wait for each other
(2 hosts of 2 ranks on 2 cores, PowerSGD and DGC at 1 Gbit). Plain steps may show that it is more."""
_ROUNDS = 12


class Option(NamedTuple):
    """A candidate and what the model says of it."""

    plan: Plan
    step_s: float
    exposed_s: float
    """Communication that the backward pass does not hide."""

    def __str__(self) -> str:
        return describe(self.plan)


class ObservedStep(NamedTuple):
    """What plain steps have shown: medians of seconds since the first bucket was ready, means over ranks."""

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
    for index, way in enumerate(plan):
        groups.setdefault("plain" if way is None else str(way), []).append(index)
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
    seen: ObservedStep, network: Network, threads: float, copy_byte_s: float = 0.0
) -> tuple[Profile, Network]:
    """Return the profile and the network under which the model gives the plain steps that were seen.

    Two unknowns, two observations: the backward pass alone is faster than under communication that takes cores; and
    links under load are not what a short probe shows. What can't be seen stays as it is: a network that the backward
    pass hides altogether says nothing of its links. What transfers take of the cores is, where one thread trains, what
    the others used, or less if a probe says so.
    """
    ways = [plain(one) for one in seen.bytes]
    network, core_s = _known_work(seen, network, threads, ways)
    work, rate = 1.0, 1.0
    hidden = seen.done_s - seen.ready_s[-1] < 0.05 * seen.step_s
    for _ in range(_ROUNDS):
        profile = Profile(seen.bytes, tuple(work * one for one in seen.ready_s), 0.0, threads, copy_byte_s)
        found = simulate(profile, ways, network.slower(rate))
        if seen.ready_s[-1] > 0:
            work = _within(work * seen.ready_s[-1] / max(found.ready_s[-1], 1e-9), (0.1, 1.0))
        if not hidden:
            rate = _within(rate * seen.done_s / max(max(found.done_s), 1e-9), _SCALE)
    profile = profile._replace(ready_s=tuple(work * one for one in seen.ready_s))
    fitted = network.slower(rate)
    rest = max(seen.step_s - simulate(profile, ways, fitted).step_s, 0.0)
    busy = _within(seen.core_s / max(fitted.cores * seen.step_s, 1e-9), (_BUSY, 1.0))
    return profile._replace(rest_s=rest, core_s=core_s, busy=busy), fitted


def _known_work(seen: ObservedStep, network: Network, threads: float, ways: Sequence[Stages]) -> tuple[Network, float]:
    """Return the network with what its transfers take of the cores, and what the rest of a plain step takes of them."""
    moved = sum(core_seconds(one, network, threads) for one in ways)
    if threads == 1 and moved > 0 and seen.core_s > 0:
        used = min(max(seen.core_s - seen.own_s, 0.0), moved)
        network = replace(network, core_byte_s=network.core_byte_s * used / moved)
        moved = used
    return network, max(seen.core_s - seen.extra_s - moved, 0.0)


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def predict(plan: Plan, profile: Profile, network: Network, costs: Mapping[Scheme, Sequence[Stages]]) -> Option:
    """Return what the model says of a plan.

    Args:
        plan: a way for each bucket.
        profile: of the backward pass.
        network: links and cores.
        costs: of each bucket on each way in the plan.
    """
    ways = [plain(profile.bytes[i]) if way is None else costs[way][i] for i, way in enumerate(plan)]
    found = simulate(profile, ways, network, list(plan))
    return Option(plan, found.step_s, found.exposed_s)


def options(
    profile: Profile, network: Network, costs: Mapping[Scheme, Sequence[Stages]], *, mix: int = 3
) -> list[Option]:
    """Return every candidate, the best first: the shortest predicted step, or about as short and nearer to exact.

    Args:
        profile: of the backward pass.
        network: links and cores.
        costs: of each bucket, for each way that is allowed.
        mix: how many of the best candidates are refined bucket by bucket, with each other's ways.

    Example:
        >>> best = options(profile, network, costs)[0]
        >>> best.plan, best.step_s
    """
    count = len(profile.bytes)
    found = [predict((way,) * count, profile, network, costs) for way in (None, *costs)]
    found.sort(key=lambda one: one.step_s)
    alike = [one for one in found if one.step_s <= found[0].step_s * (1 + _ALIKE)]
    found = sorted(alike, key=lambda one: _fidelity(one.plan[0])) + found[len(alike) :]
    used = list(dict.fromkeys([one.plan[0] for one in found[:mix]] + [None]))
    mixed = _refined(found[0], used, lambda plan: predict(plan, profile, network, costs)) if count > 1 else found[0]
    if mixed.step_s < found[0].step_s * (1 - _ALIKE):
        found.insert(0, mixed)
    return found


def _fidelity(way: Scheme | None) -> int:
    return -1 if way is None else list(CATALOGUE).index(way.compressor)


def preferred(plans: Sequence[Plan], steps: Mapping[Plan, float]) -> Plan:
    """Return the plan with the shortest step, or one about as short and nearer to exact."""
    shortest = min(steps[plan] for plan in plans)
    alike = [plan for plan in plans if steps[plan] <= shortest * (1 + _ALIKE)]
    return min(alike, key=lambda plan: (max(map(_fidelity, plan)), steps[plan]))


def _refined(best: Option, ways: Sequence[Scheme | None], say: Callable[[Plan], Option]) -> Option:
    """Give single buckets other ways, the last ones first, as long as that pays."""
    # The last buckets are those that nothing hides.
    for index in reversed(range(len(best.plan))):
        for way in ways:
            if way == best.plan[index]:
                continue
            other = say((*best.plan[:index], way, *best.plan[index + 1 :]))
            if other.step_s < best.step_s * (1 - _LEAST):
                best = other
    return best


def worthwhile(found: Sequence[Option]) -> list[Option]:
    """Return the options that are predicted to beat plain DDP by more than `WORTH`, best first."""
    plainly = next(one.step_s for one in found if not any(one.plan))
    return [one for one in found if one.step_s < plainly * (1 - WORTH)]


def mean_of(seen: Sequence[ObservedStep]) -> ObservedStep:
    """Return the mean over ranks of what each has seen; all have seen the same buckets."""
    return ObservedStep(
        seen[0].bytes,
        tuple(fmean(times) for times in zip(*(one.ready_s for one in seen), strict=True)),
        fmean(one.done_s for one in seen),
        fmean(one.step_s for one in seen),
        fmean(one.extra_s for one in seen),
        fmean(one.core_s for one in seen),
        fmean(one.own_s for one in seen),
    )

"""Which job gets how many replicas: the sizes with which the jobs of a cluster end soonest, on the whole.

    maximise  Σ cⱼ · sⱼ(Kⱼ) · life / (life + restart)      over sizes Kⱼ, within the GPUs of each kind

s is the speed-up over one replica, by the goodput that a job's own controller has fitted. c says what a second of a
job's remaining time is worth: with n jobs, the i-th longest is worth

    cᵢ = (i^e - (i-1)^e)^(1/e),   e = 1 / (1 - q)

which is optimal for jobs of speed-up K^q that are all there (heSRPT, Berg et al., Performance 2020,
https://arxiv.org/abs/1903.09346): the shortest goes first, and the others don't starve. The last factor is what a
change costs: a job stands still for its restart, and what it gains lasts until its end or the next arrivals.

Where a job does not say how long it is, the fitness of Pollux (OSDI 2021) stands in: the power mean of the speed-ups
over a fair share of the GPUs, with p = -1, so  maximise  Σ -1 / sⱼ.

Jobs that would miss their deadlines count more. Sizes are whole nodes, or parts of one: two jobs that share several
nodes slow each other down.

Put replicas on nodes: who keeps its number stays where it is, the others are packed onto as few nodes as can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel.cluster.jobs import Allocation, ClusterNode, JobView
from accel.errors import InvalidArgument
from accel.goodput.goodput import SpeedTable
from accel.goodput.job import EXPLORED, JobProfile

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """How sizes are chosen.

    Args:
        exponent: q in (0, 1): how well the jobs are taken to scale when their lengths are weighed.
        life_s: how long an allocation lasts at most, before other jobs come or go, s.
        keeps_links_apart: put no two jobs of several nodes on one node.

    Raises:
        InvalidArgument: if a value is out of its range.
    """

    exponent: float = 0.75
    life_s: float = 300.0
    keeps_links_apart: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.exponent < 1:
            raise InvalidArgument(f"exponent must be in (0, 1). Found: {self.exponent}")
        if not self.life_s > 0:
            raise InvalidArgument(f"life_s must be positive. Found: {self.life_s}")


class _Sizes(NamedTuple):
    """What a job could get of one kind of GPU."""

    kind: str
    replicas: NDArray[np.int64]
    rate: Floats
    """Base steps per second; of a job that has not run, those of one replica are 1."""


def allocate(
    jobs: Sequence[JobView],
    nodes: Sequence[ClusterNode],
    current: Allocation,
    now_s: float,
    options: PolicyOptions | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each job's replicas from now on.

    It depends on its arguments alone. Jobs that are not preemptible keep what they have.

    Args:
        jobs: that have not ended.
        nodes: that are there.
        current: what jobs have now; nodes that are gone, and jobs that have ended, are passed over.
        now_s: seconds on the clock of the jobs' submissions.
        options: how sizes are chosen.

    Returns:
        Jobs that must wait are left out.

    Raises:
        InvalidArgument: if two jobs or two nodes have one name.
    """
    chosen = options or PolicyOptions()
    for what, names in (("job", [job.name for job in jobs]), ("node", [node.name for node in nodes])):
        if len(set(names)) < len(names):
            raise InvalidArgument(f"each {what} must have a name of its own. Found: {sorted(names)}")
    there = {node.name for node in nodes}
    held = {name: given for name, given in current.items() if there.issuperset(given)}
    running = {job.name: held[job.name] for job in jobs if held.get(job.name)}
    fixed = {job.name for job in jobs if not job.is_preemptible and job.name in running}
    kinds = _kinds(nodes)
    room = {kind: sum(node.gpus for node in nodes if node.kind == kind) for kind in kinds}
    shares = {name: Share(_kind_of(running[name], nodes), len(running[name])) for name in fixed}
    for share in shares.values():
        room[share.kind] -= share.replicas
    movable = [job for job in jobs if job.name not in fixed]
    sizes = [_sizes(job, kinds, running.get(job.name, ())) for job in movable]
    # Lengths say nothing unless all are known: those of jobs that have not run yet will be.
    by_length = all(job.steps_left is not None for job in movable if job.profiles)
    fair = _fair_rates(sizes, sum(room.values()))
    worth = _worth(movable, sizes, fair, now_s, chosen, by_length=by_length)
    gains = [
        _gains(job, own, count, None if by_length else rate, running.get(job.name, ()), nodes, chosen)
        for job, own, count, rate in zip(movable, sizes, worth, fair, strict=True)
    ]
    best = _best_sizes(sizes, gains, room)
    shares |= {job.name: share for job, share in zip(movable, best, strict=True) if share is not None}
    return place(shares, nodes, running, fixed, keeps_links_apart=chosen.keeps_links_apart)


def _kinds(nodes: Sequence[ClusterNode]) -> dict[str, ClusterNode]:
    """Return each kind of GPU with its largest node."""
    kinds: dict[str, ClusterNode] = {}
    for node in nodes:
        if node.kind not in kinds or node.gpus > kinds[node.kind].gpus:
            kinds[node.kind] = node
    return kinds


def _kind_of(given: tuple[str, ...], nodes: Sequence[ClusterNode]) -> str:
    return next(node.kind for node in nodes if node.name == given[0])


# -- what each size would give ---------------------------------------------------------------------------------------


def _sizes(job: JobView, kinds: dict[str, ClusterNode], given: tuple[str, ...]) -> list[_Sizes]:
    """Return the sizes of a job: parts of a node, whole nodes, and what it has."""
    by_kind = []
    for kind, node in kinds.items():
        parts = range(1, min(node.gpus, job.max_replicas) + 1)
        whole = range(2 * node.gpus, job.max_replicas + 1, node.gpus)
        replicas = np.array(sorted({*parts, *whole, *([len(given)] if given else [])}), np.int64)
        replicas = replicas[(replicas >= job.min_replicas) & (replicas <= job.max_replicas)]
        if len(replicas):
            by_kind.append(_Sizes(kind, replicas, _rates(job, kind, kinds, replicas)))
    return by_kind


def _rates(job: JobView, kind: str, kinds: dict[str, ClusterNode], replicas: NDArray[np.int64]) -> Floats:
    """Return how fast a job would be; on a kind that it has not run on, by what it did on another."""
    node = kinds[kind]
    known = job.profiles.get(kind)
    if known is not None:
        return _believed(known, node.gpus, replicas)
    if not job.profiles:
        return node.speed * replicas.astype(float)
    other = next((each for each in job.profiles if each in kinds), next(iter(job.profiles)))
    measured_on = kinds[other].speed if other in kinds else 1.0
    return _believed(job.profiles[other], node.gpus, replicas) * node.speed / measured_on


def _believed(profile: JobProfile, per_node: int, replicas: NDArray[np.int64]) -> Floats:
    """Return a job's rates: beyond twice the replicas that it has had, nothing is known."""
    most = EXPLORED * profile.most_replicas
    table = _table(profile, per_node, max(int(replicas[-1]), most))
    return np.asarray(table.best(profile.noise).rate[np.minimum(replicas, most) - 1])


def _table(profile: JobProfile, per_node: int, most: int) -> SpeedTable:
    return _tabulated(profile.model, profile.base_batch, profile.limits, per_node, -(-most // per_node) * per_node)


@lru_cache(4096)
def _tabulated(model: object, base_batch: int, limits: object, per_node: int, most: int) -> SpeedTable:
    replicas = np.arange(1, most + 1)
    return SpeedTable(model, base_batch, limits, -(-replicas // per_node), replicas)  # type: ignore[arg-type]


# -- what it is worth ------------------------------------------------------------------------------------------------


def _fair_rates(sizes: Sequence[list[_Sizes]], room: int) -> list[float]:
    """Return how fast each job would be on an equal share of the GPUs; of many kinds, on its best."""
    share = max(room / max(len(sizes), 1), 1.0)
    return [
        max((float(np.interp(share, each.replicas, each.rate)) for each in own), default=0.0) or _LEAST for own in sizes
    ]


def _worth(
    jobs: Sequence[JobView],
    sizes: Sequence[list[_Sizes]],
    fair: Sequence[float],
    now_s: float,
    options: PolicyOptions,
    *,
    by_length: bool,
) -> Floats:
    """Return what a speed-up of 1 is worth, by job."""
    worth = _by_rank(jobs, sizes, options) if by_length else np.ones(len(jobs))
    for at, (job, rate) in enumerate(zip(jobs, fair, strict=True)):
        worth[at] *= job.weight
        if job.deadline_s is not None and job.steps_left is not None:
            needed_s = job.steps_left / rate
            worth[at] *= min(max(needed_s / max(job.deadline_s - now_s, 1.0), 1.0), _MOST_URGENT)
    return worth


def _by_rank(jobs: Sequence[JobView], sizes: Sequence[list[_Sizes]], options: PolicyOptions) -> Floats:
    left = np.array([_seconds_left(job, own) for job, own in zip(jobs, sizes, strict=True)])
    rank = np.empty(len(jobs))
    # Of equal ones the first to be submitted counts as the shortest.
    turns = np.arange(1, len(jobs) + 1)
    rank[np.lexsort((-turns, np.array([-job.submitted_s for job in jobs]), -left))] = turns
    power = 1 / (1 - options.exponent)
    # In logarithms: i^e is beyond any float for many jobs of nearly linear speed-up.
    step = power * np.log(rank) + np.log(-np.expm1(power * np.log1p(-1 / np.maximum(rank, 1.5))))
    return np.where(rank > 1, np.exp(step / power), 1.0)


_LEAST = 1e-3
"""Added to speed-ups, so that a job may also get nothing."""
_MOST_URGENT = 16.0
"""A deadline that can't be met counts no more than this."""


def _seconds_left(job: JobView, sizes: list[_Sizes]) -> float:
    """Return a job's remaining time on one replica; of one that has not run yet 0, so that it is soon known."""
    if job.steps_left is None or not sizes:
        return 0.0
    return job.steps_left / max(*(float(each.rate[0] / each.replicas[0]) for each in sizes), _LEAST)


def _gains(
    job: JobView,
    sizes: list[_Sizes],
    worth: float,
    fair: float | None,
    given: tuple[str, ...],
    nodes: Sequence[ClusterNode],
    options: PolicyOptions,
) -> list[Floats]:
    """Return what each size adds to the sum: by its speed-up over one replica, or over the `fair` rate."""
    if not sizes:
        return []
    one = max(float(each.rate[0] / each.replicas[0]) for each in sizes) or 1.0
    kind = _kind_of(given, nodes) if given else ""
    restart_s = max((profile.restart_s for profile in job.profiles.values()), default=0.0)
    gains = []
    for each in sizes:
        speed = each.rate / one
        life = np.full(len(speed), options.life_s)
        if job.steps_left is not None and job.profiles:
            life = np.minimum(life, np.maximum(job.steps_left / np.maximum(each.rate, 1e-12), 1.0))
        stays = (each.replicas == len(given)) & (each.kind == kind)
        speed = speed * np.where(stays, 1.0, life / (life + restart_s))
        gains.append(worth * (speed if fair is None else 1 / _LEAST - 1 / (speed * one / fair + _LEAST)))
    return gains


# -- the sizes that are best together --------------------------------------------------------------------------------


def _best_sizes(
    sizes: Sequence[list[_Sizes]], gains: Sequence[list[Floats]], room: dict[str, int]
) -> list[Share | None]:
    """Return the size of each job with which the sum is highest."""
    kind_of = _best_kinds(sizes, gains, room) if len(room) > 1 else [0 if own else None for own in sizes]
    shares: list[Share | None] = [None] * len(sizes)

    def fill(kind: str, members: list[tuple[int, int]]) -> None:
        used = sum(share.replicas for share in shares if share is not None and share.kind == kind)
        picked = _knapsack([(sizes[job][at].replicas, gains[job][at]) for job, at in members], room[kind] - used)
        for (job, _), replicas in zip(members, picked, strict=True):
            shares[job] = Share(kind, replicas) if replicas else None

    for kind in room:
        fill(kind, [(job, at) for job, at in enumerate(kind_of) if at is not None and sizes[job][at].kind == kind])
    for kind in room if len(room) > 1 else ():  # jobs that are alike choose the same kind: what is left of the others
        waiting = [job for job, share in enumerate(shares) if share is None]
        fill(kind, [(job, at) for job in waiting for at, each in enumerate(sizes[job]) if each.kind == kind])
    return shares


def _knapsack(jobs: Sequence[tuple[NDArray[np.int64], Floats]], most: int) -> list[int]:
    """Return the replicas of each job, 0 for none, with which the sum of gains is highest; exact.

    A multiple-choice knapsack, by dynamic programming over the number of GPUs.
    """
    best = np.zeros(most + 1)
    picks = np.zeros((len(jobs), most + 1), np.int64)
    for pick, (replicas, gains) in zip(picks, jobs, strict=True):
        before = best.copy()
        for size, gain in zip(replicas.tolist(), gains.tolist(), strict=True):
            if size > most:
                break
            with_it = before[: most + 1 - size] + gain
            better = with_it > best[size:] * (1 + 1e-12)
            best[size:][better] = with_it[better]
            pick[size:][better] = size
    left, picked = most, []
    for pick in picks[::-1]:
        picked.append(int(pick[left]))
        left -= picked[-1]
    return picked[::-1]


_ROUNDS = 60


def _best_kinds(sizes: Sequence[list[_Sizes]], gains: Sequence[list[Floats]], room: dict[str, int]) -> list[int | None]:
    """Return the kind of GPU of each job, as an index of its sizes: by prices at which the kinds are just used up.

    The prices are the multipliers of the kinds' capacities (Lagrangian relaxation, by subgradients): a job takes what
    is worth most to it beyond the price. Who takes nothing is put where it would lose least, and may get what is left.
    """
    able = [job for job, own in enumerate(sizes) if own]
    kinds: list[int | None] = [None] * len(sizes)
    if not able:
        return kinds
    # All sizes of all jobs in a row, those of a job side by side.
    flat = [(job, at) for job in able for at in range(len(sizes[job]))]
    names = {kind: number for number, kind in enumerate(room)}
    counts = [len(sizes[job][at].replicas) for job, at in flat]
    kind = np.repeat([names[sizes[job][at].kind] for job, at in flat], counts)
    index = np.repeat([at for _, at in flat], counts)
    replicas = np.concatenate([sizes[job][at].replicas for job, at in flat])
    gain = np.concatenate([gains[job][at] for job, at in flat])
    owner = np.repeat([job for job, _ in flat], counts)
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    lengths = np.diff([*starts, len(owner)])
    capacity = np.maximum(np.array(list(room.values()), float), 1.0)
    prices = np.zeros(len(room))
    taken = starts
    for number in range(_ROUNDS):
        net = gain - prices[kind] * replicas
        highest = np.maximum.reduceat(net, starts)
        candidates = np.flatnonzero(net == np.repeat(highest, lengths))
        taken = candidates[np.unique(owner[candidates], return_index=True)[1]]
        bought = taken[highest > 0]
        used = np.bincount(kind[bought], weights=replicas[bought], minlength=len(room))
        step = float(gain.max()) / capacity / (1 + number)
        prices = np.maximum(prices + step * (used - capacity) / capacity, 0.0)
    for at in taken:
        kinds[int(owner[at])] = int(index[at])
    return kinds


# -- where replicas go -------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """What a job is to get."""

    kind: str
    """Of GPU."""
    replicas: int


def place(
    shares: Mapping[str, Share],
    nodes: Sequence[ClusterNode],
    current: Allocation,
    fixed: Iterable[str] = (),
    *,
    keeps_links_apart: bool = False,
) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each job's replicas.

    A job of several nodes gets whole ones as far as there are any. Where the last free slots are scattered, jobs of one
    node are moved together, all but the `fixed` ones, to free a whole node.

    Args:
        shares: by job; together at most what the nodes have of each kind.
        nodes: of the cluster, spot nodes among them: they are used last.
        current: where jobs run now.
        fixed: jobs that must stay where they are.
        keeps_links_apart: put no two jobs of several nodes on one node, where they would share its link; replicas that
            find no room then are left out.

    Returns:
        Jobs with no replica are left out. Replicas of one node stand side by side.
    """
    board = _Board(nodes, keeps_links_apart)
    staying = [name for name, given in current.items() if name in shares and _is_same(shares[name], given, board)]
    for name in staying:
        board.put(name, current[name])
    held = set(fixed)
    waiting = sorted(shares.keys() - board.given.keys(), key=lambda name: (-shares[name].replicas, name))
    while waiting:
        name = waiting.pop(0)
        kind, replicas = shares[name]
        while (spots := board.fitting(kind, replicas)) is None:
            moved = board.cleared(kind, held)
            if not moved:
                break
            waiting = sorted({*waiting, *moved}, key=lambda each: (-shares[each].replicas, each))
            held.update(moved)  # once is enough: a round must end
        board.put(name, spots if spots is not None else board.scattered(kind, replicas))
    return {name: given for name, given in board.given.items() if given}


def _is_same(share: Share, given: tuple[str, ...], board: _Board) -> bool:
    return len(given) == share.replicas and all(
        name in board.nodes and board.nodes[name].kind == share.kind for name in given
    )


class _Board:
    """Nodes with what is free on them."""

    def __init__(self, nodes: Sequence[ClusterNode], keeps_links_apart: bool) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.free = {node.name: node.gpus for node in nodes}
        self.given: dict[str, tuple[str, ...]] = {}
        self._apart = keeps_links_apart

    def put(self, job: str, where: tuple[str, ...]) -> None:
        """Give a job its nodes."""
        self.given[job] = where
        for name in where:
            self.free[name] -= 1

    def fitting(self, kind: str, replicas: int) -> tuple[str, ...] | None:
        """Return the fullest node that has room for all, else whole nodes with the rest on the fullest that has room
        for it; None if there are none."""
        names = self._names(kind)
        single = [name for name in names if self.free[name] >= replicas]
        if single:
            return (min(single, key=self._fullest),) * replicas
        spots: list[str] = []
        for name in names:
            size = self.nodes[name].gpus
            if self.free[name] == size and size <= replicas - len(spots):
                spots += [name] * size
        rest = replicas - len(spots)
        if not rest:
            return tuple(spots)
        last = [name for name in self._linkable(names) if name not in spots and self.free[name] >= rest]
        if not last or not spots:
            return None
        return (*spots, *(min(last, key=self._fullest),) * rest)

    def scattered(self, kind: str, replicas: int) -> tuple[str, ...]:
        """Return the nodes with the most room, for as many replicas as they have."""
        spots: list[str] = []
        for name in sorted(self._linkable(self._names(kind)), key=lambda each: -self.free[each]):
            spots += [name] * min(self.free[name], replicas - len(spots))
        return tuple(spots)

    def cleared(self, kind: str, held: set[str]) -> list[str]:
        """Take the jobs off the node with the most room of those that only movable jobs of one node are on."""
        jobs: dict[str, list[str]] = {}
        for job, given in self.given.items():
            for name in set(given):
                jobs.setdefault(name, []).append(job)
        able = [
            name
            for name in self._names(kind)
            if 0 < self.free[name] < self.nodes[name].gpus
            and not any(job in held or len(set(self.given[job])) > 1 for job in jobs[name])
        ]
        if not able:
            return []
        chosen = max(able, key=lambda name: self.free[name])
        for job in jobs[chosen]:
            self.free[chosen] += len(self.given.pop(job))
        return jobs[chosen]

    def _names(self, kind: str) -> list[str]:
        """Return the nodes of a kind in the order in which they are used."""
        names = [name for name, node in self.nodes.items() if node.kind == kind]
        return sorted(names, key=lambda name: (self.nodes[name].is_spot, name))

    def _linkable(self, names: list[str]) -> list[str]:
        if not self._apart:
            return names
        linked = {name for given in self.given.values() if len(set(given)) > 1 for name in given}
        return [name for name in names if name not in linked]

    def _fullest(self, name: str) -> tuple[bool, int, str]:
        return self.nodes[name].is_spot, self.free[name], name

"""Put replicas on nodes: who keeps its number stays where it is, the others are packed onto as few nodes as can be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from accel.cluster.jobs import Allocation, ClusterNode


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

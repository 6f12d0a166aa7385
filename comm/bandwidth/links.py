"""Which ranks share a machine, and the groups in which the links between and inside machines are measured.

| link class | who communicates                                   | measures                                       |
|------------|----------------------------------------------------|------------------------------------------------|
| `intra`    | the ranks of each node, all nodes at the same time | memory, loopback, NVLink                       |
| `inter`    | the first rank of each node                        | one node's network card, used by nobody else   |
| `world`    | everyone                                           | both together                                  |

Where two of them are the same ranks only one is measured: on one node everything is `intra`, with one rank a node
everything is `inter`.

A node is what shares a running kernel (its boot id), a network namespace and a host name, see
`accel.comm.ranks.topology`: containers with addresses of their own are nodes of their own, since what they send to each
other passes a virtual network card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

LINKS = ("intra", "inter", "world")


@dataclass(frozen=True)
class LinkClass:
    """A link class: the sets of ranks that communicate at the same time."""

    name: str
    sets: tuple[tuple[int, ...], ...]
    """Global ranks; no rank is in two of them."""

    @property
    def size(self) -> int:
        """Ranks of the largest set: what n stands for."""
        return max(map(len, self.sets))

    def own(self, rank: int) -> tuple[int, ...]:
        """Return the set that `rank` is in, or () if it stands aside."""
        return next((ranks for ranks in self.sets if rank in ranks), ())


def links_of(nodes: Sequence[tuple[int, ...]]) -> list[LinkClass]:
    """List the link classes that differ: `intra` alone, `inter` alone, or all three.

    Args:
        nodes: ranks of each node.
    """
    total = sum(map(len, nodes))
    if len(nodes) == 1:
        return [LinkClass("intra", tuple(nodes))]
    inter = LinkClass("inter", (tuple(node[0] for node in nodes),))
    if total == len(nodes):
        return [inter]
    intra = LinkClass("intra", tuple(node for node in nodes if len(node) > 1))
    return [intra, inter, LinkClass("world", (tuple(range(total)),))]


def groups_of(links: list[LinkClass], backend: str, timeout: timedelta) -> dict[str, Any]:
    """Make the process groups of `links`; every rank of the job calls this together.

    Returns:
        For each link class this rank's group, None where it stands aside.
    """
    rank, own = dist.get_rank(), {}
    for link in links:
        groups = [dist.new_group(list(ranks), timeout=timeout, backend=backend) for ranks in link.sets]
        own[link.name] = next((group for group, ranks in zip(groups, link.sets, strict=True) if rank in ranks), None)
    return own


def sent_bytes(loopback: bool, root: Path = Path("/sys/class/net")) -> int | None:
    """Return the bytes this network namespace has sent so far, over `lo` or over everything else.

    None where the counters can't be read. Bridges and bonds count what their members count as well, so only interfaces
    without members below them are summed.
    """
    total, seen = 0, False
    try:
        interfaces = sorted(root.iterdir())
    except OSError:
        return None
    for interface in interfaces:
        if (interface.name == "lo") is not loopback or any(interface.glob("lower_*")):
            continue
        try:
            total += int((interface / "statistics/tx_bytes").read_text(encoding="ascii"))
            seen = True
        except (OSError, ValueError):
            continue
    return total if seen else None

"""Which ranks share a machine.

Under torchrun a host is one agent: GROUP_RANK names it and LOCAL_WORLD_SIZE says how many ranks it has. Otherwise a
host is one boot of one kernel seen through one network namespace, so that containers with addresses of their own count
as hosts, as they do for the network.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.profiler.errors import InvalidArgument


@dataclass(frozen=True)
class Topology:
    """Hosts and the ranks on each, in rank order; ranks are those within the group that reduces.

    Example:
        >>> Topology(((0, 1), (2, 3))).across(3)
        (1, 3)
    """

    hosts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if ranks != list(range(len(ranks))) or not all(self.hosts):
            raise InvalidArgument(
                f"hosts must hold each of the ranks 0, 1, … once and none may be empty, got {self.hosts}"
            )

    @property
    def size(self) -> int:
        """Return the number of ranks on all hosts."""
        return sum(map(len, self.hosts))

    @property
    def even(self) -> bool:
        """Return whether all hosts have as many ranks."""
        return len({len(host) for host in self.hosts}) == 1

    @property
    def by_hosts_pays(self) -> bool:
        """Return whether summing within hosts first sends less between them."""
        return self.even and len(self.hosts) > 1 and len(self.hosts[0]) > 1

    def host_of(self, rank: int) -> int:
        """Return the number of the host that `rank` is on."""
        return next(number for number, host in enumerate(self.hosts) if rank in host)

    def within(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the host of `rank`."""
        return self.hosts[self.host_of(rank)]

    def across(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same place on their hosts as `rank` does on its own."""
        self.check_even()
        place = self.within(rank).index(rank)
        return tuple(host[place] for host in self.hosts)

    def check_even(self) -> None:
        """Raise InvalidArgument unless all hosts have as many ranks."""
        if not self.even:
            sizes = ", ".join(f"{len(host)} on host {number}" for number, host in enumerate(self.hosts))
            raise InvalidArgument(
                f"a hierarchical all-reduce needs as many ranks on each host, got {sizes}; "
                "start as many everywhere or pass hierarchical=False"
            )


def identity(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what identifies this process's host; every rank's goes to `from_identities`."""
    namespace = Path("/proc/self/ns/net")
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [
        socket.gethostname(),
        boot.read_text(encoding="ascii").strip() if boot.exists() else "",
        str(namespace.stat().st_ino) if namespace.exists() else "",
    ]
    agent = environ.get("GROUP_RANK", "") if "LOCAL_WORLD_SIZE" in environ else ""
    return {"agent": agent, "machine": "/".join(parts)}


def from_identities(identities: Sequence[Mapping[str, str]]) -> Topology:
    """Return the topology of ranks 0, 1, … with these identities: by agent if every rank has one, else by machine."""
    return _by("agent", identities) if all(own["agent"] for own in identities) else by_machine(identities)


def by_machine(identities: Sequence[Mapping[str, str]]) -> Topology:
    """Return the topology of ranks 0, 1, … by kernel, network namespace and host name alone."""
    return _by("machine", identities)


def _by(key: str, identities: Sequence[Mapping[str, str]]) -> Topology:
    hosts: dict[str, list[int]] = {}
    for rank, own in enumerate(identities):
        hosts.setdefault(own[key], []).append(rank)
    return Topology(tuple(tuple(ranks) for ranks in hosts.values()))

"""What an NCCL log says, and the checks of it: the text that NCCL_DEBUG=INFO writes, of any number of ranks and hosts.

    node1:3319:3329 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
    host  pid  tid  gpu          channel        from     to              transport

Lines of torchrun and of mpirun carry a prefix (`[rank0]:`, `[1,0]<stderr>:`), which is skipped. Formats are those of
NCCL 2.4 to 2.28: src/transport/{net,p2p,shm,net_socket}.cc, src/graph/{topo,paths}.cc, src/init.cc.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from accel.comm.doctor.host import ERROR, INFO, WARN, Hit
from accel.comm.doctor.settings import stays_on_node
from accel.profiler.errors import InvalidArgument

_LINE = re.compile(r"(?:(?:(?P<host>[\w.-]+):\d+:\d+ )?\[\d+\] (?:\S+:\d+ )?)?NCCL (?P<kind>INFO|WARN) (?P<text>.*)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_SETTING = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+?)\.?$")
_CHANNEL = re.compile(r"Channel (\d+)(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[(send|receive)\] )?via (\S+)")
_RING = re.compile(r"Channel \d+/(\d+) :(?! \d+\[)")
_COUNTS = re.compile(r"(\d+) coll channels")
_NETWORK = re.compile(r"^Using network (\S+)")
_RANK = re.compile(r"comm 0x[\da-f]+ rank (\d+) n[rR]anks (\d+)")
_THREADS = re.compile(r"NET/Socket: Using (\d+) threads and (\d+) sockets per thread")
_INTERFACES = re.compile(r"^NET/Socket : Using ?(.*)")
_NAME = re.compile(r"(?:\[\d+\])?([\w.@-]+):(?=\[?[\da-fA-F.:]+\]?<)")
_TROUBLES = {
    "gdr": re.compile(r"GPU Direct RDMA Disabled"),
    "no device": re.compile(r"NET/IB : No device found"),
    "p2p": re.compile(r"P2P is disabled between"),
    "acs": re.compile(r"ACS is enabled"),
    "shm": re.compile(r"^WARN .*shared memory|failed to extend /dev/shm", re.IGNORECASE),
    "mismatch": re.compile(r"version mismatch|Mismatched NCCL version", re.IGNORECASE),
    "plugin": re.compile(r"^\w+ NET/Plugin.*(failed|could not|cannot open|incompatible)", re.IGNORECASE),
}
"""What goes wrong → lines that say so, after INFO or WARN."""


class NotALog(InvalidArgument):
    """The text holds no line of NCCL."""


class LogLine(NamedTuple):
    """A line of NCCL's: the host where it says one, INFO or WARN, and the rest."""

    host: str
    kind: str
    text: str


@dataclass(frozen=True)
class NcclLog:
    """The lines of a log, and what they say."""

    lines: tuple[LogLine, ...]
    versions: frozenset[str]
    """Of NCCL."""

    def matches(self, pattern: re.Pattern[str]) -> list[tuple[str, re.Match[str]]]:
        """Return the lines that hold a pattern, each with its host."""
        return [(line.host, match) for line in self.lines if (match := pattern.search(line.text))]

    @property
    def hosts(self) -> set[str]:
        """Return the names of all hosts."""
        return {line.host for line in self.lines} - {""}

    @cached_property
    def settings(self) -> dict[str, str]:
        """Return the environment variables that NCCL says it read."""
        return {match[1]: match[2] for _, match in self.matches(_SETTING)}

    @property
    def host_of(self) -> dict[int, str]:
        """Return the host of each rank."""
        return {int(match[1]): host for host, match in self.matches(_RANK)}

    @cached_property
    def connections(self) -> list[tuple[int, int, str]]:
        """Return (rank, rank, transport) of each connection: `NET/Socket`, `NET/IB`, `NET/IB/GDRDMA`, `P2P`, `SHM`."""
        return [(int(match[2]), int(match[3]), _transport(match[5])) for _, match in self.matches(_CHANNEL)]

    @property
    def transports(self) -> Counter[str]:
        """Return the number of connections by transport."""
        return Counter(transport for *_, transport in self.connections)

    @property
    def interfaces(self) -> dict[str, set[str]]:
        """Return the interfaces chosen for data over sockets, each with its hosts."""
        chosen: dict[str, set[str]] = {}
        for host, match in self.matches(_INTERFACES):
            for name in _NAME.findall(match[1]):
                chosen.setdefault(name, set()).add(host)
        return chosen

    def trouble(self, name: str) -> list[str]:
        """Return the lines that say that something of `_TROUBLES` goes wrong."""
        return [line.text for line in self.lines if _TROUBLES[name].search(f"{line.kind} {line.text}")]


def _transport(via: str) -> str:
    kind, *rest = via.split("/")
    if kind != "NET":
        return kind
    return f"NET/{rest[0].split('(')[0] if rest else ''}{'/GDRDMA' if 'GDRDMA' in via else ''}"


def read(path: Path) -> NcclLog:
    """Read a log file.

    Raises:
        OSError: if it can't be read.
        NotALog: if it holds no line of NCCL.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        return parse(file)


def parse(lines: Iterable[str]) -> NcclLog:
    """Take NCCL's lines out of a log.

    Raises:
        NotALog: if no line is NCCL's.
    """
    taken, versions = [], set()
    for line in lines:
        if version := _VERSION.search(line):
            versions.add(version[1])
        if match := _LINE.search(line):
            taken.append(LogLine(match["host"] or "", match["kind"], match["text"].strip()))
    if not taken and not versions:
        raise NotALog("it holds no line of NCCL; run with NCCL_DEBUG=INFO and give what that prints")
    return NcclLog(tuple(taken), frozenset(versions))


_QUOTED = 3


def _quoted(lines: Iterable[str]) -> str:
    unique = list(dict.fromkeys(lines))
    more = f" (and {len(unique) - _QUOTED} more)" if len(unique) > _QUOTED else ""
    return f"log: {'; '.join(unique[:_QUOTED])}{more}"


def quoting(trouble: str) -> Callable[[NcclLog], Iterator[Hit]]:
    """Return what quotes the lines of one of `_TROUBLES`."""

    def look(log: NcclLog) -> Iterator[Hit]:
        if lines := log.trouble(trouble):
            yield Hit(_quoted(lines))

    return look


def _is_over_sockets(log: NcclLog) -> bool:
    return {match[1] for _, match in log.matches(_NETWORK)} == {"Socket"}


def log_tcp(log: NcclLog) -> Iterator[Hit]:
    """Connections via NET/Socket, or `Using network Socket` between several hosts."""
    count = log.transports["NET/Socket"]
    if count or (_is_over_sockets(log) and len(log.hosts) > 1):
        no_device = bool(log.trouble("no device"))
        adapter = "NET/IB : No device found" if no_device else "no word of an InfiniBand device"
        level = WARN if no_device or "NCCL_IB_DISABLE" in log.settings else INFO
        yield Hit(f"log: {count} connections via NET/Socket; {adapter}", level=level)


def log_socket_threads(log: NcclLog) -> Iterator[Hit]:
    """NET/Socket is used and NCCL names no helper threads."""
    if log.transports["NET/Socket"] and not log.matches(_THREADS):
        yield Hit("log: via NET/Socket, and no line 'NET/Socket: Using N threads and M sockets per thread'")


def log_channels(log: NcclLog) -> Iterator[Hit]:
    """NCCL made one channel for a job that uses the network."""
    channels = {int(match[1]) for pattern in (_RING, _COUNTS) for _, match in log.matches(pattern)}
    if channels == {1} and any(name.startswith("NET/") for name in log.transports):
        yield Hit("log: 1 channel")


def log_interface(log: NcclLog) -> Iterator[Hit]:
    """`NET/Socket : Using [0]docker0`, lo or virbr0."""
    if names := [name for name in log.interfaces if stays_on_node(name)]:
        yield Hit(f"log: NET/Socket : Using {', '.join(names)}", level=ERROR if len(log.hosts) > 1 else INFO)


def log_interfaces_differ(log: NcclLog) -> Iterator[Hit]:
    """No interface was chosen by all hosts that chose one."""
    hosts = {host for chosen in log.interfaces.values() for host in chosen}
    if len(hosts) > 1 and hosts not in log.interfaces.values():
        choices = (f"{name} on {', '.join(sorted(chosen))}" for name, chosen in sorted(log.interfaces.items()))
        yield Hit(f"log: {', '.join(choices)}")


def log_gdr(log: NcclLog) -> Iterator[Hit]:
    """`GPU Direct RDMA Disabled`, or connections via NET/IB without /GDRDMA."""
    far = "GPU and card are far apart: NCCL_NET_GDR_LEVEL=PHB or SYS allows it; measure, it may not be faster"
    disabled = log.trouble("gdr")
    fix = far if any("distance" in line for line in disabled) else ""
    if disabled and not _is_over_sockets(log):
        yield Hit(_quoted(disabled), fix=fix)
    elif without := log.transports["NET/IB"]:
        with_gdr = log.transports["NET/IB/GDRDMA"]
        yield Hit(f"log: {without} connections via NET/IB without /GDRDMA, {with_gdr} with it", fix=fix)


def log_p2p(log: NcclLog) -> Iterator[Hit]:
    """`P2P is disabled between`, or connections via SHM and none via P2P."""
    if log.trouble("p2p"):
        yield from quoting("p2p")(log)
    elif log.transports["SHM"] and not log.transports["P2P"]:
        yield Hit(f"log: {log.transports['SHM']} connections via SHM, none via P2P")


def log_local_net(log: NcclLog) -> Iterator[Hit]:
    """A connection between two ranks of one host is via NET/."""
    hosts = log.host_of
    pairs = [(a, b) for a, b, transport in log.connections if transport.startswith("NET/") and a != b]
    if near := sum(bool(hosts.get(a)) and hosts.get(a) == hosts.get(b) for a, b in pairs):
        yield Hit(f"log: {near} connections via NET/ between ranks of one host")


def log_versions(log: NcclLog) -> Iterator[Hit]:
    """Two versions in one log, or NCCL's own word of a mismatch."""
    if log.trouble("mismatch"):
        yield from quoting("mismatch")(log)
    elif len(log.versions) > 1:
        yield Hit(f"log: NCCL {', '.join(sorted(log.versions))}")


def log_plugin(log: NcclLog) -> Iterator[Hit]:
    """NET/Plugin says failed, and NCCL_NET_PLUGIN asked for one."""
    asked = log.settings.keys() & {"NCCL_NET_PLUGIN", "NCCL_NET"}
    for hit in quoting("plugin")(log):
        yield hit._replace(level=WARN if asked else INFO)


def log_warnings(log: NcclLog) -> Iterator[Hit]:
    """Lines with NCCL WARN that no other check explains."""
    others = Counter(
        line.text
        for line in log.lines
        if line.kind == "WARN" and not any(one.search(f"WARN {line.text}") for one in _TROUBLES.values())
    )
    if others:
        yield Hit(_quoted(f"{text} ({n} times)" if n > 1 else text for text, n in others.most_common()))

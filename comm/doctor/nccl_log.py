"""What an NCCL log says, and the checks of it: the text that NCCL_DEBUG=INFO writes, of any number of ranks and hosts.

    node1:3319:3329 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
    host  pid  tid  gpu          channel        from     to              transport

Lines of torchrun and of mpirun carry a prefix (`[rank0]:`, `[1,0]<stderr>:`), which is skipped. Formats are those of
NCCL 2.4 to 2.28: src/transport/{net,p2p,shm,net_socket}.cc, src/graph/{topo,paths}.cc, src/init.cc.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from accel.comm.doctor.host import ERROR, INFO, WARN, Hit
from accel.comm.doctor.settings import stays_on_node
from accel.profiler.errors import InvalidArgument

_LINE = re.compile(r"(?:(?P<host>[\w.-]+):\d+:\d+ )?\[\d+\] (?P<where>\S+:\d+ )?NCCL (?P<kind>INFO|WARN) (?P<text>.*)")
_BARE = re.compile(r"NCCL (?P<kind>INFO|WARN) (?P<text>.*)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_SETTING = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+?)\.?$")
_CHANNEL = re.compile(r"Channel (\d+)(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[(send|receive)\] )?via (\S+)")
_RING = re.compile(r"Channel \d+/(\d+) :")
_COUNTS = re.compile(r"(\d+) coll channels")
_RANK = re.compile(r"comm 0x[\da-f]+ rank (\d+) n[rR]anks (\d+)")
_THREADS = re.compile(r"NET/Socket: Using (\d+) threads and (\d+) sockets per thread")
_INTERFACES = re.compile(r"NET/Socket : Using ?(.*)")
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
"""What goes wrong → lines that say so, after INFO or WARN; the first that fits counts."""


class NotALog(InvalidArgument):
    """The text holds no line of NCCL."""


@dataclass
class NcclLog:
    """What a log says; empty fields where the log says nothing."""

    lines: int = 0
    """Lines of NCCL."""
    hosts: set[str] = field(default_factory=set)
    host_of: dict[int, str] = field(default_factory=dict)
    """Rank → host."""
    versions: set[str] = field(default_factory=set)
    """Of NCCL."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables that NCCL says it read."""
    network: set[str] = field(default_factory=set)
    """`Socket`, `IB` or a plugin's name."""
    interfaces: dict[str, set[str]] = field(default_factory=dict)
    """Interface chosen for data over sockets → hosts."""
    channels: set[int] = field(default_factory=set)
    """Numbers of channels of a communicator."""
    transports: Counter[str] = field(default_factory=Counter)
    """`NET/Socket`, `NET/IB`, `NET/IB/GDRDMA`, `P2P`, `SHM` → connections."""
    local_net: int = 0
    """Connections between two ranks of one host that go through the network."""
    socket_threads: tuple[int, int] | None = None
    """Helper threads and sockets per thread, where NCCL says them."""
    troubles: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Of `_TROUBLES` → its lines."""
    warnings: Counter[str] = field(default_factory=Counter)
    """Other lines with WARN → how often."""


def read(path: Path) -> NcclLog:
    """Read a log file.

    Raises:
        OSError: if it can't be read.
        NotALog: if it holds no line of NCCL.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        return parse(file)


def parse(lines: Iterable[str]) -> NcclLog:
    """Collect what the lines of a log say.

    Raises:
        NotALog: if no line is NCCL's.
    """
    log = NcclLog()
    nets: list[tuple[int, int]] = []
    for line in lines:
        if version := _VERSION.search(line):
            log.lines += 1
            log.versions.add(version[1])
        match = _LINE.search(line) or _BARE.search(line)
        if match is None:
            continue
        log.lines += 1
        host = match.groupdict().get("host") or ""
        if host:
            log.hosts.add(host)
        _take(log, host, match["kind"], match["text"].strip(), nets)
    if not log.lines:
        raise NotALog("it holds no line of NCCL; run with NCCL_DEBUG=INFO and give what that prints")
    hosts = log.host_of
    log.local_net = sum(bool(hosts.get(a)) and hosts.get(a) == hosts.get(b) and a != b for a, b in nets)
    return log


def _take(log: NcclLog, host: str, kind: str, text: str, nets: list[tuple[int, int]]) -> None:
    if setting := _SETTING.search(text):
        log.settings[setting[1]] = setting[2]
    if rank := _RANK.search(text):
        log.host_of[int(rank[1])] = host
    if text.startswith("Using network "):
        log.network.add(text.removeprefix("Using network ").strip())
    if threads := _THREADS.search(text):
        log.socket_threads = int(threads[1]), int(threads[2])
    if chosen := _INTERFACES.match(text):
        for name in _NAME.findall(chosen[1]):
            log.interfaces.setdefault(name, set()).add(host)
    if channel := _CHANNEL.search(text):
        _channel(log, channel, nets)
    elif ring := _RING.search(text):
        log.channels.add(int(ring[1]))
    if counts := _COUNTS.search(text):
        log.channels.add(int(counts[1]))
    _trouble(log, kind, text)


def _channel(log: NcclLog, channel: re.Match[str], nets: list[tuple[int, int]]) -> None:
    via = channel[5]
    parts = via.split("/")
    if parts[0] == "NET":
        gdr = "/GDRDMA" if "GDRDMA" in via else ""
        log.transports[f"NET/{parts[1].split('(')[0] if len(parts) > 1 else ''}{gdr}"] += 1
        nets.append((int(channel[2]), int(channel[3])))
    else:
        log.transports[parts[0]] += 1


def _trouble(log: NcclLog, kind: str, text: str) -> None:
    for name, pattern in _TROUBLES.items():
        if pattern.search(f"{kind} {text}"):
            log.troubles[name].append(text)
            return
    if kind == "WARN":
        log.warnings[text] += 1


_QUOTED = 3


def _quoted(lines: Iterable[str]) -> Hit:
    unique = list(dict.fromkeys(lines))
    more = f" (and {len(unique) - _QUOTED} more)" if len(unique) > _QUOTED else ""
    return Hit(f"log: {'; '.join(unique[:_QUOTED])}{more}")


def log_tcp(log: NcclLog) -> Iterator[Hit]:
    """Connections via NET/Socket, or `Using network Socket` between several hosts."""
    count = log.transports["NET/Socket"]
    if count or (log.network == {"Socket"} and len(log.hosts) > 1):
        no_device = bool(log.troubles["no device"])
        adapter = "NET/IB : No device found" if no_device else "no word of an InfiniBand device"
        level = WARN if no_device or "NCCL_IB_DISABLE" in log.settings else INFO
        yield Hit(f"log: {count} connections via NET/Socket; {adapter}", level=level)


def log_socket_threads(log: NcclLog) -> Iterator[Hit]:
    """NET/Socket is used and NCCL names no helper threads."""
    if log.transports["NET/Socket"] and log.socket_threads is None:
        yield Hit("log: via NET/Socket, and no line 'NET/Socket: Using N threads and M sockets per thread'")


def log_channels(log: NcclLog) -> Iterator[Hit]:
    """NCCL made one channel for a job that uses the network."""
    connections = sum(count for name, count in log.transports.items() if name.startswith("NET/"))
    if connections and log.channels and max(log.channels) == 1:
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
    disabled = log.troubles["gdr"]
    fix = far if any("distance" in line for line in disabled) else ""
    if disabled and log.network != {"Socket"}:
        yield Hit(_quoted(disabled).evidence, fix=fix)
    elif without := log.transports["NET/IB"]:
        with_gdr = log.transports["NET/IB/GDRDMA"]
        yield Hit(f"log: {without} connections via NET/IB without /GDRDMA, {with_gdr} with it", fix=fix)


def log_p2p(log: NcclLog) -> Iterator[Hit]:
    """`P2P is disabled between`, or connections via SHM and none via P2P."""
    if log.troubles["p2p"]:
        yield _quoted(log.troubles["p2p"])
    elif log.transports["SHM"] and not log.transports["P2P"]:
        yield Hit(f"log: {log.transports['SHM']} connections via SHM, none via P2P")


def log_local_net(log: NcclLog) -> Iterator[Hit]:
    """A connection between two ranks of one host is via NET/."""
    if log.local_net:
        yield Hit(f"log: {log.local_net} connections via NET/ between ranks of one host")


def log_shm(log: NcclLog) -> Iterator[Hit]:
    """A warning about /dev/shm."""
    if log.troubles["shm"]:
        yield _quoted(log.troubles["shm"])


def log_acs(log: NcclLog) -> Iterator[Hit]:
    """`In many cases this error occurs when ACS is enabled`."""
    if log.troubles["acs"]:
        yield Hit("log: HINT: ... when ACS is enabled")


def log_versions(log: NcclLog) -> Iterator[Hit]:
    """Two versions in one log, or NCCL's own word of a mismatch."""
    if log.troubles["mismatch"]:
        yield _quoted(log.troubles["mismatch"])
    elif len(log.versions) > 1:
        yield Hit(f"log: NCCL {', '.join(sorted(log.versions))}")


def log_plugin(log: NcclLog) -> Iterator[Hit]:
    """NET/Plugin says failed, and NCCL_NET_PLUGIN asked for one."""
    if log.troubles["plugin"]:
        asked = log.settings.keys() & {"NCCL_NET_PLUGIN", "NCCL_NET"}
        yield Hit(_quoted(log.troubles["plugin"]).evidence, level=WARN if asked else INFO)


def log_warnings(log: NcclLog) -> Iterator[Hit]:
    """Lines with NCCL WARN that no other check explains."""
    if log.warnings:
        yield _quoted(f"{text} ({n} times)" if n > 1 else text for text, n in log.warnings.most_common())

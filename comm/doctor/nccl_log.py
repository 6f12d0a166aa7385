"""What an NCCL log says: the text that NCCL_DEBUG=INFO writes, of any number of ranks and hosts.

    node1:3319:3329 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
    host  pid  tid  gpu          channel        from     to              transport

Lines of torchrun and of mpirun carry a prefix (`[rank0]:`, `[1,0]<stderr>:`), which is skipped. Formats are those of
NCCL 2.4 to 2.28: src/transport/{net,p2p,shm,net_socket}.cc, src/graph/{topo,paths}.cc, src/init.cc.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

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
    versions: dict[str, set[str]] = field(default_factory=dict)
    """NCCL version → hosts that say it."""
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
            prefixed = _LINE.search(line)
            log.versions.setdefault(version[1], set()).add((prefixed and prefixed["host"]) or "")
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

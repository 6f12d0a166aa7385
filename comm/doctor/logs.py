"""Checks of an NCCL log: what NCCL decided in a run that has been."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from accel.comm.doctor.checks import ERROR, INFO, WARN, Hit
from accel.comm.doctor.nccl_log import NcclLog
from accel.comm.doctor.settings import stays_on_node

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

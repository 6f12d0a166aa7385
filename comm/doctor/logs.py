"""Checks of an NCCL log: what NCCL decided in a run that has been."""

from __future__ import annotations

from collections.abc import Iterator

from accel.comm.doctor.checks import ERROR, INFO, WARN, Found, check
from accel.comm.doctor.nccl_log import NcclLog

_SHOWN = 3


def _some(lines: list[str]) -> str:
    unique = list(dict.fromkeys(lines))
    more = f" (and {len(unique) - _SHOWN} more)" if len(unique) > _SHOWN else ""
    return "; ".join(unique[:_SHOWN]) + more


@check(
    "log_tcp",
    WARN,
    "nodes talk over TCP",
    costs="bytes go GPU, host memory, kernel, card; all there is without RDMA cards, else the largest loss of all",
    of_log=True,
)
def log_tcp(log: NcclLog) -> Iterator[Found]:
    """Connections via NET/Socket, or `Using network Socket` between several hosts."""
    count = log.transports["NET/Socket"]
    if not count and not (log.network == {"Socket"} and len(log.hosts) > 1):
        return
    found = "NET/IB : No device found" if log.no_ib_device else "no word of an InfiniBand device"
    yield Found(
        f"log: {count} connections via NET/Socket; {found}",
        "with RDMA cards: look at drivers, /dev/infiniband in the container, NCCL_IB_HCA. Without: compress "
        "gradients between nodes",
        level=WARN if log.no_ib_device or "NCCL_IB_DISABLE" in log.settings else INFO,
    )


@check(
    "log_socket_threads",
    WARN,
    "one TCP flow per channel",
    costs="as socket_threads: one core and one flow carry a channel (1.85 instead of 3.75 GB/s in nccl#209)",
    of_log=True,
)
def log_socket_threads(log: NcclLog) -> Iterator[Found]:
    """NET/Socket is used and NCCL names no helper threads."""
    if log.transports["NET/Socket"] and log.socket_threads is None:
        yield Found(
            "log: via NET/Socket, and no line 'NET/Socket: Using N threads and M sockets per thread'",
            "export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 (product at most 64)",
        )


@check(
    "log_channels",
    INFO,
    "a single channel",
    costs="one channel is one flow: NCCL is as fast as its slowest socket times their number (nccl-tests#83)",
    of_log=True,
)
def log_channels(log: NcclLog) -> Iterator[Found]:
    """NCCL made one channel for a job that uses the network."""
    nets = sum(count for name, count in log.transports.items() if name.startswith("NET/"))
    if nets and log.channels and max(log.channels) == 1:
        yield Found("log: 1 channel", "unset NCCL_MAX_NCHANNELS, or export NCCL_MIN_NCHANNELS=4", level=WARN)


@check(
    "log_interface",
    ERROR,
    "NCCL chose loopback or a container bridge",
    costs="other nodes can't be reached over it",
    of_log=True,
)
def log_interface(log: NcclLog) -> Iterator[Found]:
    """`NET/Socket : Using [0]docker0`, lo or virbr0."""
    bad = [name for name in log.interfaces if name == "lo" or name.startswith(("docker", "virbr"))]
    if bad:
        level = ERROR if len(log.hosts) > 1 else INFO
        yield Found(f"log: NET/Socket : Using {', '.join(bad)}", "export NCCL_SOCKET_IFNAME=<interface>", level)


@check(
    "log_interfaces_differ",
    WARN,
    "hosts chose differently named interfaces",
    costs="if they are not on one network the job hangs; if one is slower, all wait for it",
    of_log=True,
)
def log_interfaces_differ(log: NcclLog) -> Iterator[Found]:
    """No interface was chosen by all hosts that chose one."""
    hosts = {host for chosen in log.interfaces.values() for host in chosen}
    if len(hosts) > 1 and not any(chosen == hosts for chosen in log.interfaces.values()):
        seen = ", ".join(f"{name} on {', '.join(sorted(chosen))}" for name, chosen in sorted(log.interfaces.items()))
        yield Found(f"log: {seen}", "export NCCL_SOCKET_IFNAME with the right one on each host", level=INFO)


@check(
    "log_gdr",
    WARN,
    "GPUDirect RDMA is not used",
    costs="GPU memory is copied through host memory: 33 instead of 93 GB/s on average in nccl#1412",
    of_log=True,
)
def log_gdr(log: NcclLog) -> Iterator[Found]:
    """`GPU Direct RDMA Disabled`, or connections via NET/IB without /GDRDMA."""
    fix = "load nvidia-peermem or use DMA-BUF; accel doctor on that node says which is missing"
    if log.distance:
        fix = "GPU and card are far apart: NCCL_NET_GDR_LEVEL=PHB or SYS allows it; measure, it may not be faster"
    if log.gdr_disabled and log.network != {"Socket"}:
        yield Found(f"log: {_some(list(log.gdr_disabled.values()))}", fix)
    elif log.transports["NET/IB"]:
        with_gdr = log.transports["NET/IB/GDRDMA"]
        yield Found(f"log: {log.transports['NET/IB']} connections via NET/IB without /GDRDMA, {with_gdr} with it", fix)


@check(
    "log_p2p",
    WARN,
    "GPUs of one node don't talk to each other directly",
    costs="traffic inside the node goes through host memory: PCIe twice, instead of NVLink or PCIe once",
    of_log=True,
)
def log_p2p(log: NcclLog) -> Iterator[Found]:
    """`P2P is disabled between`, or connections via SHM and none via P2P."""
    fix = "nvidia-smi topo -p2p r shows which pairs could; look at ACS, IOMMU, NCCL_P2P_DISABLE, NCCL_P2P_LEVEL"
    if log.p2p_disabled:
        yield Found(f"log: {_some(log.p2p_disabled)}", fix)
    elif log.transports["SHM"] and not log.transports["P2P"]:
        yield Found(f"log: {log.transports['SHM']} connections via SHM, none via P2P", fix)


@check(
    "log_local_net",
    WARN,
    "GPUs of one node talk over the network",
    costs="traffic that could stay in memory goes through the network card or loopback TCP",
    of_log=True,
)
def log_local_net(log: NcclLog) -> Iterator[Found]:
    """A connection between two ranks of one host is via NET/."""
    if log.local_net:
        yield Found(
            f"log: {log.local_net} connections via NET/ between ranks of one host",
            "unset NCCL_SHM_DISABLE and NCCL_P2P_DISABLE; give the containers of a node one IPC namespace",
        )


@check(
    "log_shm",
    ERROR,
    "shared memory could not be had",
    costs="the job ends with 'unhandled system error', or ranks of one node fall back to the network",
    of_log=True,
)
def log_shm(log: NcclLog) -> Iterator[Found]:
    """A warning about /dev/shm."""
    if log.shm_failed:
        yield Found(f"log: {_some(log.shm_failed)}", "docker run --ipc=host or --shm-size=16g")


@check(
    "log_acs",
    WARN,
    "NCCL suspects ACS",
    costs="GPUDirect RDMA breaks or slows down where PCIe bridges redirect peer traffic (nccl#489)",
    of_log=True,
)
def log_acs(log: NcclLog) -> Iterator[Found]:
    """`In many cases this error occurs when ACS is enabled`."""
    if log.acs_hint:
        yield Found(
            "log: HINT: ... when ACS is enabled", "switch ACS off in the BIOS; accel doctor as root shows where"
        )


@check(
    "log_versions",
    ERROR,
    "ranks run different versions of NCCL",
    costs="they can't form a communicator, or hang in it",
    of_log=True,
)
def log_versions(log: NcclLog) -> Iterator[Found]:
    """Two versions in one log, or NCCL's own word of a mismatch."""
    if log.mismatch:
        yield Found(f"log: {_some(log.mismatch)}", "install one torch (it brings NCCL) on all nodes")
    elif len(log.versions) > 1:
        yield Found(f"log: NCCL {', '.join(sorted(log.versions))}", "install one torch (it brings NCCL) on all nodes")


@check(
    "log_plugin",
    WARN,
    "a network plugin could not be loaded",
    costs="the fast path of the cloud (EFA, TCPX, SHARP) is not used; without such a card it means nothing",
    of_log=True,
)
def log_plugin(log: NcclLog) -> Iterator[Found]:
    """NET/Plugin says failed, and NCCL_NET_PLUGIN asked for one."""
    if log.plugin_failed:
        asked = any(name in log.settings for name in ("NCCL_NET_PLUGIN", "NCCL_NET"))
        yield Found(
            f"log: {_some(log.plugin_failed)}",
            "put the plugin's folder into LD_LIBRARY_PATH, or unset NCCL_NET_PLUGIN",
            level=WARN if asked else INFO,
        )


@check(
    "log_warnings",
    WARN,
    "NCCL warned",
    costs="read them: a warning is what NCCL says before an error",
    of_log=True,
)
def log_warnings(log: NcclLog) -> Iterator[Found]:
    """Lines with NCCL WARN that no other check explains."""
    if log.warnings:
        lines = [f"{text} ({count} times)" if count > 1 else text for text, count in log.warnings.most_common()]
        yield Found(f"log: {_some(lines)}", "search the NCCL issues for the text")

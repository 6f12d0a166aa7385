"""Checks of environment variables, of this process and of those an NCCL log shows.

NCCL's meanings: docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; its limits and defaults:
src/transport/net_socket.cc and src/misc/socket.cc.
"""

from __future__ import annotations

from collections.abc import Iterator

from accel.comm.doctor.checks import ERROR, INFO, WARN, Found, check
from accel.comm.doctor.host import Host, NotSeen, matching

MAX_THREADS = 16
MAX_SOCKETS = 64
# PCI vendor → (helper threads, sockets per thread) that NCCL takes by itself; any other vendor gets (0, 1).
VENDOR_DEFAULTS = {"0x1d0f": (2, 8), "0x1ae0": (4, 1)}
VENDORS = {
    "0x1af4": "virtio",
    "0x15b3": "NVIDIA/Mellanox",
    "0x8086": "Intel",
    "0x14e4": "Broadcom",
    "0x1414": "Hyper-V",
}


def several_nodes(host: Host) -> bool:
    """Tell whether the environment is one of a job over several nodes."""
    world, local = host.whole("WORLD_SIZE"), host.whole("LOCAL_WORLD_SIZE")
    return bool(world and local and world > local)


def on(host: Host, name: str) -> bool:
    """Tell whether a switch of NCCL's is set to something but 0."""
    value = host.whole(name)
    return value is not None and value != 0


@check(
    "socket_threads",
    WARN,
    "one TCP flow per channel",
    costs=(
        "NCCL starts no helper thread and opens one socket per channel unless the card is of AWS or Google, so one "
        "core and one flow carry a channel. User reports: 1.85 GB/s, with 8 rings 3.75 GB/s (nccl#209); busbw falls "
        "from 5.2 to 1.1-1.5 GB/s from 32 MB on over 100 Gbit/s TCP (nccl#450)"
    ),
)
def socket_threads(host: Host) -> Iterator[Found]:
    """NCCL's default for this card's vendor is no helper thread, and nothing else is set."""
    if host.set("NCCL_SOCKET_NTHREADS") or host.set("NCCL_NSOCKS_PERTHREAD"):
        return
    if host.adapters() and not on(host, "NCCL_IB_DISABLE") and host.set("NCCL_NET").lower() != "socket":
        return
    for interface in host.need_chosen():
        vendor = host.read_or(f"/sys/class/net/{interface}/device/vendor")
        if vendor in VENDOR_DEFAULTS:
            continue
        file = f"/sys/class/net/{interface}/device/vendor"
        seen = f"{file}: {vendor} ({VENDORS.get(vendor, 'other')})" if vendor else f"{file}: not there"
        yield Found(
            f"{seen}; NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD unset",
            "export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4, then compare with nccl-tests (product at most 64)",
            level=WARN if host.gpus() else INFO,
        )


@check(
    "socket_limits",
    WARN,
    "more socket threads than NCCL takes",
    costs="NCCL cuts to 16 threads and 64 sockets and says so only at NCCL_DEBUG=WARN; each thread takes a core",
)
def socket_limits(host: Host) -> Iterator[Found]:
    """Threads over 16, or threads times sockets over 64, or something that is no number."""
    threads, sockets = host.whole("NCCL_SOCKET_NTHREADS"), host.whole("NCCL_NSOCKS_PERTHREAD")
    for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"):
        if host.set(name) and host.whole(name) is None:
            yield Found(host.where(name), f"set {name} to a whole number, such as 4", level=ERROR)
    if threads is not None and threads > MAX_THREADS:
        yield Found(host.where("NCCL_SOCKET_NTHREADS"), f"export NCCL_SOCKET_NTHREADS={MAX_THREADS} at most")
    elif threads and sockets and threads * sockets > MAX_SOCKETS:
        yield Found(
            f"{host.where('NCCL_SOCKET_NTHREADS')}, {host.where('NCCL_NSOCKS_PERTHREAD')}: {threads * sockets} sockets",
            f"export NCCL_NSOCKS_PERTHREAD={MAX_SOCKETS // threads}",
        )


@check(
    "socket_unused",
    WARN,
    "sockets per thread, but no thread",
    costs="sockets are multiplied by helper threads, of which there are none by default: the setting does nothing",
)
def socket_unused(host: Host) -> Iterator[Found]:
    """NCCL_NSOCKS_PERTHREAD is set, NCCL_SOCKET_NTHREADS is not (or 0), and the card's default is none."""
    if not host.whole("NCCL_NSOCKS_PERTHREAD") or host.whole("NCCL_SOCKET_NTHREADS"):
        return
    vendors = {host.read_or(f"/sys/class/net/{name}/device/vendor") for name in host.chosen()}
    if host.whole("NCCL_SOCKET_NTHREADS") == 0 or not vendors & set(VENDOR_DEFAULTS):
        threads = host.set("NCCL_SOCKET_NTHREADS") or "unset"
        yield Found(
            f"{host.where('NCCL_NSOCKS_PERTHREAD')}; NCCL_SOCKET_NTHREADS: {threads}",
            "export NCCL_SOCKET_NTHREADS=4 as well",
        )


@check(
    "interface_missing",
    ERROR,
    "an interface is named that is not there",
    costs="NCCL ends with 'no socket interface found', gloo with 'Unable to find interface'",
)
def interface_missing(host: Host) -> Iterator[Found]:
    """A variable names interfaces of which none is up here."""
    names = host.interfaces()
    if not names:
        raise NotSeen("/sys/class/net: no interface")
    there = f"up here: {', '.join(names)}"
    if (wanted := host.set("NCCL_SOCKET_IFNAME")) and not matching(names, wanted):
        yield Found(f"{host.where('NCCL_SOCKET_IFNAME')}; {there}", "name one of these in NCCL_SOCKET_IFNAME")
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        listed = [name.strip() for name in host.set(variable).split(",") if name.strip()]
        if missing := [name for name in listed if name not in names]:
            yield Found(
                f"{host.where(variable)}: {', '.join(missing)} missing; {there}",
                f"name one of these in {variable} (whole names, unlike NCCL's prefixes)",
            )


@check(
    "loopback",
    ERROR,
    "a job over several nodes would use loopback or a container bridge",
    costs="ranks of other nodes can't be reached: the job ends or hangs at its first collective",
)
def loopback(host: Host) -> Iterator[Found]:
    """NCCL's or gloo's interface is lo, docker0 or virbr0."""
    level = ERROR if several_nodes(host) else INFO
    change = "name the interface that the nodes share, e.g. export {}=eth0"
    chosen = host.chosen()
    if chosen and all(name == "lo" or name.startswith(("docker", "virbr")) for name in chosen):
        seen = (
            host.where("NCCL_SOCKET_IFNAME") if host.set("NCCL_SOCKET_IFNAME") else "/sys/class/net: nothing else is up"
        )
        yield Found(f"NCCL takes {', '.join(chosen)}; {seen}", change.format("NCCL_SOCKET_IFNAME"), level)
    for name in host.set("GLOO_SOCKET_IFNAME").split(","):
        if name == "lo" or name.startswith(("docker", "virbr")):
            yield Found(host.where("GLOO_SOCKET_IFNAME"), change.format("GLOO_SOCKET_IFNAME"), level)


@check(
    "hostname_loopback",
    WARN,
    "the host name leads to loopback",
    costs=(
        "without GLOO_SOCKET_IFNAME gloo listens on the address of the host name: ranks of other nodes can't connect, "
        "and the job ends after three tries (reproduced with network namespaces)"
    ),
)
def hostname_loopback(host: Host) -> Iterator[Found]:
    """The host name has addresses, all of them loopback, and GLOO_SOCKET_IFNAME is unset."""
    if host.set("GLOO_SOCKET_IFNAME"):
        return
    addresses = host.resolve(host.hostname)
    if not addresses:
        yield Found(
            f"host name {host.hostname}: no address",
            "export GLOO_SOCKET_IFNAME=<interface>, or put the host name and its address into /etc/hosts",
            level=INFO,
        )
    elif all(address.startswith("127.") or address == "::1" for address in addresses):
        yield Found(
            f"host name {host.hostname}: {', '.join(addresses)}",
            "export GLOO_SOCKET_IFNAME=<interface>, or correct /etc/hosts",
            level=ERROR if several_nodes(host) else WARN if host.gpus() else INFO,
        )


@check(
    "rdma_unused",
    WARN,
    "RDMA is there and switched off",
    costs="every byte between nodes goes through the kernel's TCP and host memory instead of GPU to card",
)
def rdma_unused(host: Host) -> Iterator[Found]:
    """NCCL_IB_DISABLE or NCCL_NET=Socket although a device has an active port."""
    adapters = ", ".join(host.need_adapter())
    if on(host, "NCCL_IB_DISABLE"):
        yield Found(f"{host.where('NCCL_IB_DISABLE')}; active: {adapters}", "unset NCCL_IB_DISABLE")
    if host.set("NCCL_NET").lower() == "socket":
        yield Found(f"{host.where('NCCL_NET')}; active: {adapters}", "unset NCCL_NET")


@check(
    "p2p_disabled",
    WARN,
    "GPUs of one node don't talk to each other directly",
    costs="traffic inside the node goes through host memory: PCIe twice, instead of NVLink or PCIe once",
)
def p2p_disabled(host: Host) -> Iterator[Found]:
    """NCCL_P2P_DISABLE, or NCCL_P2P_LEVEL=LOC."""
    if on(host, "NCCL_P2P_DISABLE"):
        yield Found(host.where("NCCL_P2P_DISABLE"), "unset NCCL_P2P_DISABLE")
    if host.set("NCCL_P2P_LEVEL").upper() in ("LOC", "0"):
        yield Found(host.where("NCCL_P2P_LEVEL"), "unset NCCL_P2P_LEVEL")


@check(
    "shm_disabled",
    WARN,
    "shared memory is switched off",
    costs="GPUs without peer access on one node then use the network card, or TCP over loopback",
)
def shm_disabled(host: Host) -> Iterator[Found]:
    """NCCL_SHM_DISABLE."""
    if on(host, "NCCL_SHM_DISABLE"):
        yield Found(host.where("NCCL_SHM_DISABLE"), "unset NCCL_SHM_DISABLE; give the container a larger /dev/shm")


@check(
    "gdr_limited",
    WARN,
    "GPUDirect RDMA is switched off by a setting",
    costs="GPU memory is copied to host memory for each send: 33 instead of 93 GB/s on average in nccl#1412",
)
def gdr_limited(host: Host) -> Iterator[Found]:
    """NCCL_NET_GDR_LEVEL=LOC, NCCL_IB_CUDA_SUPPORT=0 or NCCL_NET_GDR_READ=0."""
    if host.set("NCCL_NET_GDR_LEVEL").upper() in ("LOC", "0"):
        yield Found(host.where("NCCL_NET_GDR_LEVEL"), "unset NCCL_NET_GDR_LEVEL, or set it to PXB or PHB")
    for name in ("NCCL_NET_GDR_READ", "NCCL_IB_CUDA_SUPPORT"):
        if host.whole(name) == 0:
            yield Found(host.where(name), f"unset {name}")


@check(
    "blocking",
    WARN,
    "a debugging switch makes every collective wait",
    costs="the host waits for each operation, so communication no longer overlaps with the backward pass",
)
def blocking(host: Host) -> Iterator[Found]:
    """CUDA_LAUNCH_BLOCKING, TORCH_NCCL_BLOCKING_WAIT or NCCL_BLOCKING_WAIT is left over."""
    for name in ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if on(host, name):
            yield Found(host.where(name), f"unset {name}")


@check(
    "torch_detail",
    WARN,
    "torch checks every collective on all ranks",
    costs=(
        "shapes are compared over a second gloo group before each collective: an all_reduce of 4 KB between two gloo "
        "ranks took 3.1 ms (2.9 to 3.4) instead of 0.46 ms (0.37 to 0.71), four launches each on two cores (measured)"
    ),
)
def torch_detail(host: Host) -> Iterator[Found]:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    if host.set("TORCH_DISTRIBUTED_DEBUG").upper() == "DETAIL":
        yield Found(host.where("TORCH_DISTRIBUTED_DEBUG"), "set it to INFO, or unset it, once the bug is found")


@check(
    "debug_output",
    INFO,
    "NCCL logs more than its start",
    costs="lines for each operation, from every rank, through one pipe; not measured",
)
def debug_output(host: Host) -> Iterator[Found]:
    """NCCL_DEBUG=TRACE, or NCCL_DEBUG_SUBSYS with COLL or ALL."""
    level, parts = host.set("NCCL_DEBUG").upper(), host.set("NCCL_DEBUG_SUBSYS").upper().split(",")
    if level == "TRACE" or (level == "INFO" and {"ALL", "COLL", "CALL"} & set(parts)):
        seen = ", ".join(host.where(name) for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS") if host.set(name))
        yield Found(seen, "export NCCL_DEBUG=WARN for the run itself, or NCCL_DEBUG_FILE=/tmp/nccl.%h.%p")


@check(
    "tuning_pinned",
    INFO,
    "NCCL's own choices are pinned",
    costs="NCCL can't choose algorithm, protocol or channels by size and topology; not measured",
)
def tuning_pinned(host: Host) -> Iterator[Found]:
    """NCCL_ALGO, NCCL_PROTO, NCCL_MAX_NCHANNELS and their like are set."""
    names = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_NTHREADS", "NCCL_BUFFSIZE")
    for name in names:
        if host.set(name):
            few = name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS") and (host.whole(name) or 9) <= 2
            yield Found(host.where(name), f"compare with {name} unset (accel bench comm)", level=WARN if few else INFO)

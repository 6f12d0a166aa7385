"""Checks of environment variables, of this process and of those an NCCL log shows.

NCCL's meanings: docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; its limits and defaults:
src/transport/net_socket.cc and src/misc/socket.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from accel.comm.doctor.host import ERROR, INFO, WARN, Hit, Host, NotSeen, matching

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
    """Return whether the environment is one of a job over several nodes."""
    world, local = host.whole("WORLD_SIZE"), host.whole("LOCAL_WORLD_SIZE")
    return bool(world and local and world > local)


def on(host: Host, name: str) -> bool:
    """Return whether a switch of NCCL's is set to something but 0."""
    return host.whole(name) not in (None, 0)


def variables(conditions: Mapping[str, str | Sequence[str]]) -> Callable[[Host], Iterator[Hit]]:
    """Return what looks for variables that are "on", "off", or have one of some values, in whatever case."""

    def holds(host: Host, name: str, condition: str | Sequence[str]) -> bool:
        if condition == "on":
            return on(host, name)
        return host.whole(name) == 0 if condition == "off" else host.set(name).upper() in condition

    def look(host: Host) -> Iterator[Hit]:
        return (Hit(host.where(name), name) for name, value in conditions.items() if holds(host, name, value))

    return look


def socket_threads(host: Host) -> Iterator[Hit]:
    """NCCL's default for this card's vendor is no helper thread, and nothing else is set."""
    if host.set("NCCL_SOCKET_NTHREADS") or host.set("NCCL_NSOCKS_PERTHREAD"):
        return
    if host.adapters() and not on(host, "NCCL_IB_DISABLE") and host.set("NCCL_NET").lower() != "socket":
        return
    for interface in host.need("interface"):
        file = f"/sys/class/net/{interface}/device/vendor"
        vendor = host.read(file, "")
        if vendor not in VENDOR_DEFAULTS:
            read = f"{vendor} ({VENDORS.get(vendor, 'other')})" if vendor else "not there"
            yield Hit(
                f"{file}: {read}; NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD unset",
                level=WARN if host.gpus() else INFO,
            )


def socket_limits(host: Host) -> Iterator[Hit]:
    """Threads over 16, or threads times sockets over 64, or something that is no number."""
    threads, sockets = host.whole("NCCL_SOCKET_NTHREADS"), host.whole("NCCL_NSOCKS_PERTHREAD")
    for name, value in (("NCCL_SOCKET_NTHREADS", threads), ("NCCL_NSOCKS_PERTHREAD", sockets)):
        if host.set(name) and value is None:
            yield Hit(host.where(name), fix=f"set {name} to a whole number, such as 4", level=ERROR)
    if threads is not None and threads > MAX_THREADS:
        yield Hit(host.where("NCCL_SOCKET_NTHREADS"), f"NCCL_SOCKET_NTHREADS={MAX_THREADS} at most")
    elif threads and sockets and threads * sockets > MAX_SOCKETS:
        both = f"{host.where('NCCL_SOCKET_NTHREADS')}, {host.where('NCCL_NSOCKS_PERTHREAD')}"
        yield Hit(f"{both}: {threads * sockets} sockets", f"NCCL_NSOCKS_PERTHREAD={MAX_SOCKETS // threads}")


def socket_unused(host: Host) -> Iterator[Hit]:
    """NCCL_NSOCKS_PERTHREAD is set, NCCL_SOCKET_NTHREADS is not (or 0), and the card's default is none."""
    threads = host.whole("NCCL_SOCKET_NTHREADS")
    if not host.whole("NCCL_NSOCKS_PERTHREAD") or threads:
        return
    vendors = {host.read(f"/sys/class/net/{name}/device/vendor", "") for name in host.chosen()}
    if threads == 0 or not vendors & set(VENDOR_DEFAULTS):
        set_to = host.set("NCCL_SOCKET_NTHREADS") or "unset"
        yield Hit(f"{host.where('NCCL_NSOCKS_PERTHREAD')}; NCCL_SOCKET_NTHREADS: {set_to}")


def interface_missing(host: Host) -> Iterator[Hit]:
    """A variable names interfaces of which none is up here."""
    names = host.interfaces()
    if not names:
        raise NotSeen("/sys/class/net: no interface")
    there = f"up here: {', '.join(names)}"
    if (wanted := host.set("NCCL_SOCKET_IFNAME")) and not matching(names, wanted):
        yield Hit(f"{host.where('NCCL_SOCKET_IFNAME')}; {there}", "NCCL_SOCKET_IFNAME")
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        listed = [name.strip() for name in host.set(variable).split(",") if name.strip()]
        if missing := [name for name in listed if name not in names]:
            evidence = f"{host.where(variable)}: {', '.join(missing)} missing; {there}"
            yield Hit(evidence, f"{variable} (whole names, unlike NCCL's prefixes)")


def stays_on_node(interface: str) -> bool:
    """Return whether an interface is loopback or a container bridge, which no other node can reach."""
    return interface == "lo" or interface.startswith(("docker", "virbr"))


def loopback(host: Host) -> Iterator[Hit]:
    """NCCL's or gloo's interface is lo, docker0 or virbr0."""
    level = ERROR if several_nodes(host) else INFO
    chosen = host.chosen()
    if chosen and all(map(stays_on_node, chosen)):
        named = host.set("NCCL_SOCKET_IFNAME")
        why = host.where("NCCL_SOCKET_IFNAME") if named else "/sys/class/net: nothing else is up"
        yield Hit(f"NCCL takes {', '.join(chosen)}; {why}", "NCCL_SOCKET_IFNAME", level=level)
    for name in host.set("GLOO_SOCKET_IFNAME").split(","):
        if stays_on_node(name):
            yield Hit(host.where("GLOO_SOCKET_IFNAME"), "GLOO_SOCKET_IFNAME", level=level)


def hostname_loopback(host: Host) -> Iterator[Hit]:
    """The host name has addresses, all of them loopback, and GLOO_SOCKET_IFNAME is unset."""
    if host.set("GLOO_SOCKET_IFNAME"):
        return
    addresses = host.resolve(host.hostname)
    evidence = f"host name {host.hostname}: {', '.join(addresses) or 'no address'}"
    if not addresses:
        yield Hit(evidence, "put the host name and its address into /etc/hosts", level=INFO)
    elif all(address.startswith("127.") or address == "::1" for address in addresses):
        level = ERROR if several_nodes(host) else WARN if host.gpus() else INFO
        yield Hit(evidence, "correct /etc/hosts", level=level)


def rdma_unused(host: Host) -> Iterator[Hit]:
    """NCCL_IB_DISABLE or NCCL_NET=Socket although a device has an active port."""
    active = f"; active: {', '.join(host.need('adapter'))}"
    for hit in variables({"NCCL_IB_DISABLE": "on", "NCCL_NET": ["SOCKET"]})(host):
        yield Hit(hit.evidence + active, hit.about)


def gdr_limited(host: Host) -> Iterator[Hit]:
    """NCCL_NET_GDR_LEVEL=LOC, NCCL_IB_CUDA_SUPPORT=0 or NCCL_NET_GDR_READ=0."""
    limits = {"NCCL_NET_GDR_LEVEL": ["LOC", "0"], "NCCL_NET_GDR_READ": "off", "NCCL_IB_CUDA_SUPPORT": "off"}
    for hit in variables(limits)(host):
        raised = ", or set it to PXB or PHB" if hit.about == "NCCL_NET_GDR_LEVEL" else ""
        yield Hit(hit.evidence, hit.about + raised)


def debug_output(host: Host) -> Iterator[Hit]:
    """NCCL_DEBUG=TRACE, or NCCL_DEBUG_SUBSYS with COLL or ALL."""
    level, parts = host.set("NCCL_DEBUG").upper(), host.set("NCCL_DEBUG_SUBSYS").upper().split(",")
    if level == "TRACE" or (level == "INFO" and {"ALL", "COLL", "CALL"} & set(parts)):
        yield Hit(", ".join(host.where(name) for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS") if host.set(name)))


def tuning_pinned(host: Host) -> Iterator[Hit]:
    """NCCL_ALGO, NCCL_PROTO, NCCL_MAX_NCHANNELS and their like are set."""
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_NTHREADS", "NCCL_BUFFSIZE"):
        if host.set(name):
            few = name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS") and (host.whole(name) or 9) <= 2
            yield Hit(host.where(name), name, level=WARN if few else "")

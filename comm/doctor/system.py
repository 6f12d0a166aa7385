"""Checks of a node: GPUs, RDMA devices and the PCIe fabric between them; memory, files and cores of the container."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from accel.comm.doctor.host import Hit, Host, NotSeen
from accel.profiler import cgroup

# Where NCCL looks (src/transport/net_ib/gdr.cc).
PEER_MEMORY = (
    "/sys/kernel/mm/memory_peers/nv_mem/version",
    "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
    "/sys/module/nvidia_peermem/version",
)
_ACS = 0x000D
_ACS_BITS = {0x01: "SrcValid", 0x04: "ReqRedir", 0x08: "CmpltRedir", 0x10: "UpstreamFwd"}
_BRIDGE = "0x0604"
_MIB = 1 << 20

T = TypeVar("T")


def peer_memory(host: Host) -> Iterator[Hit]:
    """A GPU and an RDMA device, but neither a peer-memory module nor DMA-BUF."""
    host.need("gpu")
    adapters = host.need("adapter")
    if any(host.has(file) for file in PEER_MEMORY) or _dma_buf(host):
        return
    missing = f"{', '.join(PEER_MEMORY)}: none is there; no open NVIDIA kernel module (DMA-BUF)"
    yield Hit(f"{missing}; RDMA: {', '.join(adapters)}")


def _dma_buf(host: Host) -> bool:
    release = re.match(r"(\d+)\.(\d+)", host.read("/proc/sys/kernel/osrelease", ""))
    recent = release is not None and (int(release[1]), int(release[2])) >= (5, 12)
    return recent and "Open Kernel Module" in host.read("/proc/driver/nvidia/version", "")


def rdma_files(host: Host) -> Iterator[Hit]:
    """/sys/class/infiniband names devices, /dev/infiniband has no uverbs file."""
    adapters = host.need("adapter")
    files = host.entries("/dev/infiniband")
    if not any(name.startswith("uverbs") for name in files):
        yield Hit(f"/sys/class/infiniband: {', '.join(adapters)}; /dev/infiniband: {', '.join(files) or 'not there'}")


def memlock(host: Host) -> Iterator[Hit]:
    """ulimit -l is not unlimited, and there is an RDMA device."""
    host.need("adapter")
    limit = host.limits["memlock"]
    if limit != float("inf"):
        yield Hit(f"ulimit -l: {int(limit) // 1024} KiB")


def acs(host: Host) -> Iterator[Hit]:
    """An ACS control register of a bridge has a redirecting bit set."""
    host.need("gpu")
    bridges = [
        device
        for device in host.entries("/sys/bus/pci/devices")
        if host.read(f"/sys/bus/pci/devices/{device}/class", "").startswith(_BRIDGE)
    ]
    if not bridges:
        raise NotSeen("/sys/bus/pci/devices: no PCIe bridge, as in most virtual machines; ACS is set on their host")
    redirecting, short = [], 0
    for device in bridges:
        config = host.data(f"/sys/bus/pci/devices/{device}/config")
        short += len(config) < 0x104
        if bits := acs_bits(config):
            redirecting.append(f"{device} {'+'.join(bits)}")
    if count := len(redirecting):
        more = f" and {count - 4} more" if count > 4 else ""
        yield Hit(f"ACSCtl of {count} of {len(bridges)} bridges: {', '.join(redirecting[:4])}{more}")
    if short:
        raise NotSeen(
            f"/sys/bus/pci/devices/*/config: {short} of {len(bridges)} bridges show 64 bytes only; run as root"
        )


def acs_bits(config: bytes) -> list[str]:
    """Return the redirecting bits that are set in a bridge's ACS control register.

    Args:
        config: PCI configuration space; extended capabilities begin at 0x100.
    """
    place, seen = 0x100, set()
    while place and place + 8 <= len(config) and place not in seen:
        seen.add(place)
        header = struct.unpack_from("<I", config, place)[0]
        if header & 0xFFFF == _ACS:
            control = struct.unpack_from("<H", config, place + 6)[0]
            return [name for bit, name in _ACS_BITS.items() if control & bit]
        place = header >> 20
    return []


def iommu(host: Host) -> Iterator[Hit]:
    """IOMMU units are there, GPUs too, and the kernel was not booted with iommu=pt or off."""
    host.need("gpu")
    units = host.entries("/sys/class/iommu")
    line = host.read("/proc/cmdline").split()
    passed = {"iommu=pt", "iommu=off", "intel_iommu=off", "amd_iommu=off", "iommu.passthrough=1"}
    if units and not passed & set(line):
        yield Hit(f"/sys/class/iommu: {', '.join(units[:4])}; /proc/cmdline without iommu=pt")


def numa(host: Host) -> Iterator[Hit]:
    """numa_node of the card differs from that of every GPU."""
    gpus = {_node(host, f"/sys/bus/pci/devices/{gpu}") for gpu in host.need("gpu")} - {None}
    cards = {name: _node(host, f"/sys/class/net/{name}/device") for name in host.chosen()}
    cards |= {name: _node(host, f"/sys/class/infiniband/{name}/device") for name in host.adapters()}
    known = {name: node for name, node in cards.items() if node is not None}
    if not gpus or not known:
        raise NotSeen("numa_node of GPUs or network cards: not told")
    if not set(known.values()) & gpus:
        nodes = ", ".join(f"{name} numa_node: {node}" for name, node in known.items())
        yield Hit(f"{nodes}; GPUs: {sorted(map(str, gpus))}")


def _node(host: Host, folder: str) -> int | None:
    try:
        node = host.number(f"{folder}/numa_node")
    except NotSeen:
        return None
    return node if node >= 0 else None


# -- what the system and the container give a rank


def shm_size(host: Host) -> Iterator[Hit]:
    """Below 1 GiB; a container has 64 MiB unless configured otherwise."""
    size = host.space(host.path("/dev/shm"))
    if size < 1024 * _MIB:
        yield Hit(f"/dev/shm: {size // _MIB} MiB")


def open_files(host: Host) -> Iterator[Hit]:
    """ulimit -n below what the job's sockets need: 64 files for each rank and 1024 beside them."""
    limit, ranks = host.limits["nofile"], host.whole("WORLD_SIZE") or 1
    needed = 1024 + 64 * (ranks - 1)
    if limit < needed:
        yield Hit(f"ulimit -n: {int(limit)}; {needed} for {ranks} ranks")


def cpu_limit(host: Host) -> Iterator[Hit]:
    """The container's cores are below ranks x (2 + socket threads)."""
    cores, where = float(host.cores), f"cores that this process may use: {host.cores}"
    if quotas := _of_groups(host, "cpu", cgroup.core_quota):
        cores, file = min(quotas)
        where = f"{_name(host, file)}: {cores:g} cores"
    ranks = host.whole("LOCAL_WORLD_SIZE") or len(host.gpus()) or 1
    threads = 2 + max(host.whole("NCCL_SOCKET_NTHREADS") or 0, 0)
    if cores < ranks * threads:
        yield Hit(f"{where}; {ranks} rank{'' if ranks == 1 else 's'} x {threads} threads")


def cpu_throttled(host: Host) -> Iterator[Hit]:
    """More than 5 % of the periods were throttled."""
    readings = _of_groups(host, "cpu", cgroup.periods)
    if not readings:
        raise NotSeen("/sys/fs/cgroup/cpu.stat: no such file")
    worst = max(readings, key=lambda reading: reading.share)
    if worst.share > 0.05:
        yield Hit(f"{_name(host, worst.file)}: nr_throttled {worst.throttled} of nr_periods {worst.total}")


def memory_limit(host: Host) -> Iterator[Hit]:
    """More than 90 % of memory.max is used, page cache left out."""
    if not host.has("/sys/fs/cgroup"):
        raise NotSeen("/sys/fs/cgroup: no such file")
    for used, limit, file in _of_groups(host, "memory", cgroup.memory_use):
        if used > 0.9 * limit:
            yield Hit(f"{_name(host, file)}: {used // _MIB} of {limit // _MIB} MiB without page cache")


def _name(host: Host, path: Path) -> str:
    """Return the absolute path that the machine itself has for a path under the root."""
    return f"/{path.relative_to(host.root)}"


def _of_groups(host: Host, controller: str, read: Callable[[Path], T | None]) -> list[T]:
    """Return what can be read of the control groups that this process is in."""
    try:
        readings = [read(folder) for folder in cgroup.groups(controller, host.root)]
    except OSError as error:
        raise NotSeen(f"{_name(host, Path(error.filename))}: {(error.strerror or str(error)).lower()}") from None
    return [reading for reading in readings if reading is not None]


def numa_balancing(host: Host) -> Iterator[Hit]:
    """kernel.numa_balancing is on, and there is more than one node."""
    nodes = [
        name for name in host.entries("/sys/devices/system/node") if name[4:].isdigit() and name.startswith("node")
    ]
    if not nodes:
        raise NotSeen("/sys/devices/system/node: no node")
    if len(nodes) > 1 and host.read("/proc/sys/kernel/numa_balancing") != "0":
        yield Hit(
            f"/proc/sys/kernel/numa_balancing: {host.read('/proc/sys/kernel/numa_balancing')}; {len(nodes)} nodes"
        )


def huge_pages(host: Host) -> Iterator[Hit]:
    """/sys/kernel/mm/transparent_hugepage/enabled is [never]."""
    file = "/sys/kernel/mm/transparent_hugepage/enabled"
    if "[never]" in host.read(file):
        yield Hit(f"{file}: {host.read(file)}")

"""Checks of GPUs, RDMA devices and the PCIe fabric between them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from accel.comm.doctor.checks import Hit
from accel.comm.doctor.host import Host, NotSeen

# Where NCCL looks (src/transport/net_ib/gdr.cc).
PEER_MEMORY = (
    "/sys/kernel/mm/memory_peers/nv_mem/version",
    "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
    "/sys/module/nvidia_peermem/version",
)
_ACS = 0x000D
_ACS_BITS = {0x01: "SrcValid", 0x04: "ReqRedir", 0x08: "CmpltRedir", 0x10: "UpstreamFwd"}
_BRIDGE = "0x0604"


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

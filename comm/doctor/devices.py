"""Checks of GPUs, RDMA devices and the PCIe fabric between them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from accel.comm.doctor.checks import ERROR, INFO, WARN, Found, check
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


@check(
    "peer_memory",
    WARN,
    "the network card can't reach GPU memory",
    costs=(
        "GPU memory is copied through host memory: 33 instead of 93 GB/s on average in nccl#1412. The module can be "
        "loaded and still not be registered: nccl#1537, nccl#1939"
    ),
)
def peer_memory(host: Host) -> Iterator[Found]:
    """A GPU and an RDMA device, but neither a peer-memory module nor DMA-BUF."""
    host.need_gpu()
    adapters = host.need_adapter()
    if any(host.has(file) for file in PEER_MEMORY) or _dma_buf(host):
        return
    yield Found(
        f"{', '.join(PEER_MEMORY)}: none is there; no open NVIDIA kernel module (DMA-BUF); RDMA: {', '.join(adapters)}",
        "modprobe nvidia-peermem (after the RDMA driver; if it does not register, reinstall the GPU driver after it), "
        "or use the open kernel module on Linux 5.12 or later",
    )


def _dma_buf(host: Host) -> bool:
    release = re.match(r"(\d+)\.(\d+)", host.read_or("/proc/sys/kernel/osrelease"))
    recent = release is not None and (int(release[1]), int(release[2])) >= (5, 12)
    return recent and "Open Kernel Module" in host.read_or("/proc/driver/nvidia/version")


@check(
    "rdma_files",
    ERROR,
    "RDMA devices are not open to this container",
    costs="NCCL says 'NET/IB : No device found' and falls back to TCP without an error",
)
def rdma_files(host: Host) -> Iterator[Found]:
    """/sys/class/infiniband names devices, /dev/infiniband has no uverbs file."""
    adapters = host.need_adapter()
    files = host.entries("/dev/infiniband")
    if not any(name.startswith("uverbs") for name in files):
        yield Found(
            f"/sys/class/infiniband: {', '.join(adapters)}; /dev/infiniband: {', '.join(files) or 'not there'}",
            "start the container with --device=/dev/infiniband (Kubernetes: the RDMA device plugin)",
        )


@check(
    "memlock",
    ERROR,
    "too little memory may be locked for RDMA",
    costs="registering buffers fails: 'ibv_reg_mr failed with error Cannot allocate memory'",
)
def memlock(host: Host) -> Iterator[Found]:
    """ulimit -l is not unlimited, and there is an RDMA device."""
    host.need_adapter()
    limit = host.limits["memlock"]
    if limit != float("inf"):
        yield Found(
            f"ulimit -l: {int(limit) // 1024} KiB",
            "ulimit -l unlimited (docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in the service)",
        )


@check(
    "acs",
    WARN,
    "PCIe bridges redirect peer traffic to the CPU (ACS)",
    costs="GPU to GPU and GPU to card goes up to the root complex and back; may break GPUDirect (nccl#489)",
)
def acs(host: Host) -> Iterator[Found]:
    """An ACS control register of a bridge has a redirecting bit set."""
    host.need_gpu()
    bridges = [
        device
        for device in host.entries("/sys/bus/pci/devices")
        if host.read_or(f"/sys/bus/pci/devices/{device}/class").startswith(_BRIDGE)
    ]
    if not bridges:
        raise NotSeen("/sys/bus/pci/devices: no PCIe bridge, as in most virtual machines; ACS is set on their host")
    hit, short = [], 0
    for device in bridges:
        config = host.data(f"/sys/bus/pci/devices/{device}/config")
        short += len(config) < 0x104
        if bits := acs_bits(config):
            hit.append(f"{device} {'+'.join(bits)}")
    if hit:
        more = f" and {len(hit) - 4} more" if len(hit) > 4 else ""
        yield Found(
            f"ACSCtl of {len(hit)} of {len(bridges)} bridges: {', '.join(hit[:4])}{more}",
            "switch ACS off in the BIOS, or for each bridge: setpci -s ADDRESS ECAP_ACS+0x6.w=0000",
        )
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


@check(
    "iommu",
    WARN,
    "the IOMMU translates GPU traffic",
    costs="peer traffic between GPUs and cards passes the IOMMU: slow, and hangs are known (nccl#489)",
)
def iommu(host: Host) -> Iterator[Found]:
    """IOMMU units are there, GPUs too, and the kernel was not told iommu=pt or off."""
    host.need_gpu()
    units = host.entries("/sys/class/iommu")
    line = host.read("/proc/cmdline").split()
    passed = {"iommu=pt", "iommu=off", "intel_iommu=off", "amd_iommu=off", "iommu.passthrough=1"}
    if units and not passed & set(line):
        yield Found(
            f"/sys/class/iommu: {', '.join(units[:4])}; /proc/cmdline without iommu=pt",
            "boot with iommu=pt (bare metal only; a virtual machine's host decides)",
        )


@check(
    "numa",
    INFO,
    "the network card is on another NUMA node than all GPUs",
    costs="every byte crosses the link between sockets; with GPUDirect that path is often refused; not measured here",
)
def numa(host: Host) -> Iterator[Found]:
    """numa_node of the card differs from that of every GPU."""
    gpus = {_node(host, f"/sys/bus/pci/devices/{gpu}") for gpu in host.need_gpu()} - {None}
    cards = {name: _node(host, f"/sys/class/net/{name}/device") for name in host.chosen()}
    cards |= {name: _node(host, f"/sys/class/infiniband/{name}/device") for name in host.adapters()}
    known = {name: node for name, node in cards.items() if node is not None}
    if not gpus or not known:
        raise NotSeen("numa_node of GPUs or network cards: not told")
    if not set(known.values()) & gpus:
        yield Found(
            ", ".join(f"{name} numa_node: {node}" for name, node in known.items())
            + f"; GPUs: {sorted(map(str, gpus))}",
            "use a card beside the GPUs (NCCL_SOCKET_IFNAME, NCCL_IB_HCA), or move the card",
        )


def _node(host: Host, folder: str) -> int | None:
    try:
        node = host.number(f"{folder}/numa_node")
    except NotSeen:
        return None
    return node if node >= 0 else None

"""Checks of a node: network interfaces and TCP; GPUs, RDMA devices and PCIe; memory, files and cores."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from accel.comm.doctor.host import ERROR, WARN, Hit, Host, NotSeen
from accel.profiler import cgroup

T = TypeVar("T")

ROUND_TRIP_S = 1e-3  # between machines of one region of a cloud
_LEAST_CLOUD_JUMBO = 8000  # Google 8896, AWS 9001, Azure 9000 less encapsulation
_FAST_MBIT = 10_000
_MIB = 1 << 20
# The kernel's own: what tcp_rmem and tcp_wmem end with on a machine that nobody changed.
_DEFAULT_WINDOW = {"tcp_rmem": 6_291_456, "tcp_wmem": 4_194_304}


def link_speed(host: Host) -> Iterator[Hit]:
    """The chosen interface's speed is below another's that is up, or below 1 Gbit/s."""
    chosen = host.need("interface")
    speeds = {
        name: _speed_mbit(host, name)
        for name in host.interfaces()
        if name != "lo" and host.has(f"/sys/class/net/{name}/device")
    }
    best = max(((speed, name) for name, speed in speeds.items() if speed), default=(0, ""))
    used = {name: speed for name in chosen if (speed := _speed_mbit(host, name))}
    for name, speed in used.items():
        evidence = f"/sys/class/net/{name}/speed: {speed} Mbit/s"
        if speed < best[0]:
            yield Hit(f"{evidence}; {best[1]}: {best[0]} Mbit/s", best[1])
        elif speed < 1000:
            yield Hit(evidence, fix="look at cable, port and autonegotiation", level=ERROR)
    if not used:
        raise NotSeen(f"/sys/class/net/{chosen[0]}/speed: the driver tells none; accel bench comm measures it")


def _speed_mbit(host: Host, interface: str) -> int | None:
    """Return the link speed in Mbit/s, None where the driver reports none (virtio, bridges)."""
    return host.known(f"/sys/class/net/{interface}/speed", 1)


def pcie_link(host: Host) -> Iterator[Hit]:
    """current_link_speed or current_link_width of a network card below its max_."""
    compared = 0
    for name in host.interfaces():
        for what in ("link_speed", "link_width"):
            file = f"/sys/class/net/{name}/device/current_{what}"
            now, most = host.read(file, ""), host.read(file.replace("current", "max"), "")
            if (current := _leading(now)) is not None and (largest := _leading(most)) is not None:
                compared += 1
                if current < largest:
                    yield Hit(f"{file}: {now}, max_{what}: {most}")
    if not compared:
        raise NotSeen("no network card on PCIe tells its link (/sys/class/net/*/device/current_link_speed)")


def _leading(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def mtu(host: Host) -> Iterator[Hit]:
    """MTU below 8000 on a link of 10 Gbit/s or more."""
    for name in host.need("interface"):
        speed, size = _speed_mbit(host, name), host.number(f"/sys/class/net/{name}/mtu")
        if size < _LEAST_CLOUD_JUMBO and speed is not None and speed >= _FAST_MBIT:
            yield Hit(f"/sys/class/net/{name}/mtu: {size} at {speed} Mbit/s", name)


def mtu_differs(host: Host) -> Iterator[Hit]:
    """The chosen interfaces, or an interface and its members, have different MTUs."""
    chosen = host.need("interface")
    members = [entry.removeprefix("lower_") for name in chosen for entry in _lower(host, name)]
    sizes = {name: host.number(f"/sys/class/net/{name}/mtu") for name in dict.fromkeys([*chosen, *members])}
    if len(set(sizes.values())) > 1:
        yield Hit(", ".join(f"/sys/class/net/{name}/mtu: {size}" for name, size in sizes.items()))


def _lower(host: Host, name: str) -> list[str]:
    return [entry for entry in host.entries(f"/sys/class/net/{name}") if entry.startswith("lower_")]


def link_errors(host: Host) -> Iterator[Hit]:
    """Errors and drops above one packet in ten thousand."""
    for name in host.need("interface"):
        folder = f"/sys/class/net/{name}/statistics"
        for direction in ("rx", "tx"):
            packets = host.number(f"{folder}/{direction}_packets")
            lost = {
                f"{direction}_{kind}": host.number(f"{folder}/{direction}_{kind}") for kind in ("errors", "dropped")
            }
            if packets and sum(lost.values()) > max(packets * 1e-4, 10):
                counts = ", ".join(f"{kind}: {number}" for kind, number in lost.items())
                yield Hit(f"{folder}/{counts} of {packets} packets", name)


def tcp_retransmits(host: Host) -> Iterator[Hit]:
    """More than 0.5 % of the segments sent since boot."""
    lines = [line.split() for line in host.read("/proc/net/snmp").splitlines() if line.startswith("Tcp:")]
    if len(lines) != 2:
        raise NotSeen("/proc/net/snmp: no line of TCP")
    counts = dict(zip(lines[0][1:], map(int, lines[1][1:]), strict=False))
    again, sent = counts.get("RetransSegs", 0), counts.get("OutSegs", 0)
    if sent > 10_000 and again > 0.005 * sent:
        yield Hit(f"/proc/net/snmp: RetransSegs {again} of OutSegs {sent} ({100 * again / sent:.1f} %)")


def tcp_buffers(host: Host) -> Iterator[Hit]:
    """Largest window of tcp_rmem or tcp_wmem below link speed x 1 ms; below the kernel's own without a speed."""
    speeds = [speed for name in host.chosen() if (speed := _speed_mbit(host, name))]
    for name, default in _DEFAULT_WINDOW.items():
        file = f"/proc/sys/net/ipv4/{name}"
        try:
            largest = int(host.read(file).split()[-1])
        except (ValueError, IndexError):
            raise NotSeen(f"{file}: not three numbers") from None
        needed = int(max(speeds) * 1e6 / 8 * ROUND_TRIP_S) if speeds else default
        if largest < needed:
            why = f"{max(speeds)} Mbit/s x 1 ms round trip" if speeds else "the kernel's own maximum"
            values = f"{name}='4096 131072 {max(2 * needed, 16 << 20)}'"
            yield Hit(f"{file}: at most {largest} bytes; {needed} is {why}", values)
    if host.read("/proc/sys/net/ipv4/tcp_moderate_rcvbuf", "") == "0":
        yield Hit("/proc/sys/net/ipv4/tcp_moderate_rcvbuf: 0", "tcp_moderate_rcvbuf=1")


def socket_buffers_fixed(host: Host) -> Iterator[Hit]:
    """NCCL_SOCKET_RCVBUF or NCCL_SOCKET_SNDBUF above rmem_max or wmem_max."""
    for variable, limit in (("NCCL_SOCKET_RCVBUF", "rmem_max"), ("NCCL_SOCKET_SNDBUF", "wmem_max")):
        wanted = host.whole(variable)
        if wanted is None:
            continue
        most = host.number(f"/proc/sys/net/core/{limit}")
        if wanted > most:
            evidence = f"{host.where(variable)}; /proc/sys/net/core/{limit}: {most}"
            yield Hit(evidence, f"{limit}={wanted}, or unset {variable}")


_QDISC = re.compile(r"^qdisc (tbf|htb|netem|cake|police)\b(.*)$", re.MULTILINE)
_RATE = re.compile(r"\brate ([\d.]+)([KMG]?)bit")
_BURST = re.compile(r"\bburst ([\d.]+)([KMG]?)b\b")
_THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_POWERS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30}


def shaped_link(host: Host) -> Iterator[Hit]:
    """`tc qdisc` shows tbf, htb, netem or cake; a warning if its bucket holds less than 1 ms."""
    for name in host.need("interface"):
        for kind, rest in _QDISC.findall(host.run(["tc", "qdisc", "show", "dev", name])):
            evidence = f"tc qdisc show dev {name}: {kind} {rest.strip()[:70]}"
            rate = _RATE.search(rest)
            if rate and _small_bucket(rate, _BURST.search(rest)):
                larger = f"tc qdisc replace dev {name} root tbf rate {rate[1]}{rate[2]}bit burst 256kb latency 50ms"
                yield Hit(evidence, fix=larger, level=WARN)
            else:
                yield Hit(evidence)


def _small_bucket(rate: re.Match[str], burst: re.Match[str] | None) -> bool:
    """Return whether the bucket holds less than 1 ms."""
    bytes_per_ms = float(rate[1]) * _THOUSANDS[rate[2]] / 8 * 1e-3
    return burst is not None and float(burst[1]) * _POWERS[burst[2]] < bytes_per_ms


# -- GPUs, RDMA devices and PCIe

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
    """Return the redirecting bits that are set in a bridge's ACS control register."""
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
    gpus = {host.known(f"/sys/bus/pci/devices/{gpu}/numa_node") for gpu in host.need("gpu")} - {None}
    cards = {name: host.known(f"/sys/class/net/{name}/device/numa_node") for name in host.chosen()}
    cards |= {name: host.known(f"/sys/class/infiniband/{name}/device/numa_node") for name in host.adapters()}
    known = {name: node for name, node in cards.items() if node is not None}
    if not gpus or not known:
        raise NotSeen("numa_node of GPUs or network cards: not told")
    if not set(known.values()) & gpus:
        nodes = ", ".join(f"{name} numa_node: {node}" for name, node in known.items())
        yield Hit(f"{nodes}; GPUs: {sorted(map(str, gpus))}")


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

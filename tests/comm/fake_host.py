"""A made-up machine for the doctor: a good one, and changes to it.

Two nodes' worth of settings on a node with two GPUs, one RDMA card of 100 Gbit/s and jumbo frames, on which every check
that reads files, settings or limits finds nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.comm.doctor.host import Host, NotSeen

PCI = "/sys/bus/pci/devices"
NET = "/sys/class/net"
CARD = f"{NET}/eth0"


def config_space(acs_control: int, short: bool = False) -> bytes:
    """Return the configuration space of a bridge: another capability at 0x100, ACS at 0x140."""
    space = bytearray(0x1000)
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | 0x140 << 20)
    struct.pack_into("<I", space, 0x140, 0x000D | 1 << 16)
    struct.pack_into("<H", space, 0x146, acs_control)
    return bytes(space[:64] if short else space)


def interface(name: str, speed: int = 100_000, mtu: int = 9000, physical: bool = True) -> dict[str, str]:
    """Return the files of an interface that is up."""
    folder = f"{NET}/{name}"
    files = {f"{folder}/operstate": "up", f"{folder}/mtu": str(mtu), f"{folder}/speed": str(speed)}
    for way in ("rx", "tx"):
        counts = {"packets": 1_000_000, "errors": 0, "dropped": 3}
        files |= {f"{folder}/statistics/{way}_{what}": str(count) for what, count in counts.items()}
    if physical:
        files |= {f"{folder}/device/vendor": "0x15b3", f"{folder}/device/numa_node": "0"}
        files |= {f"{folder}/device/current_link_speed": "16.0 GT/s PCIe", f"{folder}/device/current_link_width": "16"}
        files |= {f"{folder}/device/max_link_speed": "16.0 GT/s PCIe", f"{folder}/device/max_link_width": "16"}
    return files


GOOD: dict[str, str | bytes] = {
    **interface("eth0"),
    f"{NET}/lo/operstate": "unknown",
    f"{NET}/lo/mtu": "65536",
    "/proc/net/route": "Iface\tDestination\neth0\t00000000\nens5\t0000000A\n",
    "/proc/net/if_inet6": "",
    "/proc/net/snmp": "Ip: A\nIp: 1\nTcp: OutSegs RetransSegs\nTcp: 1000000 20\n",
    "/proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t33554432",
    "/proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t33554432",
    "/proc/sys/net/ipv4/tcp_moderate_rcvbuf": "1",
    "/proc/sys/net/core/rmem_max": "33554432",
    "/proc/sys/net/core/wmem_max": "33554432",
    f"{PCI}/0000:01:00.0/class": "0x030200",
    f"{PCI}/0000:01:00.0/vendor": "0x10de",
    f"{PCI}/0000:01:00.0/numa_node": "0",
    f"{PCI}/0000:02:00.0/class": "0x030200",
    f"{PCI}/0000:02:00.0/vendor": "0x10de",
    f"{PCI}/0000:02:00.0/numa_node": "1",
    f"{PCI}/0000:00:01.0/class": "0x060400",
    f"{PCI}/0000:00:01.0/config": config_space(0),
    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "/sys/class/infiniband/mlx5_0/device/numa_node": "0",
    "/dev/infiniband/uverbs0": "",
    "/sys/module/nvidia_peermem/version": "550.54",
    "/sys/class/iommu/dmar0/name": "",
    "/proc/cmdline": "quiet iommu=pt",
    "/proc/sys/kernel/osrelease": "6.8.0",
    "/proc/sys/kernel/numa_balancing": "0",
    "/sys/fs/cgroup/cpu.max": "max 100000",
    "/sys/fs/cgroup/cpu.stat": "nr_periods 1000\nnr_throttled 2",
    "/sys/fs/cgroup/memory.max": str(100 << 30),
    "/sys/fs/cgroup/memory.current": str(95 << 30),
    "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {40 << 30}",
    "/sys/devices/system/node/node0/cpulist": "0-15",
    "/sys/devices/system/node/node1/cpulist": "16-31",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
}
QDISC = "qdisc fq_codel 0: root refcnt 2 limit 10240p flows 1024"


def host(
    root: Path,
    files: Mapping[str, str | bytes | None] | None = None,
    env: Mapping[str, str] | None = None,
    qdisc: str | None = QDISC,
    **other: Any,
) -> Host:
    """Build the good machine with changes.

    Args:
        root: an empty folder.
        files: path → contents; None takes a file of the good machine away, with what is under it.
        env: environment variables, none by default.
        qdisc: what `tc` prints, None if it is not installed.
        other: further arguments of Host.
    """
    every: dict[str, str | bytes | None] = {**GOOD, **(files or {})}
    gone = [name for name, contents in every.items() if contents is None]
    for name, contents in every.items():
        if contents is None or any(name == one or name.startswith(f"{one}/") for one in gone):
            continue
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())

    def run(command: Any) -> str:
        if qdisc is None:
            raise NotSeen(f"{command[0]} is not installed")
        assert command[:3] == ["tc", "qdisc", "show"]
        return qdisc

    arguments: dict[str, Any] = {
        "env": env or {},
        "run": run,
        "resolve": lambda name: ["10.0.0.7"],
        "hostname": "node1",
        "limits": {"memlock": float("inf"), "nofile": 65536.0},
        "cores": 33,
        "space": lambda name: 64 << 30,
    }
    return Host(root=root, **{**arguments, **other})

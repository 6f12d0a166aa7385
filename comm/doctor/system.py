"""Checks of what operating system and container give a rank: memory, files, cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from accel.comm.doctor.checks import Hit
from accel.comm.doctor.host import Host, NotSeen
from accel.profiler import cgroup

_MIB = 1 << 20

T = TypeVar("T")


def shm_size(host: Host) -> Iterator[Hit]:
    """Below 1 GiB; a container has 64 MiB unless configured otherwise."""
    size = host.room("/dev/shm")
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
    cores, where = _cores(host)
    ranks = host.whole("LOCAL_WORLD_SIZE") or len(host.gpus()) or 1
    threads = 2 + max(host.whole("NCCL_SOCKET_NTHREADS") or 0, 0)
    if cores < ranks * threads:
        yield Hit(f"{where}; {ranks} rank{'' if ranks == 1 else 's'} x {threads} threads")


def _cores(host: Host) -> tuple[float, str]:
    """Return the cores of the container and where that was read."""
    if quotas := _of_groups(host, "cpu", cgroup.core_quota):
        cores, file = min(quotas)
        return cores, f"{_name(host, file)}: {cores:g} cores"
    for line in host.read("/proc/self/status").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            listed = line.split(":", 1)[1].strip()
            return float(_count(listed)), f"/proc/self/status: Cpus_allowed_list {listed}"
    raise NotSeen("/proc/self/status: no Cpus_allowed_list")


def _count(listed: str) -> int:
    """Count the cores of a list such as 0-3,8."""
    parts = [part.split("-") for part in listed.split(",") if part]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in parts)


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

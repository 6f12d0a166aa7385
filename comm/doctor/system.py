"""Checks of what operating system and container give a rank: memory, files, cores."""

from __future__ import annotations

from collections.abc import Iterator

from accel.comm.doctor.checks import Hit
from accel.comm.doctor.host import Host, NotSeen

_MIB = 1 << 20


def shm_size(host: Host) -> Iterator[Hit]:
    """Below 1 GiB; a container has 64 MiB unless told otherwise."""
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
    text = host.read_or("/sys/fs/cgroup/cpu.max").split()
    if len(text) == 2 and text[0] != "max":
        cores = int(text[0]) / int(text[1])
        return cores, f"/sys/fs/cgroup/cpu.max: {cores:g} cores"
    quota = host.read_or("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = host.read_or("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        cores = int(quota) / int(period)
        return cores, f"/sys/fs/cgroup/cpu/cpu.cfs_quota_us: {cores:g} cores"
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
    files = ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat")
    for file in files:
        lines = [line.split() for line in host.read_or(file).splitlines()]
        counts = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
        periods, throttled = counts.get("nr_periods", 0), counts.get("nr_throttled", 0)
        if periods and throttled > 0.05 * periods:
            yield Hit(f"{file}: nr_throttled {throttled} of nr_periods {periods}")
        if lines:
            return
    raise NotSeen(f"{files[0]}: no such file")


def memory_limit(host: Host) -> Iterator[Hit]:
    """More than 90 % of memory.max is used, page cache left out."""
    for limit_file, used_file, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        limit = host.read_or(f"/sys/fs/cgroup/{limit_file}")
        if limit in ("", "max"):
            continue
        lines = [line.split() for line in host.read_or(f"/sys/fs/cgroup/{stat}").splitlines()]
        cached = next((int(words[1]) for words in lines if words[:1] == [cache]), 0)
        used = host.number(f"/sys/fs/cgroup/{used_file}") - cached
        if used > 0.9 * int(limit):
            yield Hit(f"/sys/fs/cgroup/{used_file}: {used // _MIB} of {int(limit) // _MIB} MiB without page cache")
        return
    if not host.has("/sys/fs/cgroup"):
        raise NotSeen("/sys/fs/cgroup: no such file")


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

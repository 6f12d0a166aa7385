"""Checks of what operating system and container give a rank: memory, files, cores."""

from __future__ import annotations

from collections.abc import Iterator

from accel.comm.doctor.checks import INFO, WARN, Found, check
from accel.comm.doctor.host import Host, NotSeen

_MIB = 1 << 20


@check(
    "shm_size",
    WARN,
    "/dev/shm is small",
    costs="NCCL's buffers between ranks of a node and batches of DataLoader workers live there, and fail when full",
)
def shm_size(host: Host) -> Iterator[Found]:
    """Below 1 GiB; a container has 64 MiB unless told otherwise."""
    size = host.room("/dev/shm")
    if size < 1024 * _MIB:
        yield Found(
            f"/dev/shm: {size // _MIB} MiB",
            "docker run --ipc=host or --shm-size=16g; Kubernetes: an emptyDir with medium Memory at /dev/shm",
        )


@check(
    "open_files",
    WARN,
    "few files may be open",
    costs="'Too many open files' from sockets to many ranks, or from DataLoader workers' tensors",
)
def open_files(host: Host) -> Iterator[Found]:
    """ulimit -n below what the job's sockets need: 64 files for each rank and 1024 beside them."""
    limit, ranks = host.limits["nofile"], host.whole("WORLD_SIZE") or 1
    needed = 1024 + 64 * (ranks - 1)
    if limit < needed:
        yield Found(f"ulimit -n: {int(limit)}; {needed} for {ranks} ranks", "ulimit -n 65536")


@check(
    "cpu_limit",
    WARN,
    "fewer cores than threads that communicate",
    costs="a rank's training loop, NCCL's proxy thread and its socket threads take turns on one core",
)
def cpu_limit(host: Host) -> Iterator[Found]:
    """The container's cores are below ranks x (2 + socket threads)."""
    cores, where = _cores(host)
    ranks = host.whole("LOCAL_WORLD_SIZE") or len(host.gpus()) or 1
    threads = 2 + max(host.whole("NCCL_SOCKET_NTHREADS") or 0, 0)
    if cores < ranks * threads:
        yield Found(
            f"{where}; {ranks} rank{'' if ranks == 1 else 's'} x {threads} threads",
            "give the container more cores (docker run --cpus, Kubernetes resources.limits.cpu)",
        )


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


@check(
    "cpu_throttled",
    WARN,
    "the container is stopped for using its cores up",
    costs="a rank that stands still for the rest of a period (100 ms) lets all others wait in their collective",
)
def cpu_throttled(host: Host) -> Iterator[Found]:
    """More than 5 % of the periods were throttled."""
    files = ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat")
    for file in files:
        lines = [line.split() for line in host.read_or(file).splitlines()]
        counts = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
        periods, throttled = counts.get("nr_periods", 0), counts.get("nr_throttled", 0)
        if periods and throttled > 0.05 * periods:
            yield Found(
                f"{file}: nr_throttled {throttled} of nr_periods {periods}",
                "raise the CPU limit, or lower the DataLoader workers and OMP_NUM_THREADS",
            )
        if lines:
            return
    raise NotSeen(f"{files[0]}: no such file")


@check(
    "memory_limit",
    WARN,
    "the container's memory is almost used up",
    costs="the kernel kills a rank when it is; its peers wait until their timeout. /dev/shm counts as well",
)
def memory_limit(host: Host) -> Iterator[Found]:
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
            yield Found(
                f"/sys/fs/cgroup/{used_file}: {used // _MIB} of {int(limit) // _MIB} MiB without page cache",
                "raise the memory limit, or lower batch size, workers and prefetching",
            )
        return
    if not host.has("/sys/fs/cgroup"):
        raise NotSeen("/sys/fs/cgroup: no such file")


@check(
    "numa_balancing",
    INFO,
    "the kernel moves memory between NUMA nodes",
    costs="page faults at random in a process whose memory is already where it should be; not measured here",
)
def numa_balancing(host: Host) -> Iterator[Found]:
    """kernel.numa_balancing is on, and there is more than one node."""
    nodes = [
        name for name in host.entries("/sys/devices/system/node") if name[4:].isdigit() and name.startswith("node")
    ]
    if not nodes:
        raise NotSeen("/sys/devices/system/node: no node")
    if len(nodes) > 1 and host.read("/proc/sys/kernel/numa_balancing") != "0":
        yield Found(
            f"/proc/sys/kernel/numa_balancing: {host.read('/proc/sys/kernel/numa_balancing')}; {len(nodes)} nodes",
            "sysctl -w kernel.numa_balancing=0, and torchrun with numactl or --numa-binding",
        )


@check(
    "huge_pages",
    INFO,
    "transparent huge pages are off",
    costs="512 times as many page faults and TLB entries for host buffers; not measured here",
)
def huge_pages(host: Host) -> Iterator[Found]:
    """/sys/kernel/mm/transparent_hugepage/enabled is [never]."""
    file = "/sys/kernel/mm/transparent_hugepage/enabled"
    if "[never]" in host.read(file):
        yield Found(f"{file}: {host.read(file)}", f"echo madvise > {file}")

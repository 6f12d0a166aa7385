"""What the operating system reports about this run: on a core, waiting for one, or asleep; and the load of others.

Linux keeps, per thread, the time it ran and the time it waited for a core (`/proc/…/schedstat`); for the rest of
the wall time it slept. That distinguishes decoding from storage, and a slow script from a crowded machine.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from accel.profiler import cgroup
from accel.profiler.evidence import ThreadShare
from accel.profiler.interruptions import Tolerated, ours

if TYPE_CHECKING:
    import torch

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ThreadTime:
    """Cumulative seconds of a thread."""

    at: float
    """When it was read, s on the monotonic clock."""
    run: float
    wait: float

    def plus(self, before: ThreadTime, later: ThreadTime) -> ThreadTime:
        """Return these times and what two readings of a thread lie apart."""
        more_s, ran_s, waited_s = later.at - before.at, later.run - before.run, later.wait - before.wait
        return ThreadTime(self.at + more_s, self.run + ran_s, self.wait + waited_s)

    def share_until(self, later: ThreadTime) -> ThreadShare | None:
        """Return the shares between two readings, or None if they are less than a millisecond apart."""
        wall = later.at - self.at
        if wall < 1e-3:
            return None
        run = min(1.0, max(0.0, (later.run - self.run) / wall))
        wait = min(1.0 - run, max(0.0, (later.wait - self.wait) / wall))
        return ThreadShare(run=run, wait=wait, blocked=1.0 - run - wait)


class ThreadMeter:
    """Reads one thread's times; 2 µs per reading, since the file stays open.

    Args:
        pid: process.
        tid: the system's thread id; the process's first thread if None.
    """

    def __init__(self, pid: int | str = "self", tid: int | None = None) -> None:
        self._file = -1
        path = f"/proc/{pid}/schedstat" if tid is None else f"/proc/{pid}/task/{tid}/schedstat"
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY)

    @property
    def works(self) -> bool:
        """False where the system keeps no such record."""
        return self._file >= 0

    def read(self) -> ThreadTime | None:
        """Return the times now, or None if the thread is gone or nothing is kept."""
        if self._file < 0:
            return None
        try:
            run, wait, _ = os.pread(self._file, 128, 0).split()
        except ours(OSError, ValueError):
            return None
        return ThreadTime(time.perf_counter(), int(run) * 1e-9, int(wait) * 1e-9)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    cores, quota = len(own_cores()), cgroup.quota()
    return max(1, min(cores, round(quota))) if quota else cores


_UNSURE = 0.1
"""Of a core: how far what others hold may be off, by clocks that tick every 10 ms. 2.02 cores are two, not three."""


def free_cores(cores: int, held: float) -> int:
    """Return how many of the cores `held` by others, as of `CrowdMeter.cores`, are free, at least one."""
    return max(1, cores - max(0, math.ceil(held - _UNSURE)))


def seconds_since_start(proc: Path = Path("/proc")) -> float:
    """Return how long this process has been running, s; 0.0 where the system doesn't say when it began."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = (proc / "self" / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - float(fields[19]) * TICK_S)
    return 0.0


def cpu_name() -> str:
    """Return the processor's model, e.g. `AMD EPYC 7763`; its architecture where the system doesn't tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_name(device: torch.device) -> str:
    """Return the name of the device that a model is on, e.g. `cpu (AMD EPYC)`."""
    if device.type == "cuda":
        import torch

        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({cpu_name()})" if device.type == "cpu" else device.type


@functools.cache
def has_amx() -> bool:
    """Return whether the processor has units for matrix products in bfloat16; False where the system doesn't tell."""
    with contextlib.suppress(OSError):
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return False


def own_cores() -> frozenset[int]:
    """Return the cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def available_memory(root: Path = cgroup.ROOT) -> int | None:
    """Return the bytes of memory that this process may still use, or None if the system doesn't tell.

    That is what the machine has available, and no more than its control groups leave.
    """
    return _memory("MemAvailable:", lambda use: max(0, use.limit - use.used), root)


def total_memory(root: Path = cgroup.ROOT) -> int | None:
    """Return the bytes of memory that this process might use if it were alone, or None if the system doesn't tell."""
    return _memory("MemTotal:", lambda use: use.limit, root)


def _memory(name: str, of_group: Callable[[cgroup.MemoryUse], int], root: Path) -> int | None:
    """Return the least of a line of the system's memory and what each control group says, bytes; None without any."""
    bounds = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        bounds.append(1024 * int(next(line for line in lines if line.startswith(name)).split()[1]))
    for folder in cgroup.groups("memory", root):
        with contextlib.suppress(OSError, ValueError):
            if (use := cgroup.memory_use(folder)) is not None:
                bounds.append(of_group(use))
    return min(bounds, default=None)


class ResidentMemory(NamedTuple):
    """Memory of this process that is in RAM, bytes."""

    now: int
    most: int
    """Since it began."""
    private: int = 0
    """Of which a forked process gets copies once it writes to them."""


def resident_memory(root: Path = cgroup.ROOT) -> ResidentMemory | None:
    """Return how much memory this process has in RAM, or None if the system doesn't tell."""
    try:
        lines = (root / "proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS:", "VmHWM:", "RssAnon:")))
        fields.setdefault("RssAnon", "0 kB")  # some systems don't tell
        now, most, private = (1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM", "RssAnon"))
    except ours(OSError, ValueError, KeyError, IndexError):
        return None
    return ResidentMemory(now, max(now, most), private)  # the kernel updates the second late


@dataclass(frozen=True)
class _Reading:
    at: float
    cores: frozenset[int]
    """Those this process may use; the seconds are of these."""
    busy_s: float
    own_s: float


class CrowdMeter:
    """Measures how many of the cores that this process may use are kept busy by processes outside this run.

    The run is this process, its descendants, and, under a launcher, the descendants of its parent: the other ranks.
    Under a quota smaller than these cores it reports nothing: what others leave free may be all that the quota allows.
    """

    def __init__(self, *, launched: bool = False, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._top = os.getppid() if launched else os.getpid()
        self._before = self._read()

    def _read(self) -> _Reading | None:
        cores, quota = own_cores(), cgroup.quota()
        busy = _busy_seconds(self._proc, cores) if quota is None or quota >= len(cores) else None
        if busy is None:
            return None
        return _Reading(time.perf_counter(), cores, busy, _tree_seconds(self._proc, self._top))

    def cores(self) -> float | None:
        """Return the cores that others kept busy since the last call, or None if that can't be determined."""
        before, now = self._before, self._read()
        if before is None or now is None or now.at - before.at < 0.2:
            return None
        self._before = now
        if now.cores != before.cores:
            return None
        others = (now.busy_s - before.busy_s) - (now.own_s - before.own_s)
        return max(0.0, others / (now.at - before.at))


def _busy_seconds(proc: Path, cores: frozenset[int]) -> float | None:
    """Return the busy seconds of `cores` since boot."""
    mine = {f"cpu{number}" for number in cores}
    busy, matched = 0, 0
    try:
        for line in (proc / "stat").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(" ")
            if name in mine:
                user, nice, system, _idle, _io, irq, soft, *_ = map(int, rest.split()[:7])
                busy += user + nice + system + irq + soft
                matched += 1
    except ours(OSError, ValueError):
        return None
    return busy * TICK_S if matched else None


def _tree_seconds(proc: Path, top: int) -> float:
    """Return the seconds that `top` and its descendants, ended ones included, have run."""
    parents: dict[int, tuple[int, float]] = {}
    for entry in os.listdir(proc):
        if not entry.isdigit():
            continue
        with Tolerated("a process has ended"):
            text = (proc / entry / "stat").read_text(encoding="utf-8", errors="replace")
            fields = text[text.rindex(")") + 2 :].split()
            # utime, stime and those of children that were waited for.
            parents[int(entry)] = (int(fields[1]), sum(map(int, fields[11:15])) * TICK_S)
    total = 0.0
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != top:
            ancestor = parents[ancestor][0]
        if ancestor == top:
            total += parents[pid][1]
    return total

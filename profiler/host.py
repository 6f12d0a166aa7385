"""What the operating system says about this run: on a core, waiting for one, or asleep; and who else is busy.

Linux keeps, per thread, the time it ran and the time it waited for a core (`/proc/…/schedstat`); what is left of the
wall time it slept. That tells decoding from storage, and a slow script from a crowded machine.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from accel.profiler.evidence import ThreadShare

_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


@dataclass(frozen=True)
class ThreadTime:
    """Cumulated seconds of a thread."""

    at: float
    """When it was read, s on the monotonic clock."""
    run: float
    wait: float

    def share_until(self, later: ThreadTime) -> ThreadShare | None:
        """Return the shares between two readings, or None if they are less than a millisecond apart."""
        wall = later.at - self.at
        if wall < 1e-3:
            return None
        run = min(1.0, max(0.0, (later.run - self.run) / wall))
        wait = min(1.0 - run, max(0.0, (later.wait - self.wait) / wall))
        return ThreadShare(run=run, wait=wait, blocked=1.0 - run - wait)


class ThreadMeter:
    """Reads one thread's times; 2 µs a reading, since the file stays open.

    Args:
        pid: process.
        tid: thread as the system numbers it; the process's first thread if None.
    """

    def __init__(self, pid: int | str = "self", tid: int | None = None) -> None:
        self._file = -1
        place = f"/proc/{pid}/schedstat" if tid is None else f"/proc/{pid}/task/{tid}/schedstat"
        with contextlib.suppress(OSError):
            self._file = os.open(place, os.O_RDONLY)

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
        except (OSError, ValueError):
            return None
        return ThreadTime(time.perf_counter(), int(run) * 1e-9, int(wait) * 1e-9)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return max(1, min(affinity, round(quota))) if quota else affinity


def _quota() -> float | None:
    """Return the cores that the container's quota allows, or None if it has none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()[:2]
        return int(allowed) / int(period)
    return None


class CrowdMeter:
    """Tells how many cores are kept busy by processes outside this run.

    This run's are this process, its descendants, and, under a launcher, the descendants of its parent: the other ranks.
    """

    def __init__(self, *, launched: bool = False) -> None:
        self._top = os.getppid() if launched else os.getpid()
        self._before = self._read()

    def _read(self) -> tuple[float, float, float] | None:
        busy = _busy_seconds()
        return None if busy is None else (time.perf_counter(), busy, _tree_seconds(self._top))

    def cores(self) -> float | None:
        """Return the cores that others kept busy since the last call, or None if that can't be told."""
        before, now = self._before, self._read()
        if before is None or now is None or now[0] - before[0] < 0.2:
            return None
        self._before = now
        others = (now[1] - before[1]) - (now[2] - before[2])
        return max(0.0, others / (now[0] - before[0]))


def _busy_seconds() -> float | None:
    """Return the machine's busy seconds over all cores since it started."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _idle, _io, irq, soft, *_ = map(int, file.readline().split()[1:8])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + soft) * _TICK_S


def _tree_seconds(top: int) -> float:
    """Return the seconds that `top` and its descendants have run, those that have ended included."""
    parents: dict[int, tuple[int, float]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
            fields = text[text.rindex(")") + 2 :].split()
            # utime, stime and those of children that were waited for.
            parents[int(entry)] = (int(fields[1]), sum(map(int, fields[11:15])) * _TICK_S)
    total = 0.0
    for pid in parents:
        above = pid
        while above in parents and above != top:
            above = parents[above][0]
        if above == top:
            total += parents[pid][1]
    return total

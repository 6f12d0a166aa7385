"""The limits of this process's control groups: CPU quota, throttling and memory. Versions 1 and 2.

All files are read below a root, so that a test can substitute a fake machine. A group without a limit yields None; a
malformed file raises ValueError, which `quota` and `Throttle` treat as no limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path("/")

T = TypeVar("T")


class CoreQuota(NamedTuple):
    """The cores that a group's quota allows."""

    cores: float
    file: Path


class Periods(NamedTuple):
    """A group's quota periods so far, and how many of them were throttled."""

    total: int
    throttled: int
    file: Path

    @property
    def share(self) -> float:
        """Share of the periods that were throttled."""
        return self.throttled / self.total if self.total else 0.0


class MemoryUse(NamedTuple):
    """Bytes that a group uses, without the page cache, and its limit."""

    used: int
    limit: int
    file: Path


def quota(root: Path = ROOT) -> float | None:
    """Return the cores that the quotas of the group and its ancestors allow, or None if there are no quotas."""
    return min((limit.cores for folder in groups("cpu", root) if (limit := _or_none(core_quota, folder))), default=None)


class Throttle:
    """Measures the share of quota periods in which the group was throttled."""

    def __init__(self, root: Path = ROOT) -> None:
        self._folders = [folder for folder in groups("cpu", root) if _or_none(core_quota, folder)]
        self._before = self._read()

    def _read(self) -> list[Periods]:
        return [_or_none(periods, folder) or Periods(0, 0, folder) for folder in self._folders]

    def share(self) -> float | None:
        """Return the share of the periods since the last call, or None without a quota or a period."""
        before, self._before = self._before, self._read()
        growth = [(b.total - a.total, b.throttled - a.throttled) for a, b in zip(before, self._before, strict=True)]
        return max((throttled / total for total, throttled in growth if total > 0), default=None)


def groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of the groups that may limit this process: its own first, then its ancestors.

    Args:
        controller: `cpu` or `memory`; version 1 has a tree for each.
        root: used in place of `/`.
    """
    mount = root / "sys/fs/cgroup"
    # A container without the list still sees its own group at the top of the mount.
    lines = (_text(root / "proc/self/cgroup") or "0::/\n1:cpu,memory:/").splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group_path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controller if controllers else mount
        path = Path(group_path.lstrip("/"))
        # A container sees its own group at the mount, whatever the group's path is outside.
        yield from (base / part for part in dict.fromkeys((path, *path.parents, Path())) if ".." not in part.parts)


def core_quota(folder: Path) -> CoreQuota | None:
    """Return the cores that one group's quota allows."""
    file = folder / "cpu.max"
    if (text := _text(file)) is not None:
        allowed, period = text.split()[:2]
    else:
        file = folder / "cpu.cfs_quota_us"
        allowed, period = (_text(folder / f"cpu.cfs_{name}_us") or "max" for name in ("quota", "period"))
    if allowed == "max" or int(allowed) <= 0 or int(period) <= 0:
        return None
    return CoreQuota(int(allowed) / int(period), file)


def periods(folder: Path) -> Periods | None:
    """Return a group's periods so far."""
    file = folder / "cpu.stat"
    if (counts := _counts(file)) is None:
        return None
    return Periods(counts.get("nr_periods", 0), counts.get("nr_throttled", 0), file)


def memory_use(folder: Path) -> MemoryUse | None:
    """Return how much of its memory a group uses."""
    for limit_name, used_name, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _text(folder / limit_name)
        if limit is not None and limit != "max":
            cached = (_counts(folder / "memory.stat") or {}).get(cache, 0)
            used = (folder / used_name).read_text(encoding="ascii")
            return MemoryUse(int(used) - cached, int(limit), folder / used_name)
    return None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _counts(file: Path) -> dict[str, int] | None:
    """Return the counters of a file of `name number` lines."""
    text = _text(file)
    if text is None:
        return None
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _or_none(read: Callable[[Path], T | None], folder: Path) -> T | None:
    with contextlib.suppress(OSError, ValueError):
        return read(folder)
    return None

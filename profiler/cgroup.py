"""What this process's control group allows: cores by quota, and how often the quota held it up. Versions 1 and 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Return the cores that the quotas of the group and of those above it allow, or None if there is none."""
    limits = [cores for folder in _groups(root, own) if (cores := _limit(folder)) is not None]
    return min(limits, default=None)


class Throttle:
    """Tells in how many of its periods the quota held the group up.

    Args:
        root: where the groups are mounted.
        own: the system's list of this process's groups.
    """

    def __init__(self, root: Path = ROOT, own: Path = OWN) -> None:
        self._folders = [folder for folder in _groups(root, own) if _limit(folder) is not None]
        self._before = self._read()

    def _read(self) -> list[tuple[int, int]]:
        return [_periods(folder) for folder in self._folders]

    def share(self) -> float | None:
        """Return the share of the periods since the last call, or None without a quota or a period."""
        before, self._before = self._before, self._read()
        grown = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, self._before, strict=True)]
        return max((held / periods for periods, held in grown if periods > 0), default=None)


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of the groups that may limit this process: its own first, then those above it."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = own.read_text(encoding="utf-8").splitlines()
    for line in lines or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        path = Path(place.lstrip("/"))
        # A container sees the mount as its own, whatever its place is called outside.
        yield from (base / part for part in dict.fromkeys((path, *path.parents, Path())) if ".." not in part.parts)


def _limit(folder: Path) -> float | None:
    """Return the cores that one group's quota allows."""
    with contextlib.suppress(OSError, ValueError, IndexError, ZeroDivisionError):
        if (folder / "cpu.max").exists():
            allowed, period = (folder / "cpu.max").read_text(encoding="ascii").split()[:2]
        else:
            allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in _V1)
        return int(allowed) / int(period) if int(allowed) > 0 else None
    return None


_V1 = ("quota", "period")


def _periods(folder: Path) -> tuple[int, int]:
    """Return a group's periods so far, and those in which its quota held it up."""
    with contextlib.suppress(OSError, ValueError):
        rows = dict(line.split()[:2] for line in (folder / "cpu.stat").read_text(encoding="ascii").splitlines() if line)
        return int(rows.get("nr_periods", 0)), int(rows.get("nr_throttled", 0))
    return 0, 0

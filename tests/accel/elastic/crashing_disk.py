"""Disks for tests: one that counts, one that fails, one on which the process dies or the machine loses power."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from accel.elastic.checkpoint import Disk


class Killed(BaseException):
    """The process ends here."""


class CountingDisk(Disk):
    """Calls `before` ahead of each operation, with its number from 0; nothing is really flushed."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []

    def before(self, name: str) -> None:
        self.names.append(name)
        self.count += 1

    def make_folder(self, path: Path) -> None:
        self.before("make_folder")
        super().make_folder(path)

    def open(self, path: Path) -> BinaryIO:
        self.before("open")
        return super().open(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self.before("write")
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self.before("sync")
        file.flush()

    def sync_folder(self, path: Path) -> None:
        self.before("sync_folder")

    def rename(self, old: Path, new: Path) -> None:
        self.before("rename")
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self.before("remove")
        super().remove(path)


class FailingDisk(CountingDisk):
    """Full from one operation on, but for removing."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def before(self, name: str) -> None:
        super().before(name)
        if self.count > self.at and name != "remove":
            raise OSError(errno.ENOSPC, "No space left on device")


class CrashingDisk(CountingDisk):
    """Ends the process at one operation; then `lose_power` takes away what was not flushed.

    Args:
        at: number of the operation that is not done any more; of a write the first half is.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.dead = at, False
        self._flushed: dict[Path, int] = {}
        self._renamed: list[tuple[Path, Path]] = []

    def before(self, name: str) -> None:
        super().before(name)
        self.dead = self.dead or self.count > self.at
        if self.dead:
            raise Killed

    def open(self, path: Path) -> BinaryIO:
        file = super().open(path)
        self._flushed[path] = 0
        return file

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        try:
            super().write(file, data)
        except Killed:
            if self.count == self.at + 1:
                file.write(bytes(data)[: len(data) // 2])
            raise

    def sync(self, file: BinaryIO) -> None:
        super().sync(file)
        self._flushed[Path(file.name)] = file.tell()

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._renamed = [(old, new) for old, new in self._renamed if new.parent != path]

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._renamed.append((old, new))
        self._move(old, new)

    def remove(self, path: Path) -> None:
        self.before("remove")
        # Killed in the middle of it: some files are gone.
        if self.count == self.at:
            for file in sorted(path.iterdir())[:1]:
                file.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)

    def _move(self, old: Path, new: Path) -> None:
        for path in [path for path in self._flushed if path.parent == old]:
            self._flushed[new / path.name] = self._flushed.pop(path)

    def lose_power(self, part: Callable[[], float]) -> None:
        """Undo what nobody flushed.

        Args:
            part: how much of it reached the disk all the same, from 0 to 1.
        """
        for old, new in reversed(self._renamed):
            if new.exists() and part() < 0.5:
                new.rename(old)
                self._move(new, old)
        for path, flushed in self._flushed.items():
            if path.exists():
                size = path.stat().st_size
                with path.open("r+b") as file:
                    file.truncate(flushed + int(part() * (size - flushed)))

"""The operations on files that a checkpoint is made of, each durable where it has to be, in one place.

Tests let each of them fail, or stop the process there, in turn.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import weakref
from pathlib import Path
from typing import BinaryIO


class Disk:
    """Files and folders of the system."""

    def make_folder(self, path: Path) -> None:
        """Make a folder that is not there yet."""
        path.mkdir()

    def open(self, path: Path) -> BinaryIO:
        """Open a new file for writing."""
        return path.open("xb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Append to a file."""
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Return when a file's contents outlast a power failure."""
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder outlast a power failure."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems don't offer it
                raise
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a folder to a name that is free, at once."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a folder and what is in it, as far as that is allowed."""
        shutil.rmtree(path, ignore_errors=True)

    def lock(self, folder: Path) -> FolderLock | None:
        """Keep others from saving into a folder; return None where the file system has no locks.

        Raises:
            OSError: if another one has it.
        """
        handle = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if isinstance(error, BlockingIOError):
                raise OSError(errno.EBUSY, "another training is saved there: give each a folder") from None
            return None
        return FolderLock(handle)


class FolderLock:
    """The lock of a folder, as long as this lives.

    It is of this open file: others in this process don't get it, nor end it with files of their own. A process that is
    forked closes the file first of all, so that workers which outlive this process for a while don't hold it.

    Args:
        handle: of the file, which is locked.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        _locks.add(self)
        _keep_from_forks()

    def close(self) -> None:
        """Let others have it."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    __del__ = close


_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


@functools.cache
def _keep_from_forks() -> None:
    os.register_at_fork(after_in_child=_close_locks)


def _close_locks() -> None:
    for lock in _locks:
        lock.close()

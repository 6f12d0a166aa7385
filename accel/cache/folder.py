"""The cache folder: where it is, and its files, which are read with suspicion and written whole.

Several processes may use it at once. Nothing in it is ever executed: a file is text, and its reader checks each value.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from accel import _imported_in
from accel.files import write_atomic

VARIABLE = "ACCEL_CACHE"
MOST_FILES = 200
MOST_BYTES = 1 << 20
_LEFTOVER_S = 3600.0
# Nothing else is ever deleted, whatever folder the variable names.
_OWN_NAME = re.compile(r"\w{1,40}-[0-9a-f]{24}\.json")
_LEFTOVER = re.compile(rf"\.{_OWN_NAME.pattern}\.\w+\.tmp")


class NoFolder(Exception):
    """There is no cache folder; the message says why, and nothing if it is switched off."""


def cache_folder() -> Path:
    """Return the cache folder: what ACCEL_CACHE names, or else the platform's place for caches.

    A relative one lies where the process was when accel was imported: scripts change to another directory for each run.

    Raises:
        NoFolder: if it is switched off, or the user has no home.
    """
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen == "0":
        raise NoFolder
    try:
        if chosen in ("", "1"):
            return _platform_folder() / "accel"
        return Path(_imported_in, Path(chosen).expanduser()).absolute()
    except RuntimeError as error:
        raise NoFolder(f"{error}; {VARIABLE}=FOLDER names one") from None


def _platform_folder() -> Path:
    for variable in ("XDG_CACHE_HOME", *(["LOCALAPPDATA"] if sys.platform == "win32" else [])):
        folder = Path(os.environ.get(variable, ""))
        if folder.is_absolute():  # the specification of XDG says to pass over relative ones
            return folder
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


class CacheFolder:
    """Small text files in one folder, the oldest of which go when there are too many.

    Args:
        path: need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> str | None:
        """Return a file's text, or None if there is none.

        Raises:
            OSError: if it can't be read.
            ValueError: if it is no ordinary file of a sensible size, or no text.
        """
        try:
            # A pipe of that name must not hold the run up.
            handle = os.open(self.path / name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            return None
        with os.fdopen(handle, "rb") as file:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_BYTES:
                raise ValueError("it is no ordinary file of less than a megabyte")
            return file.read(MOST_BYTES).decode("utf-8")

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all, and delete the oldest if there are too many.

        Raises:
            OSError: if the folder can't be written.
        """
        target = self.path / name
        with contextlib.suppress(OSError):  # a pipe would be written into, which waits for a reader
            # Not what a link points to: in a folder that others write in too, it could be any file of this user's.
            if not stat.S_ISREG(target.lstat().st_mode):
                target.unlink()
        write_atomic(target, text)
        self._prune(name)

    def delete(self, name: str) -> None:
        """Delete a file; one that can't be deleted stays."""
        with contextlib.suppress(OSError):
            (self.path / name).unlink(missing_ok=True)

    def _prune(self, newest: str) -> None:
        """Delete the oldest files, and what processes that were killed left half written."""
        ages = sorted(self._ages(), reverse=True)
        own = [name for _, name in ages if _OWN_NAME.fullmatch(name) and name != newest]
        leftovers = [name for age_s, name in ages if _LEFTOVER.fullmatch(name) and age_s > _LEFTOVER_S]
        for name in [*own[: max(0, len(own) + 1 - MOST_FILES)], *leftovers]:
            self.delete(name)

    def _ages(self) -> Iterator[tuple[float, str]]:
        now = time.time()
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # another process may have deleted it
                    yield now - entry.stat(follow_symlinks=False).st_mtime, entry.name


def file_name(title: str, digest: str) -> str:
    """Return the name of a file: a title for people, and what tells it apart.

    Args:
        title: any text.
        digest: at least 24 hexadecimal digits.
    """
    return f"{re.sub(r'[^A-Za-z0-9_]', '_', title)[:40] or '_'}-{digest[:24]}.json"

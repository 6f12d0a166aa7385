"""The cache folder: where it is, and its files, which are read with suspicion and written whole.

Several processes may use it at once. Nothing in it is ever executed: a file is text, and its reader checks each value.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

from accel import _imported_in
from accel.errors import AccelError, InvalidArgument
from accel.files import write_atomic

VARIABLE = "ACCEL_CACHE"
MOST_FILES = 200
MOST_BYTES = 1 << 20
# Nothing else is ever deleted, whatever folder the variable names.
_OWN_NAME = re.compile(r"\w{1,40}-[0-9a-f]{24}\.json")


class NoFolder(AccelError):
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


def read_file(path: Path) -> str | None:
    """Return a file's text, or None if there is none.

    Raises:
        OSError: if it can't be read.
        InvalidArgument: if it is no ordinary file of a sensible size, or no text.
    """
    if not path.exists():
        return None
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise InvalidArgument("it is no ordinary file of less than a megabyte")
    return path.read_text(encoding="utf-8")


def write_file(path: Path, text: str) -> None:
    """Write a file whole or not at all, and delete the oldest of its folder if there are too many.

    Raises:
        OSError: if the folder can't be written.
    """
    if path.is_symlink():  # in a folder that others write in too, it could lead to any file of this user's
        delete_file(path)
    write_atomic(path, text)
    own = []
    for file in path.parent.iterdir():
        with contextlib.suppress(OSError):  # another process may have deleted it
            if _OWN_NAME.fullmatch(file.name) and file != path:
                own.append((file.lstat().st_mtime, file))
    for _, file in sorted(own, reverse=True)[MOST_FILES - 1 :]:
        delete_file(file)


def delete_file(path: Path) -> None:
    """Delete a file; one that can't be deleted stays."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def file_name(title: str, digest: str) -> str:
    """Return the name of a file: a title for people, and what tells it apart.

    Args:
        title: any text.
        digest: at least 24 hexadecimal digits.
    """
    return f"{re.sub(r'[^A-Za-z0-9_]', '_', title)[:40] or '_'}-{digest[:24]}.json"

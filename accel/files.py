"""Files are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from accel.errors import InvalidArgument

_START = 200
"""Bytes of a file's name that its temporary one begins with: with what is added, they are below the usual 255."""


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part.

    The text goes to a temporary file in the same folder, is flushed to disk and renamed over `path`. A device or a pipe
    stays what it is: the text is written into it.

    Args:
        path: destination; missing parent folders are made.
        text: contents, written as UTF-8.

    Raises:
        OSError: if the folder can't be written; `path` is then as it was.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    target.parent.mkdir(parents=True, exist_ok=True)
    start = os.fsencode(target.name)[:_START].decode(errors="ignore")
    temporary = target.with_name(f".{start}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save(option: str, target: str | os.PathLike[str], text: str) -> None:
    """Write a file that a command was asked for, or raise InvalidArgument with the reason.

    Args:
        option: as on the command line.
        target: the file.
        text: its contents.
    """
    try:
        write_atomic(target, text)
    except OSError as error:
        reason = error.strerror or error
        raise InvalidArgument(f"{option} {target} can't be written: {reason}; name another place") from None


def check_folder(option: str, target: str | os.PathLike[str]) -> None:
    """Raise InvalidArgument unless a file that a command is to write lies in a folder that exists.

    A command that made folders would write to a mistyped path without notice. Checking first avoids measuring in vain.

    Args:
        option: as on the command line.
        target: the file.
    """
    if not os.path.isdir(Path(target).parent):  # no error where a folder above it is closed
        raise InvalidArgument(f"{option} must lie in a directory that exists, got {str(target)!r}; make it first")


def _is_there(option: str, target: Path) -> bool:
    try:
        os.stat(target)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # its name is too long, or a folder above it is closed
        raise InvalidArgument(
            f"{option} must be a place that can be written, got {str(target)!r} ({error.strerror}); name another one"
        ) from error
    return True


def check_report(option: str, report: Path, *, may_be_page: bool = True) -> None:
    """Raise InvalidArgument if a report can't go there; folders that are not there yet are made with it.

    Args:
        option: as it is written: on the command line, or of `accel.optimize`.
        report: the place.
        may_be_page: it may be a page alone.
    """
    if report.suffix.lower() == ".html" and not may_be_page:
        raise InvalidArgument(
            f"{option} must be a folder or a .json file, got {str(report)!r}; the page is written beside that"
        )
    place = next(place for place in (report, *report.parents) if _is_there(option, place))
    is_file = report.suffix in (".json", ".html")
    if report.suffix in _OTHER_FILES or place.is_dir() == (is_file and place == report):
        raise InvalidArgument(
            f"{option} must be a folder, a .json or a .html file, got {str(report)!r}"
            + (f", and {str(place)!r} is not" if place != report and not place.is_dir() else ", which is not")
            + "; name another one"
        )
    if not os.access(place, os.W_OK):
        raise InvalidArgument(f"{option} must be a place that can be written, got {str(place)!r}; name another one")


_OTHER_FILES = frozenset({".txt", ".log", ".md", ".csv", ".yaml", ".yml", ".pdf"})
"""Endings of files that a report is not written to; "runs/lr0.001" may be a folder."""

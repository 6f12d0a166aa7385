"""Raise KeyboardInterrupt at one line of the library after the other, as Ctrl-C might."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Interrupter:
    """Counts the lines of a folder's code that run, and raises at number `at`.

    Args:
        folder: of the library.
        at: number of the line, from 0; None to count only.
    """

    def __init__(self, folder: str, at: int | None) -> None:
        self.at, self.lines, self.place = at, 0, ""
        self._folder = str(ROOT / folder)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return (
            self._line if _real(frame.f_code.co_filename).startswith(self._folder) and not _swallowed(frame) else None
        )

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines - 1 == self.at:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


@functools.cache
def _real(filename: str) -> str:
    return str(Path(filename).resolve())


def _swallowed(frame: FrameType | None) -> bool:
    """Tell whether Python would print an exception there and go on: in a finalizer, or a weak reference's callback."""
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "gone", "_end"):
            return True
        frame = frame.f_back
    return False

"""Find the training loop in the user's own source: which lines ask for the next batch."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType

from accel.profiler.dataflow import Loop, feeding_lines

_HERE = str(Path(__file__).resolve().parent)
_LIBRARY = tuple(
    {
        os.path.realpath(path) + os.sep
        for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
        if path
    }
)


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Tell whether a source file is the user's: not Python's, not an installed package's, not the profiler's."""
    if file.startswith("<") or "site-packages" in file or "dist-packages" in file:
        return False
    real = os.path.realpath(file)
    return not real.startswith((*_LIBRARY, _HERE + os.sep)) and not _is_accels(real)


def _is_accels(real: str) -> bool:
    package = sys.modules.get("accel")
    home = getattr(package, "__file__", None)
    return home is not None and real.startswith(os.path.dirname(os.path.realpath(home)) + os.sep)


def users_frames(frame: FrameType | None) -> list[tuple[str, int]]:
    """Return file and line of the user's frames in a stack, the innermost first."""
    found = []
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            found.append((file, frame.f_lineno or 0))  # None within code that has no line of its own
        frame = frame.f_back
    return found


def source(file: str, line: int) -> str:
    """Return a line's text without its indentation, '' if there is none."""
    return linecache.getline(file, line).strip() if line > 0 else ""


@lru_cache(maxsize=64)
def _loops(file: str) -> tuple[Loop, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, Loop))


def batch_lines(frames: list[tuple[str, int]]) -> set[tuple[str, int]]:
    """Return the lines that ask for the next batch, given the user's frames in which an optimizer stepped.

    These are the heads of the `for` loops around the step, and in the loops around it lines with `next(…)` and
    assignments that make what the step takes, as in `x, y = get_batch()`.
    """
    found: set[tuple[str, int]] = set()
    for file, line in frames:
        for loop in _loops(file):
            if not loop.lineno <= line <= (loop.end_lineno or loop.lineno):
                continue
            if not isinstance(loop, ast.While):
                head_end = max(loop.lineno, loop.body[0].lineno - 1)
                found.update((file, number) for number in range(loop.lineno, head_end + 1))
            found.update((file, number) for number in feeding_lines(loop, line))
            calls = (node for node in ast.walk(loop) if isinstance(node, ast.Call))
            found.update((file, call.lineno) for call in calls if _is_next(call))
    return found


def _is_next(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "next"

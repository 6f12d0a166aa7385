"""Find the training loop in the user's own source: which lines ask for the next batch."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from types import FrameType

from accel.profiler.system.dataflow import Loop, StepBody, feeding_lines

_HERE = str(Path(__file__).resolve().parents[1])  # the profiler's folder
_LIBRARY = tuple(
    {
        os.path.realpath(path) + os.sep
        for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
        if path
    }
)


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Return whether a source file is the user's: not Python's, not an installed package's, not the profiler's."""
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
    frames = []
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            frames.append((file, frame.f_lineno or 0))  # None in code without a line of its own
        frame = frame.f_back
    return frames


def source(file: str, line: int) -> str:
    """Return a line's text without its indentation, '' if there is none."""
    return linecache.getline(file, line).strip() if line > 0 else ""


@lru_cache(maxsize=64)
def _parsed(file: str) -> tuple[StepBody, ...]:
    """Return a file's loops and functions."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, StepBody))


def _around(file: str, line: int) -> tuple[list[Loop], list[StepBody]]:
    """Return the loops around a line within its function, and that function."""
    around = [node for node in _parsed(file) if node.lineno <= line <= (node.end_lineno or node.lineno)]
    functions = [node for node in around if not isinstance(node, Loop)]
    inner = max(functions, key=lambda node: node.lineno, default=None)
    loops = [node for node in around if isinstance(node, Loop) and (inner is None or node.lineno > inner.lineno)]
    return loops, [] if inner is None else [inner]


def batch_lines(frames: list[tuple[str, int]], model: Collection[tuple[str, int]] = ()) -> set[tuple[str, int]]:
    """Return the lines that make or ask for the next batch.

    These are the heads of the `for` loops around the step, and in the loops around it lines with `next(…)` and
    assignments that make what the step takes, as in `x, y = get_batch()`. In functions between the innermost loop and
    the step, the same assignments.

    Args:
        frames: the user's frames in which an optimizer stepped, the innermost first.
        model: the lines in which the model was called, as far as known.
    """
    lines: set[tuple[str, int]] = set()
    looped = False
    for file, line in reversed(frames):
        loops, function = _around(file, line)
        called = [number for path, number in model if path == file]
        for loop in loops:
            if not isinstance(loop, ast.While):
                # A line that contains some of the body does not count: samples of it are mostly the body's.
                lines.update((file, number) for number in range(loop.lineno, loop.body[0].lineno))
            calls = (node for node in ast.walk(loop) if isinstance(node, ast.Call))
            lines.update((file, call.lineno) for call in calls if _is_next(call))
        for node in loops or (function if looped else []):
            lines.update((file, number) for number in feeding_lines(node, line, called))
        looped = looped or bool(loops)
    return lines


def _is_next(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "next"

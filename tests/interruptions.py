"""Raise KeyboardInterrupt at one place of the library after the other, as Ctrl-C might; or what a time limit raises."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]

GRAD_MODE = torch.autograd.grad_mode.__file__
"""Torch's `no_grad` and its like are lines of Python too: between two of them the mode has changed already."""

_LIBRARY = tuple(f"{ROOT / name}/" for name in ("accel", "comm", "dataio", "kernels", "profiler"))
_TORCH = f"{Path(torch.__file__).resolve().parent}/"


class Interrupter:
    """Counts the lines of a folder's code that run, and raises at number `at`.

    Args:
        folder: of the library, or a file; also one of another library, where this one has called it.
        at: number of the line, from 0; None to count only.
        error: to raise.
    """

    def __init__(self, folder: str, at: int | None, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.places, self.place, self.error = at, 0, "", error
        self.is_swallowed = False
        """It came in a generator that Python has closed as the last reference went, and reaches nobody."""
        self._folder = _real(str(ROOT / folder))
        self._is_ours = self._folder.startswith(_LIBRARY) or f"{self._folder}/" in _LIBRARY

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before, hook = sys.gettrace(), sys.unraisablehook
        sys.unraisablehook = functools.partial(self._swallow, hook)
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            sys.unraisablehook = hook

    def _swallow(self, hook: Callable[[Any], object], unraisable: Any) -> None:
        if unraisable.exc_type is self.error:
            self.is_swallowed = True
        else:
            hook(unraisable)

    def _call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not _real(frame.f_code.co_filename).startswith(self._folder) or _swallowed(frame):
            return None
        return self._begin(frame) if self._is_ours or _ours_called(frame) else None

    def _begin(self, frame: FrameType) -> Callable[..., Any]:
        return self._within

    def _within(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self._pass(frame)
        return self._within

    def _pass(self, frame: FrameType) -> None:
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("PUSH_EXC_INFO", "POP_EXCEPT"):
            return  # signals never come there, and an error would stay the one that the thread handles, for good
        self.places += 1
        if self.places - 1 == self.at:
            self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise self.error


class SignalInterrupter(Interrupter):
    """Counts the places where CPython looks for signals, and no others: there are lines that Ctrl-C never parts.

    It looks where a function begins, after each call, and where a loop begins again.
    """

    def _begin(self, frame: FrameType) -> Callable[..., Any]:
        frame.f_trace_opcodes = True
        self._pass(frame)
        return functools.partial(self._opcode, [""])

    def _opcode(self, before: list[str], frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            looked, before[0] = before[0], dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if looked.startswith(("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
                self._pass(frame)
        return functools.partial(self._opcode, before)


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


def _ours_called(frame: FrameType) -> bool:
    """Tell whether the library called another's code, by itself or as a decorator of its own function."""
    caller: FrameType | None = frame
    while caller is not None and _real(caller.f_code.co_filename).startswith(_TORCH):
        caller = caller.f_back
    return caller is not None and _real(caller.f_code.co_filename).startswith(_LIBRARY)

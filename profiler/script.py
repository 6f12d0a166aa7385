"""Run a script as Python would, with the profiler around it.

The script runs as `__main__`, with its own directory first on the path and its own arguments. Its output, exit status
and tracebacks are unchanged.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True)
class Ending:
    """How a script ended."""

    status: int
    text: str
    """`completed`, `exited with N`, `raised …`, `interrupted` or `terminated`."""


class _TerminatedError(BaseException):
    """The process was asked to end."""


class Script:
    """A script to be run as Python would, by the caller itself, so that as few frames as possible lie below it.

        with script:
            exec(script.code(), script.globals)

    Depth is part of what a script costs: autograd's anomaly detection writes down the whole stack for each operation.
    Four frames more made a step of benchmarks/faults/scripts/anomaly.py 6 ms longer, of 20.

    Args:
        target: path of the script, or the module's name.
        arguments: its own.
        module: `target` is a module's name.

    Attributes:
        globals: those of `__main__`.
        ending: how it ended, once it has.
    """

    def __init__(self, target: str, arguments: list[str], *, module: bool = False) -> None:
        self.ending = Ending(0, "completed")
        self._target, self._arguments, self._module = target, arguments, module
        self._main = types.ModuleType("__main__")
        self.globals: dict[str, Any] = vars(self._main)
        self._terminable = _Terminable()

    def code(self) -> types.CodeType:
        """Make this process the script's, as far as Python's own start does, and return what to execute."""
        sys.argv = [self._target, *self._arguments]
        code = self._code_of_module() if self._module else self._code_of_file()
        # It stays in place afterwards: threads and exit handlers of the script still use its globals.
        sys.modules["__main__"] = self._main
        return code

    def _code_of_file(self) -> types.CodeType:
        path = os.path.abspath(self._target)
        sys.path[0] = os.path.dirname(path)
        # As Python does since 3.9: the absolute path, valid wherever the script goes.
        self.globals.update(
            __file__=path, __builtins__=builtins, __spec__=None, __loader__=None, __annotations__={}, __cached__=None
        )
        return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)

    def _code_of_module(self) -> types.CodeType:
        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(self._target)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{self._target}.__main__")
        loader: Any = spec.loader if spec is not None else None
        code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
        if spec is None or not isinstance(code, types.CodeType):
            raise ImportError(f"no module named {self._target!r} that can be run; packages need a __main__.py")
        sys.argv[0] = spec.origin or self._target
        self.globals.update(
            __file__=spec.origin,
            __builtins__=builtins,
            __spec__=spec,
            __loader__=loader,
            __package__=spec.parent,
            __annotations__={},
            __cached__=spec.cached,
        )
        return code

    def __enter__(self) -> Script:
        self._terminable.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> Literal[True]:
        self.untouched()
        if error is not None:
            self.ending = _ending(error)
        return True

    def untouched(self) -> None:
        """Restore Python's own handling of SIGTERM."""
        self._terminable.end()


def _ending(error: BaseException) -> Ending:
    """Return how a script ended that raised this, and print it as Python would."""
    if isinstance(error, SystemExit):
        return _exited(error)
    if isinstance(error, _TerminatedError):
        return Ending(TERMINATED, "terminated")
    _show(error)
    if isinstance(error, KeyboardInterrupt):
        return Ending(INTERRUPTED, "interrupted")
    return Ending(1, f"raised {type(error).__name__}")


def _exited(leaving: SystemExit) -> Ending:
    if leaving.code is None or leaving.code == 0:
        return Ending(0, "completed")
    if isinstance(leaving.code, int):
        return Ending(leaving.code & 0xFF, f"exited with {leaving.code & 0xFF}")
    print(leaving.code, file=sys.stderr)
    return Ending(1, "exited with 1")


def _show(error: BaseException) -> None:
    """Print the traceback, without the profiler's frames on top."""
    trimmed = _own_frames_removed(error.__traceback__)
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(type(error), error, trimmed)
    else:
        sys.excepthook(type(error), error, trimmed)


def _own_frames_removed(trace: TracebackType | None) -> TracebackType | None:
    rest = trace.tb_next if trace is not None else None  # the first is the caller of the script
    while rest is not None and rest.tb_frame.f_code.co_filename == __file__:
        rest = rest.tb_next
    return rest


class _Terminable:
    """Let SIGTERM unwind the script, so that the report can be written; a script's own handler stays."""

    def __init__(self) -> None:
        self._previous: Callable[..., Any] | int | None = None

    def begin(self) -> None:
        try:
            self._previous = signal.getsignal(signal.SIGTERM)
            if self._previous == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, _leave)
        except ValueError:  # not the main thread
            self._previous = None

    def end(self) -> None:
        if self._previous == signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is _leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    raise _TerminatedError

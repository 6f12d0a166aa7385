"""Run a script as Python would, with the profiler around it.

The script finds itself in `__main__`, with its own directory first on the path and its own arguments. What it prints,
its exit status and its tracebacks are its own.
"""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

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


def run(target: str, arguments: list[str], *, module: bool = False) -> Ending:
    """Run a script, or a module by name, to its end.

    Args:
        target: path of the script, or the module's name.
        arguments: its own.
        module: `target` is a module's name.
    """
    with _terminable():
        try:
            if module:
                sys.argv = [target, *arguments]
                sys.path.insert(0, os.getcwd())
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                _run_file(target, arguments)
        except SystemExit as leaving:
            return _exited(leaving)
        except KeyboardInterrupt as error:
            _show(error)
            return Ending(INTERRUPTED, "interrupted")
        except _TerminatedError:
            return Ending(TERMINATED, "terminated")
        except BaseException as error:  # the script's own; shown as Python would show it
            _show(error)
            return Ending(1, f"raised {type(error).__name__}")
    return Ending(0, "completed")


def _run_file(target: str, arguments: list[str]) -> None:
    path = os.path.abspath(target)
    sys.argv = [target, *arguments]
    sys.path[0] = os.path.dirname(path)
    main = types.ModuleType("__main__")
    # As Python does since 3.9: the absolute path, valid wherever the script goes.
    main.__dict__.update(
        __file__=path, __builtins__=builtins, __spec__=None, __loader__=None, __annotations__={}, __cached__=None
    )
    # It stays in place afterwards: threads and exit handlers of the script still use its globals.
    sys.modules["__main__"] = main
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


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


def _own_frames_removed(shown: TracebackType | None) -> TracebackType | None:
    here = __file__
    rest = shown
    while rest is not None and rest.tb_frame.f_code.co_filename in (here, runpy.__file__, "<frozen runpy>"):
        rest = rest.tb_next
    return rest


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the script, so that the report can be written; a script's own handler stays."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise _TerminatedError

    found: Callable[..., Any] | int | None = None
    try:
        found = signal.getsignal(signal.SIGTERM)
        if found == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        found = None
    try:
        yield
    finally:
        if found == signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

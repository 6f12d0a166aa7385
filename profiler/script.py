"""Run a script as Python would, with the profiler around it.

The script runs as `__main__`, with its own directory first on the path and its own arguments. Its output, exit status
and tracebacks are unchanged.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import os
import signal
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from accel.profiler import stderr

TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_PASSES_ON = tuple(
    os.path.join(_PACKAGE, *folder.split("/"), "")
    for folder in (
        *("profiler", "script", "session", "run", "strategies", "guard", "graphs", "amp"),
        *("dataio/passes", "dataio/engine", "dataio/fetching"),
    )
)
"""Where calls of the script's pass through that it would not pass without a command of accel's."""


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
        self._termination = UnwindOnTermination()

    def code(self) -> types.CodeType:
        """Make this process the script's, as far as Python's own start does, and return what to execute."""
        sys.argv = [self._target, *self._arguments]
        code = self._code_of_module() if self._module else self._code_of_file()
        # It stays in place afterwards: threads and exit handlers of the script still use its globals.
        sys.modules["__main__"] = self._main
        return code

    def _code_of_file(self) -> types.CodeType:
        path = os.path.abspath(self._target)
        _set_first_on_path(os.path.dirname(os.path.realpath(path)))  # links are followed for this, not for __file__
        self._set_globals(__file__=path)  # as Python does since 3.9: the absolute path, valid wherever the script goes
        return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)

    def _code_of_module(self) -> types.CodeType:
        _set_first_on_path(os.getcwd())
        spec = importlib.util.find_spec(self._target)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{self._target}.__main__")
        loader: Any = spec.loader if spec is not None else None
        code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
        if spec is None or not isinstance(code, types.CodeType):
            raise ImportError(f"no module named {self._target!r} that can be run; packages need a __main__.py")
        sys.argv[0] = spec.origin or self._target
        more = {"__spec__": spec, "__loader__": loader, "__package__": spec.parent, "__cached__": spec.cached}
        self._set_globals(__file__=spec.origin, **more)
        return code

    def _set_globals(self, **names: Any) -> None:
        none = dict.fromkeys(("__spec__", "__loader__", "__cached__"))
        self.globals.update({**none, "__builtins__": builtins, "__annotations__": {}, **names})

    def __enter__(self) -> Script:
        self._termination.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> Literal[True]:
        self.untouched()
        if error is not None:
            self.ending = _ending(error)
        if self._termination.has_come and self.ending.status == 0:  # the script has caught what was to end it
            self.ending = Ending(TERMINATED, "terminated")
        return True

    def untouched(self) -> None:
        """Restore Python's own handling of SIGTERM."""
        self._termination.end()


def _set_first_on_path(folder: str) -> None:
    """Put a folder in the place of the one of accel's own command; with `python -P` there is none."""
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        sys.path[0] = folder


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
    if leaving.code is None:
        return Ending(0, "completed")
    if isinstance(leaving.code, int):  # anything else is printed: 0.0, or a tensor
        status = leaving.code & 0xFF
        return Ending(status, f"exited with {status}" if leaving.code else "completed")
    stderr.write(f"{leaving.code}")
    return Ending(1, "exited with 1")


def _show(error: BaseException) -> None:
    """Print the traceback as Python does, without frames of accel's on top and in between."""
    trimmed = _own_frames_removed(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(trimmed), trimmed)


def _own_frames_removed(trace: TracebackType | None) -> TracebackType | None:
    rest = trace.tb_next if trace is not None else None  # the first is the caller of the script
    entries: list[TracebackType] = []
    while rest is not None:
        entries.append(rest)
        rest = rest.tb_next
    while entries and entries[0].tb_frame.f_code.co_filename == __file__:
        entries.pop(0)
    # What failed in accel itself is shown whole.
    end = max((place for place, entry in enumerate(entries) if not _passes_on(entry)), default=-1)
    for place, entry in reversed(list(enumerate(entries))):
        if place > end or not _passes_on(entry):
            line = entry.tb_lineno  # None where Ctrl-C came at an instruction of no line
            rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, -1 if line is None else line)
    return rest


def _passes_on(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_PASSES_ON)


class UnwindOnTermination:
    """A handler of SIGTERM in place of the default one: it unwinds the script once, so that the report can be written.

    A script's own handler stays. One that the script sets later may call the one that was there, as chained handlers
    do; the default one is no function, so nothing is called then. Called by another handler, this one does nothing
    either: raised there, its error would tear the step apart that the other one lets end.

    Attributes:
        has_come: the signal has come, and the script was to be unwound.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._process: int | None = None
        """The one whose script is to be unwound."""

    def begin(self) -> None:
        """Handle the signal from now on, if nobody does."""
        self._process = os.getpid()
        with contextlib.suppress(ValueError):  # not the main thread
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self)

    def end(self) -> None:
        """Restore the default one; where somebody has kept this one, it does the same from now on."""
        self._process = None
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Unwind the script; end the process where there is none to unwind: in a forked child, or afterwards."""
        has_script, is_set = os.getpid() == self._process, signal.getsignal(number) is self
        if not is_set:
            return
        signal.signal(number, signal.SIG_DFL)
        if not has_script:
            os.kill(os.getpid(), number)
            return
        self.has_come = True
        raise _TerminatedError

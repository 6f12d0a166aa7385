"""A script that a command runs as Python would, with something of ours around it."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click

from accel.errors import InvalidArgument

if TYPE_CHECKING:
    from accel.profiler.script import Script

_OWN = "accel."
_NO_SOURCE = {
    ".ipynb": "call accel.optimize in the notebook, or convert it: jupyter nbconvert --to script",
    ".sh": "put the command before the script that it starts",
}
_CHILDREN_S = 1.0
"""CPU seconds of child processes above which they may have trained; importing torch takes about as long."""


class ScriptJob:
    """A script ready to be run.

        with job:
            exec(job.script.code(), job.script.globals)
        job.leave()

    Args:
        script: what to run.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self._process = os.getpid()
        self._is_running = True

    def begin(self, context: click.Context) -> None:
        """Let the caller of click run the script, outside of click's frames; run it here if there is none."""
        if isinstance(context.obj, list):
            context.obj.append(self)
            return
        with self:
            exec(self.script.code(), self.script.globals)
        context.exit(self.script.ending.status)

    def leave(self) -> NoReturn:
        """End the process as the script would have ended it.

        After Ctrl-C it ends by the signal, as Python does of itself when nobody catches it: after an exit status a
        shell's loop over runs would continue. Python sees to it if source text ends so.
        """
        if self.script.ending.text == "interrupted":
            sys.excepthook = lambda *_: None  # the script's own traceback has been printed
            exec("raise KeyboardInterrupt")
        sys.exit(self.script.ending.status)

    def begin_after_torch(self) -> None:
        """Call `start` once the script has imported torch; what a forked child or an exit handler imports is theirs."""

        def imported() -> None:
            if self._is_running and os.getpid() == self._process:
                try:
                    self.start()
                except Exception as fault:
                    say(f"accel: {type(fault).__name__}: {fault}; the script goes on without accel")

        after_import("torch", imported)

    def start(self) -> None:
        """Put something of ours around the training; torch has been imported."""
        raise NotImplementedError

    def leave_alone(self) -> None:
        """Restore what was changed in this process: it is a forked child."""
        raise NotImplementedError

    def conclude(self) -> None:
        """The script has ended: say what there is to say."""
        raise NotImplementedError

    def __enter__(self) -> None:
        self.script.__enter__()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Leave a forked child alone: its training is not seen, and SIGTERM ends it at once."""
        self.leave_alone()
        self.script.untouched()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[True]:
        self._is_running = False
        self.script.__exit__(kind, error, trace)
        if os.getpid() != self._process:
            _end_of_child(self.script.ending.status)
        from accel.profiler import stderr

        try:
            with stderr.none_if_closed():
                self.conclude()
        except Exception as fault:  # the script has run: its exit status stays
            say(f"accel: the report could not be made: {type(fault).__name__}: {fault}")
        return True


def _end_of_child(status: int) -> NoReturn:
    """End a forked child that leaves through its parent's frames.

    It ends as Python does, but without the exit handlers of libraries: after a trace, that of torch's profiler waits
    for a thread that only the parent has.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script has left None, a closed one, or an object of its own
            stream.flush()
    os._exit(status)


def say(text: str) -> None:
    """Print a message to stderr, unless the script has left none that can be written."""
    from accel.profiler import stderr

    stderr.write(text)


def own_arguments(arguments: tuple[str, ...]) -> list[str]:
    """Return the script's own arguments, without the `--` before them."""
    return list(arguments[1:] if arguments[:1] == ("--",) else arguments)


def check_script(script: str, module: bool) -> None:
    """Raise InvalidArgument if there is no such script, or none whose source can be run."""
    if module:
        if script.endswith(".py"):
            raise InvalidArgument(f"-m takes a module's name, got {script!r}, a file's name; leave out -m, or '.py'")
        return
    if script.startswith("-"):
        known = [option for each in click.get_current_context().command.params for option in each.opts]
        near = difflib.get_close_matches(script.partition("=")[0], known, n=1)
        raise InvalidArgument(
            f"SCRIPT must be a Python file, got {script!r}, which is no option of this command; options of the script "
            "go after it: train.py -- --epochs 3" + (f"; did you mean {near[0]}?" if near else "")
        )
    if os.path.isdir(script):
        raise InvalidArgument(
            f"SCRIPT must be a Python file, got {script!r}, which is a folder; name its __main__.py, or use -m"
        )
    if not os.path.isfile(script):
        raise InvalidArgument(
            f"SCRIPT must be a Python file, got {script!r}, which is not there; name the script alone, without python "
            "or torchrun before it; -m takes a module name"
        )
    if remedy := _NO_SOURCE.get(os.path.splitext(script)[1]):
        raise InvalidArgument(f"SCRIPT must be Python source, got {script!r}; {remedy}")
    if _holds_null_bytes(script):
        raise InvalidArgument(
            f"SCRIPT must be Python source, got {script!r}, which is compiled or an archive; name its source, or use -m"
        )


def _holds_null_bytes(script: str) -> bool:
    """Return whether a file can't be source, by its beginning; one that can't be read is an error when it is run."""
    with contextlib.suppress(OSError), open(script, "rb") as file:
        return b"\0" in file.read(1024)
    return False


def training_in_children(command: str) -> str:
    """Say that child processes may have trained, and what to do; '' if they hardly ran."""
    used = os.times()
    children_s = used.children_user + used.children_system
    if children_s < _CHILDREN_S:
        return ""
    return (
        f"accel: child processes ran for {children_s:.1f} s; training in them is not seen. Start the ranks with "
        f"torchrun --nproc-per-node N -m accel {command}, or call accel.optimize in the child"
    )


# --- when torch has been imported -------------------------------------------------------------------------------------


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` when the module has been imported, at once if it has been already.

    If a module of accel's imports it, `then` waits until that one is whole, since it may need what stands there.

    Args:
        name: of a module at the top, such as `torch`.
        then: must not raise.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Marks each specification of the module that it hands out, for the one that is loaded is seldom the first.

    Libraries ask whether a module is installed, with `importlib.util.find_spec`, and throw the answer away.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then
        self._is_imported = False
        self._being_imported: set[str] = set()
        """Modules of accel's own."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name and not name.startswith(_OWN):
            return None
        spec = self._of_the_next(name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._mark(name, spec.loader)
        return spec

    def _of_the_next(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Return what the finders after this one find; those before it have been asked."""
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else []:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return spec
        return None

    def _mark(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with contextlib.suppress(AttributeError):  # marked twice, where a finder hands out one loader again
                del loader.exec_module
            self._import(name, execute, module)

        loader.exec_module = exec_module

    def _import(self, name: str, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        if name != self._name:
            self._being_imported.add(name)
        try:
            execute(module)
            self._is_imported = self._is_imported or name == self._name
        finally:
            self._being_imported.discard(name)
            if self._is_imported and not self._being_imported and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

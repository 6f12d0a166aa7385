"""Tell an interruption from an error of the code that it lands in.

A signal handler that raises (a time limit, a batch system's warning) comes up wherever the loop's thread just is, in
code of ours too; so does what a trace function raises, or another thread puts into this one. Whatever its class, it is
the loop's, as Ctrl-C is, and nothing of ours may take it for an error of its own:

    except ours() as error:     in place of `except Exception as error:`
    with Tolerated(what):       the same around work that may fail: it is logged, and passed over
"""

from __future__ import annotations

import dis
import inspect
import logging
import os
import signal
import sys
from importlib.util import find_spec
from sysconfig import get_path
from types import FrameType, TracebackType

log = logging.getLogger("accel")

ACCEL, _PYTHON = (os.path.join(path, "") for path in (os.path.dirname(os.path.dirname(__file__)), get_path("stdlib")))
_TORCH = os.path.join(*(getattr(find_spec("torch"), "submodule_search_locations", None) or ["torch"]), "")
_LIBRARIES = {"accel", "filelock", "numpy", "sympy", "torch", "triton", *sys.stdlib_module_names}
"""Packages whose errors code of ours or of torch's may meet."""


def ours(*kinds: type[Exception]) -> tuple[type[Exception], ...]:
    """Return what an `except` clause is to catch: these, or every Exception; but nothing where an interruption passes.

    One that torch has wrapped, as its compiler does with whatever is raised in it, is raised here as it was.
    """
    error = sys.exc_info()[1]
    interruption = _interruption(error)
    if interruption is None:
        return kinds or (Exception,)
    if interruption is not error:
        context = interruption.__context__
        try:
            raise interruption
        finally:
            interruption.__context__ = context
    return ()


class Tolerated:
    """Pass over an error of what is done in a block, which must not reach the loop.

    Args:
        what: is said of it in the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        is_passed_over = kind is not None and issubclass(kind, ours())
        if is_passed_over:
            log.debug("accel: %s: %s", self._what, error)
        return is_passed_over


def is_of_the_loop(kind: type[BaseException]) -> bool:
    """Tell whether a class of exceptions is the loop's, so that no library but its own raises it."""
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def place_of(frame: FrameType) -> str:
    """Return whose code a frame runs: "accel", "torch", "python" (the standard library) or "loop" (all others)."""
    path = frame.f_code.co_filename
    if path.startswith(ACCEL):
        return "accel"
    if path.startswith(_TORCH):
        return "torch"
    is_installed = "site-packages" in path or "dist-packages" in path
    return "python" if path.startswith("<frozen") or (path.startswith(_PYTHON) and not is_installed) else "loop"


def is_raised(at: TracebackType) -> bool:
    """Tell whether a `raise` stands there, or an `assert`; else an operation of Python or of an extension failed."""
    return dis.opname[at.tb_frame.f_code.co_code[at.tb_lasti]] == "RAISE_VARARGS"


def _interruption(error: BaseException | None) -> BaseException | None:
    if error is None:
        return None
    is_wrapper = type(error).__module__.startswith("torch.")
    wrapped = _interruption(error.__cause__ or error.__context__) if is_wrapper else None
    return wrapped or (error if _came_from_outside(error) else None)


def _came_from_outside(error: BaseException) -> bool:
    """Tell whether none of the code that was running has raised it.

    Signal handlers and trace functions are given the frame that they interrupt. What another thread has put here has no
    frame of its own: it is of a class of the loop's, in code that has no `raise` there and calls nothing of the loop's.
    """
    at = error.__traceback__
    if at is None:
        return False
    handlers = {getattr(signal.getsignal(each), "__code__", None) for each in signal.valid_signals()}
    while at.tb_next is not None:
        interrupted, at = at.tb_frame, at.tb_next
        if at.tb_frame.f_code in handlers or any(given is interrupted for given in _given(at.tb_frame)):
            return True
    return is_of_the_loop(type(error)) and place_of(at.tb_frame) != "loop" and not is_raised(at)


def _given(frame: FrameType) -> list[object]:
    """Return the arguments that a function was called with."""
    names, packed, _, values = inspect.getargvalues(frame)
    return [*map(values.get, names), *values.get(packed or "", ())]

"""What may go wrong in a dataset or a collate function, and ways for a worker process to end."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
import threading
from typing import Any

from accel.profiler.errors import InvalidState


def throw(error: BaseException) -> None:
    raise error


class TwoArguments(Exception):
    """Can be pickled but not made again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class NoPickle(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


class OnlyHere(Exception):
    """Can be made again in its worker only."""

    def __reduce__(self) -> Any:
        return (only_in, (os.getpid(),))


class Impostor(Exception):
    """Comes out of pickle as something else."""

    def __reduce__(self) -> Any:
        return (str, ("not an error",))


class Bare(Exception):
    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        raise RuntimeError("can't be written")


def only_in(pid: int) -> OnlyHere:
    if os.getpid() != pid:
        raise LookupError("made elsewhere")
    return OnlyHere()


# What the dataset raises, what comes out, and what its text holds.
ERRORS = {
    "value": (ValueError("a bad picture"), ValueError, "a bad picture"),
    "key": (KeyError("missing"), KeyError, "missing"),
    "os": (FileNotFoundError(2, "No such file", "a.jpg"), FileNotFoundError, "a.jpg"),
    "two arguments": (TwoArguments(1, 2), InvalidState, "1 and 2"),
    "no pickle": (NoPickle("odd"), InvalidState, "odd"),
    "only there": (OnlyHere("far"), InvalidState, "far"),
    "impostor": (Impostor("false"), InvalidState, "false"),
    "slots": (Bare("bare"), Bare, "bare"),
    "timeout": (TimeoutError("the storage is slow"), TimeoutError, "the storage is slow"),
    "stop": (StopIteration(3), InvalidState, "StopIteration"),
    "interrupt": (KeyboardInterrupt("not by a key"), InvalidState, "KeyboardInterrupt"),
    "exit": (SystemExit(3), InvalidState, "SystemExit"),
    "end of file": (EOFError("cut short"), EOFError, "cut short"),
    "broken pipe": (BrokenPipeError(32, "their own pipe"), BrokenPipeError, "their own pipe"),
}

GARBAGE = {
    "lambda": lambda _: lambda: 1,
    "generator": lambda samples: (each for each in samples),
    "file": lambda _: sys.stdin,
    "lock": lambda _: threading.Lock(),
}


def die(number: int = signal.SIGKILL) -> None:
    faulthandler.disable()  # of pytest: it would print the stack
    os.kill(os.getpid(), number)


class Once:
    """Act in the first process only that comes here."""

    def __init__(self, path: Any, act: Any) -> None:
        self.path, self.act = path, act

    def __call__(self) -> None:
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.act()


ENDS = {"killed": die, "segfault": functools.partial(die, signal.SIGSEGV), "exit": functools.partial(os._exit, 3)}

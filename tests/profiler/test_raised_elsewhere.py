"""What is an interruption, and that no handler of the library's takes one for an error of its own."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from accel.profiler.interruptions import Tolerated, ours
from tests.test_layout import LINKED, ROOT, own_modules


class TimeLimit(Exception):
    """A class of the loop's own."""


class Limit:
    """An object that handles a signal."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self._error = error

    def stop(self) -> None:
        raise self._error()

    def method(self, signum: int, frame: Any) -> None:
        self.stop()

    def __call__(self, *_: Any) -> None:
        raise self._error()


def resets_itself(error: Callable[[], BaseException], signum: int, frame: Any) -> None:
    signal.signal(signum, signal.SIG_IGN)
    raise error()


def tolerated(work: Callable[[], Any]) -> None:
    with Tolerated("anything"):
        work()


def caught_as_ours(work: Callable[[], Any]) -> None:
    with contextlib.suppress(AssertionError):
        try:
            work()
        except ours() as error:
            raise AssertionError from error


def walking(error: Callable[[], BaseException]) -> Callable[[int, Any], None]:
    """Return a handler that goes up the stack, as one does that says where the time went."""

    def handle(signum: int, frame: Any) -> None:
        while frame is not None:
            frame = frame.f_back
        raise error()

    return handle


HANDLERS: dict[str, Callable[[Any], Any]] = {
    "method": lambda error: Limit(error).method,
    "object": Limit,
    "walking": walking,
    "partial": lambda error: functools.partial(resets_itself, error),
}
ERRORS = (TimeLimit, TimeoutError, RuntimeError, KeyError, StopIteration, KeyboardInterrupt)


@pytest.fixture
def handled(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    handler, error = request.param
    before = signal.signal(signal.SIGUSR1, HANDLERS[handler](lambda: error("too late")))
    yield error
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("handled", [(h, e) for h in HANDLERS for e in ERRORS], indirect=True, ids=str)
@pytest.mark.parametrize("tolerates", [True, False])
def test_what_a_signal_handler_raises_passes(handled: type[BaseException], tolerates: bool) -> None:
    run = tolerated if tolerates else caught_as_ours
    with pytest.raises(handled, match="too late") as caught:
        run(lambda: signal.raise_signal(signal.SIGUSR1))
    assert caught.value.__context__ is None


def test_an_error_of_ours_does_not_pass() -> None:
    for run in (tolerated, caught_as_ours):
        for error in (ValueError, KeyError, RuntimeError, TimeLimit):
            run(Limit(lambda error=error: error("mine")).stop)  # type: ignore[misc]
        run(lambda: nn.Linear(2, 2)(torch.ones(3)))


def test_what_another_thread_puts_into_this_one_passes() -> None:
    """It has no frame of its own, and comes up in whatever runs: here in a module of torch."""
    module: Any = nn.Identity()
    put, here = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(threading.get_ident())
    module.forward = functools.partial(put, here, ctypes.py_object(TimeLimit))
    for run in (tolerated, caught_as_ours):
        with pytest.raises(TimeLimit):
            run(lambda: module(0))


def test_what_a_trace_function_raises_passes() -> None:
    def trace(frame: Any, event: str, _: Any) -> Any:
        sys.settrace(None)
        raise RuntimeError("stop")

    before = sys.gettrace()
    try:
        with pytest.raises(RuntimeError, match="stop"):
            tolerated(lambda: (sys.settrace(trace), nn.functional.relu(torch.ones(1))))
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("error", [TimeLimit, TimeoutError])
def test_what_torch_has_wrapped_is_raised_as_it_was(error: type[Exception]) -> None:
    """Its compiler makes an error of its own of whatever is raised while it compiles."""

    def backend(graph: Any, inputs: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)

    def handle(signum: int, frame: Any) -> None:
        raise error("too late")

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(error, match="too late") as caught:
            tolerated(lambda: compiled(torch.ones(1)))
    finally:
        signal.signal(signal.SIGUSR1, before)
        torch._dynamo.reset()
    assert type(caught.value) is error and caught.value.__context__ is None


# Where no loop of the user's can be interrupted: worker processes, commands, what is written as the process ends.
ELSEWHERE = {
    *("accel/commands/profile.py", "accel/commands/run.py", "accel/commands/script_job.py", "accel/optim/apex.py"),
    *("comm/engine/pipeline.py", "dataio/engine/worker.py", "dataio/engine/worker_handle.py", "profiler/stderr.py"),
    "kernels/window_dropins.py",
}


def broad(source: str) -> list[int]:
    """Return the lines that take whatever Exception there is, and do not raise it again."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            name = "" if node.type is None else ast.unparse(node.type)
            lines += [node.lineno] if name in ("", "Exception") else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            lines += [node.lineno] if "Exception" in map(ast.unparse, node.args) else []
    return lines


@pytest.mark.parametrize("folder", ["accel", *LINKED])
def test_no_handler_takes_an_interruption_for_its_own_error(folder: str) -> None:
    found = {str(path.relative_to(ROOT)): broad(path.read_text(encoding="utf-8")) for path in own_modules(folder)}
    assert {name: lines for name, lines in found.items() if lines and name not in ELSEWHERE} == {}


def test_a_broad_handler_is_seen() -> None:
    source = "try:\n    a()\nexcept Exception:\n    pass\nwith contextlib.suppress(KeyError, Exception):\n    a()\n"
    assert broad(source) == [3, 5] and broad(source.replace("Exception", "ours()")) == []

"""The process that `tests/warm.py` starts: it has imported what training scripts import, and forks them."""

from __future__ import annotations

import builtins
import gc
import importlib
import os
import runpy
import signal
import sys
import types
from multiprocessing.connection import Connection
from typing import Any

_PRELOADED = (
    *("torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.profiler", "torch.utils.data"),
    *("accel.commands.cli", "accel.entry", "accel.strategies", "accel.report.rendering"),
    *("accel.profiler.gather", "accel.profiler.script", "accel.profiler.session", "accel.profiler.conclusion.verdict"),
)


def serve(descriptor: int) -> None:
    """Fork a child for each request and wait for each that is asked for, until the other end is closed.

    It answers in turn: a request is the arguments of `_become`, or the process number of a child to wait for.
    """
    _preload()
    gc.freeze()  # or each child looks through all of torch when it ends, which took 1.1 s
    connection = Connection(descriptor)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if isinstance(request, int):
            connection.send(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1]))
            continue
        child = os.fork()
        if child == 0:
            connection.close()
            # It leaves through this frame, so that it ends as an interpreter does, with its exit handlers.
            return _become(**request)
        os.setpgid(child, child)
        connection.send(child)


def _preload() -> None:
    """Import what a profiled script needs; nothing is computed, for threads would not survive a fork."""
    for name in _PRELOADED:
        importlib.import_module(name)


def _become(arguments: list[str], cwd: str, environment: dict[str, str], output: str, errors: str, before: str) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate((os.devnull, output, errors)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    _import_time_settings()
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(before, {})
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = ["-m", *arguments[2:]], os.getcwd()
        runner: Any = runpy
        runner._run_module_as_main(arguments[1])  # what Python's own -m calls
    else:
        path = os.path.abspath(arguments[0])
        sys.argv, sys.path[0] = arguments, os.path.dirname(path)
        main.__dict__["__file__"] = path
        with open(path, "rb") as source:
            code = compile(source.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def _import_time_settings() -> None:
    """Set what libraries take from the environment, or draw, when they are imported."""
    import numpy as np
    import torch

    np.random.seed()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

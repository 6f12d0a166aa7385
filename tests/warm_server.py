"""What `tests/warm.py` forks: a process that has imported what training scripts import, and becomes one of them."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import runpy
import signal
import sys
import threading
import time
import types
from typing import Any, NoReturn

PRELOADED = (
    *("torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.profiler", "torch.utils.data"),
    *("accel.commands.cli", "accel.entry", "accel.strategies", "accel.report.rendering"),
    *("accel.profiler.gather", "accel.profiler.script", "accel.profiler.session", "accel.profiler.conclusion.verdict"),
)
"""What a profiled script needs; nothing is computed by importing it, for threads would not survive a fork."""


def become(arguments: list[str], cwd: str, environment: dict[str, str], output: str, errors: str, before: str) -> None:
    """Run what `python *arguments` runs; the others are those of `Running`, and files for what it prints."""
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
    status = 0
    try:
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
    except SystemExit as leaving:
        if not isinstance(leaving.code, int | None):
            raise
        status = leaving.code or 0
    _end(status)


def _end(status: int) -> NoReturn:
    """End as an interpreter does, but free nothing: to take all of torch apart takes 0.27 s of CPU time."""
    of_threads: Any = threading
    of_threads._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # the script has left None, or a closed one
            stream.flush()
    os._exit(status & 0xFF)


def _import_time_settings() -> None:
    """Set what libraries take from the environment, or draw, when they are imported."""
    import numpy as np
    import torch

    from accel import startup

    startup._imported_at = time.perf_counter()
    np.random.seed()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

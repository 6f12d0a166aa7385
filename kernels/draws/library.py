"""Compile this folder's C source with the system's compiler, and load it."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from accel.profiler.errors import AccelError

_SOURCE = Path(__file__).with_name("bernoulli.c")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 60.0


class NotCompiled(AccelError):
    """The C source can't be compiled or loaded here; the message says why."""


@functools.cache
def compiler() -> tuple[str, ...]:
    """Return the command of the C compiler: what `CC` names, else the first on the path; empty if there is none."""
    if named := shlex.split(os.environ.get("CC", "")):
        return tuple(named)
    path = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    return (path,) if path else ()


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled library. It takes 0.2 s, once in a process, and leaves no file.

    Nothing is kept from one process to the next: a file that another user or another processor left would run as code.

    Raises:
        NotCompiled: if there is no compiler, or it fails.
    """
    if not compiler():
        raise NotCompiled(f"there is no C compiler: neither CC nor {', '.join(_COMPILERS)}")
    with tempfile.TemporaryDirectory(prefix="accel-") as folder:
        path = Path(folder) / "bernoulli.so"
        command = [*compiler(), "-O3", "-march=native", "-shared", "-fPIC", "-o", str(path), str(_SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotCompiled(f"the C compiler {command[0]} failed: {error}") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise NotCompiled(f"the C compiler {command[0]} failed: {lines[0]}")
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:  # a temporary folder from which nothing may be run
            raise NotCompiled(f"what the C compiler made can't be loaded: {error}") from error
    draw = loaded.accel_bernoulli
    draw.restype = ctypes.c_int
    draw.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64),
        *(ctypes.c_int, ctypes.c_uint64, ctypes.c_int64),
    ]
    return loaded

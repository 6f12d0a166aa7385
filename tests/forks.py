"""Processes that are forked from one that has imported much, so that the seconds of an import are taken once."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
_LOCK = f"{tempfile.gettempdir()}/fork-servers-of-{os.getuid()}.lock"


class ForkServer:
    """A session with a server, which all processes of one run of pytest share; whoever comes first starts it.

    Args:
        name: of the server, for a run of pytest.
        preload: modules that it imports.
    """

    def __init__(self, name: str, preload: Sequence[str]) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        self._address = f"{tempfile.gettempdir()}/{name}-{run}.socket"
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        with FileLock(_LOCK):
            try:
                self._connection = self._connected()
            except (FileNotFoundError, ConnectionRefusedError):
                self._process = self._started(preload)
                self._connection = self._connected()
        atexit.register(self._end)

    def _connected(self) -> Connection:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            return Connection(connection.detach())

    def _started(self, preload: Sequence[str]) -> subprocess.Popen[bytes]:
        Path(self._address).unlink(missing_ok=True)  # of one that was killed
        code = f"from tests.fork_server import serve; serve({self._address!r}, {_LOCK!r}, {tuple(preload)!r})"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests, which then let it end
        )
        assert process.stdout is not None
        with process.stdout as ready:
            assert ready.read(1) == b".", f"the server for {self._address} ended at its start"
        return process

    def fork(self, function: Callable[..., Any], /, **arguments: Any) -> int:
        """Return the number of a process that calls this function, which the server must be able to import."""
        self._connection.send(pickle.dumps((function, arguments)))
        return int(self._connection.recv())

    def wait(self, process: int, timeout_s: float) -> tuple[bool, int]:
        """Wait for a process's end: tell whether it came in time, or else kill it, and return its exit status."""
        self._connection.send(process)
        in_time = self._connection.poll(max(timeout_s, 0))
        if not in_time:
            try:
                os.killpg(process, signal.SIGKILL)
            except ProcessLookupError:  # it has ended since, and its status is on the way
                in_time = True
        return in_time, int(self._connection.recv())

    def _end(self) -> None:
        if os.getpid() == self._owner:
            self._connection.close()
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):  # other processes of pytest still use it
                    self._process.wait(60)

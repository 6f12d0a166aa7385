"""`python …` as in an interpreter of its own, without the seconds that importing torch takes.

The process is forked from a server that has imported torch and accel and has done nothing else, so a script sees
nothing of the tests. A traceback that Python itself prints has the server's frames on top, and PYTHON* variables come
too late: what is about those takes `subprocess`.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore

from tests import warm_server
from tests.forks import ROOT, ForkServer


def run(
    arguments: Sequence[str | Path],
    *,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    before: str = "",
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Do what `python *arguments` does, and return its exit status and what it printed.

    Args:
        arguments: `script.py …` or `-m module …`.
        cwd: the directory to run it in.
        environment: variables beside those of this process.
        before: Python code to run first, in the same process: a fake for what the machine would tell.
        timeout_s: after which it is killed, and the test has failed.
    """
    return Running(arguments, cwd=cwd, environment=environment, before=before).wait(timeout_s)


def run_ranks(
    count: int, arguments: Sequence[str | Path], *, cwd: Path, before: str = "", timeout_s: float = 180
) -> list[subprocess.CompletedProcess[str]]:
    """Do on one host what `torchrun --nproc-per-node count` does, without its restarts."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count)),
    }
    deadline = time.monotonic() + timeout_s
    running = [
        Running(arguments, cwd=cwd, before=before, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    try:
        return [process.wait(deadline - time.monotonic()) for process in running]
    finally:
        for process in running:
            process.kill()


class Running:
    """A run that has begun; `run` says what the arguments are."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        before: str = "",
    ) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self._folder = tempfile.TemporaryDirectory()
        self._output, self._errors = (Path(self._folder.name) / name for name in ("output", "errors"))
        for file in (self._output, self._errors):
            file.touch()
        self.pid = _server().fork(
            warm_server.become,
            arguments=self.arguments,
            cwd=str(cwd),
            environment={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            output=str(self._output),
            errors=str(self._errors),
            before=before,
        )
        self._status: int | None = None

    def wait(self, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.
        """
        late = not self._await(timeout_s)
        output, errors = (file.read_text(encoding="utf-8") for file in (self._output, self._errors))
        output = "".join(line for line in output.splitlines(True) if not line.startswith("[Gloo] "))  # torch 2.9 greets
        self._folder.cleanup()
        if late:
            raise subprocess.TimeoutExpired(self.arguments, timeout_s, output, errors)
        return subprocess.CompletedProcess(self.arguments, self._status or 0, output, errors)

    def _await(self, timeout_s: float) -> bool:
        """Wait for its end and tell whether it came in time; kill it if not."""
        in_time, self._status = _server().wait(self.pid, timeout_s)
        return in_time

    def kill(self) -> None:
        """End it and the processes that it has started, if it still runs."""
        if self._status is None:
            self._await(0)
            self._folder.cleanup()


def wait_for(file: Path, timeout_s: float = 120) -> None:
    """Wait until a run has made a file."""
    deadline = time.monotonic() + timeout_s
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} was not made"
        time.sleep(0.01)


@functools.cache
def _server() -> ForkServer:
    return ForkServer("scripts", warm_server.PRELOADED)

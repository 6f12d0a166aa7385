"""Processes that take turns on one machine, so that whatever else it does meets all of them alike.

Neighbours on the same host make a step up to 30 % longer for ten seconds or a minute: one process after the other, the
same program took 12 and 20 ms a step. In turns of two seconds three equal processes differed by 2 to 15 %, which is
where their memory lies. A process stops itself between two steps, with its own children (`benchmarks.turn_clock`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parent.parent


class Command(NamedTuple):
    """What to run: arguments of Python, and variables beside those of this process."""

    arguments: Sequence[str]
    environ: Mapping[str, str]


def take_turns(commands: Sequence[Command]) -> list[subprocess.CompletedProcess[str]]:
    """Run commands at the same time, one of them at each moment, and return how each ended.

    Args:
        commands: to run, in order; each is started at its first turn, and ends a turn by `benchmarks.turn_clock`.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = [_Run(command, Path(folder) / str(number)) for number, command in enumerate(commands)]
        waiting = deque(runs)
        try:
            while waiting:
                run = waiting.popleft()
                if run.turn():
                    waiting.append(run)
        finally:
            for run in runs:
                run.kill()
        return [run.ended() for run in runs]


class _Run:
    """One command's process and its output."""

    def __init__(self, command: Command, path: Path) -> None:
        self._command = command
        self._output, self._errors = path.with_suffix(".out"), path.with_suffix(".err")
        self._process: subprocess.Popen[str] | None = None

    def turn(self) -> bool:
        """Let it run for a turn, and tell whether it has stopped and not ended."""
        if self._process is None:
            self._process = self._started()
        else:
            os.killpg(self._process.pid, signal.SIGCONT)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return True
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return False

    def _started(self) -> subprocess.Popen[str]:
        with self._output.open("w") as output, self._errors.open("w") as errors:
            return subprocess.Popen(
                [sys.executable, *self._command.arguments],
                cwd=_ROOT,
                env={**os.environ, **self._command.environ},
                stdout=output,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End it and its children, stopped as they may be."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ended(self) -> subprocess.CompletedProcess[str]:
        """Return how it ended."""
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in (self._output, self._errors))
        status = self._process.returncode if self._process is not None else 1
        return subprocess.CompletedProcess(list(self._command.arguments), status, *texts)

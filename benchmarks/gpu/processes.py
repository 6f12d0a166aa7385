"""Processes of the GPU suite: a queue of them for one device, sections, and the tests.

Each is a process group of its own and is ended with all that it has started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.device_lock import holder
from benchmarks.record import ROOT

WORKERS = 12
"""Processes of the tests, where pytest-xdist is installed: they mostly wait for compilers."""
LOOK_S = 0.2
"""How often processes are looked at."""

Figures = dict[str, Any]
Read = Callable[[int | None, str], Figures]
"""Makes figures of an exit status, None where a process was ended, and of what it printed."""


def last_json(code: int | None, output: str) -> Figures:
    """Return the last line that is JSON: after it a process may say something when it ends."""
    if failed := failure(code, output):
        return failed
    for line in reversed(output.splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            if line.startswith("{"):
                figures: Figures = json.loads(line)
                return figures
    return {"failed": "it printed no figures"}


def failure(code: int | None, output: str) -> Figures:
    """Return why a process failed, nothing if it did not."""
    if code is None:
        return {"failed": "took too long"}
    last = " | ".join(output.strip().splitlines()[-3:])[-500:]
    return {"failed": f"exit status {code}: {last}"} if code else {}


class Job(NamedTuple):
    """A process that waits for its turn."""

    key: Mapping[str, str]
    """What its row is about."""
    arguments: Sequence[str]
    """Of Python."""
    expected_s: float
    """With the device: where less is left, it is not begun."""
    limit_s: float
    """With the device: then it is ended."""
    gb: float = 0.0
    """Of the device's memory that it needs."""
    environ: Mapping[str, str] | None = None
    """Variables beside those of this process."""
    read: Read = last_json


class Ended(NamedTuple):
    """How a job ended."""

    job: Job
    figures: Figures
    """What it printed, or `failed`."""
    seconds: float = 0.0
    """With the device."""
    is_whole: bool = True
    """Whether the time that was left was enough for it."""


class Started:
    """The process of a job, with its output."""

    def __init__(self, job: Job) -> None:
        self.job, self.began = job, time.time()
        self.since: float | None = None
        """Since when it has had the device."""
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in end)
        self.process = subprocess.Popen(
            [sys.executable, *job.arguments],
            cwd=ROOT,
            env={**os.environ, **(job.environ or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Kill it with its workers, which may outlive it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> str:
        """End it with its workers, and return what it printed."""
        self.kill()
        self.process.wait()
        with self._log as log:
            log.seek(0)
            return log.read()


class Queue:
    """Runs jobs: one after the other where they have a lock to wait for, else as many together as there is room for.

    Args:
        lock: on which each waits before it touches the device; None if they may run together.
        width: most processes at a time: with a lock, those that prepare themselves included.
        gb: of the device's memory, for all that run at a time.
    """

    def __init__(self, lock: Path | None = None, width: int = 4, gb: float = math.inf) -> None:
        self._lock, self._width, self._gb = lock, width, gb
        self._running: list[Started] = []

    def run(
        self, jobs: Iterable[Job], left_s: Callable[[], float], look: Callable[[], object] = lambda: None
    ) -> Iterator[Ended]:
        """Yield how each job ended, as they end, until there is no time left; `look` is called now and then."""
        waiting = deque(jobs)
        try:
            while (waiting or self._running) and left_s() > 0:
                while waiting and self._has_room(waiting[0]):
                    job = waiting.popleft()
                    if left_s() < job.expected_s + sum(map(self._rest_s, self._running)):
                        yield Ended(job, {"failed": f"not begun: {left_s():.0f} s were left"}, is_whole=False)
                    else:
                        self._running.append(Started(job))
                yield from self._ended()
                look()
                time.sleep(LOOK_S)
            for job in [*(started.job for started in self._running), *waiting]:
                yield Ended(job, {"failed": "the time of the call ran out"}, is_whole=False)
        finally:
            for started in self._running:
                started.kill()  # all of them first: a process that uses a GPU takes its time to be gone
            for started in self._running:
                started.end()
            self._running.clear()

    def _has_room(self, job: Job) -> bool:
        used = sum(started.job.gb for started in self._running)
        return not self._running or (len(self._running) < self._width and used + job.gb <= self._gb)

    def _used_s(self, started: Started) -> float:
        """Return for how long a process has had the device, 0 if it still waits for it."""
        if self._lock is None:
            started.since = started.began
        elif (held := holder(self._lock)) is not None and held.pid == started.process.pid:
            started.since = held.since
        return 0.0 if started.since is None else time.time() - started.since

    def _rest_s(self, started: Started) -> float:
        return max(0.0, started.job.expected_s - self._used_s(started))

    def _ended(self) -> Iterator[Ended]:
        for started in list(self._running):
            used_s, code = self._used_s(started), started.process.poll()
            if code is not None or used_s > started.job.limit_s:
                self._running.remove(started)
                yield Ended(started.job, started.job.read(code, started.end()), used_s)


def section(
    name: str,
    limit_s: float,
    publish: Callable[[Figures], object] = lambda figures: None,
    environ: Mapping[str, str] | None = None,
) -> Figures:
    """Run a section; return its figures, with `failed` if it did not run to its end.

    Args:
        name: in benchmarks/gpu/sections.py.
        limit_s: seconds.
        publish: called with all figures so far whenever there are more.
        environ: variables beside those of this process.
    """
    figures: Figures = {}

    def look() -> None:
        text = file.read_text(encoding="utf-8") if file.is_file() else "{}"
        if json.loads(text) != figures:
            figures.update(json.loads(text))
            publish(figures)

    def read(code: int | None, output: str) -> Figures:
        print(output[-4000:], flush=True)
        return failure(code, output)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.json"
        job = Job({}, ["-m", "benchmarks.gpu.sections", name, str(file)], 0.0, limit_s, environ=environ, read=read)
        (ended,) = Queue().run([job], lambda: math.inf, look)
        look()
    return {**ended.figures, **figures}


def gpu_tests(limit_s: float, gb: float) -> Job:
    """Return the job that runs the GPU tests."""
    arguments = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None:
        arguments += ["-n", str(WORKERS)]
    return Job({"tests": "gpu"}, arguments, 0.0, limit_s, gb, read=read_tests)


def read_tests(code: int | None, output: str) -> Figures:
    """Return whether all tests passed, and pytest's last line; only `failed` if they were ended."""
    lines = output.strip().splitlines()
    print("\n".join(lines[-40:]), flush=True)
    if code is None:
        return failure(code, output)
    figures: Figures = {"green": code == 0, "line": lines[-1] if lines else ""}
    if code != 0:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        figures |= {"failed": f"exit status {code}", "lines": failed[:40]}
    return figures

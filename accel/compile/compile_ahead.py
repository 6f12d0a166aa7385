"""A helper process that compiles while training goes on: a fork, so that nothing is pickled and no script runs again.

It is forked within a call of the model, compiles forward and backward at low priority, and ends: on `undo`, at exit, by
the kernel if this process is killed, and after ten minutes at most. What it leaves is torch's cache on disk; nothing
else comes back, so that whatever happens in it can change no number here.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable

import torch

from accel.profiler.host import CrowdMeter

_LONGEST_S = 600.0
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_STACK_BYTES = 64 << 20  # Dynamo recurses deeply
_MOST_FILES = 1 << 16
_FAILED = 3
_LOOK_S = 1.0


def unavailable() -> str:
    """Return why no helper process can compile here; '' if one can."""
    if sys.platform != "linux":
        return "a helper process needs Linux"
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "a process that uses CUDA can't be forked"
    if (
        os.environ.get("TORCHINDUCTOR_FX_GRAPH_CACHE") == "0"
        or os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1"
    ):
        return "torch's cache on disk is switched off"
    return ""


class CoreUse:
    """How many cores other processes keep busy, as measured for a second or more."""

    def __init__(self) -> None:
        self._meter: CrowdMeter | None = None
        self._began_s = 0.0

    def look(self) -> float | None:
        """Return the number of cores; None while it is being measured."""
        if self._meter is None:
            self._meter, self._began_s = CrowdMeter(), time.monotonic()
        if time.monotonic() - self._began_s < _LOOK_S:
            return None
        busy, self._meter = self._meter.cores(), None
        return busy or 0.0


class CompileAhead:
    """One helper process.

    Args:
        threads: intra-op threads of this process: torch's cache tells graphs apart by them.
        clock: seconds, monotonic.
    """

    def __init__(self, threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads, self._clock = threads, clock
        self._process = 0
        self._began = 0.0
        self._result: str | None = None

    @property
    def is_due(self) -> bool:
        """True until it has been started or given up."""
        return not self._process and self._result is None

    @property
    def problem(self) -> str:
        """Why it has ended without result; '' if it has compiled, or still does."""
        return self._result or ""

    def start(self, work: Callable[[], object]) -> None:
        """Fork, and do the work there; returns at once, and never raises.

        Args:
            work: compiles; what it changes stays in the helper process.
        """
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        parent = os.getpid()
        # No handler of the loop's may run in the helper process: it could write a checkpoint there.
        masked = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
                process = os.fork()
        except OSError as error:
            self._result = f"it could not be started: {error}"
            return
        finally:
            if os.getpid() == parent:
                signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        if process == 0:
            status = _FAILED
            try:
                _detach(parent)
                status = self._do(work, autocast)
            finally:
                os._exit(status)
        self._process, self._began = process, self._clock()
        with contextlib.suppress(OSError):
            os.setpgid(process, process)  # the helper does so too: whoever is first
        atexit.register(self.stop)

    def _do(self, work: Callable[[], object], autocast: tuple[bool, torch.dtype]) -> int:
        """Work in a thread of its own: this one's pool of OpenMP threads did not come along with the fork."""
        done: list[bool] = []

        def run() -> None:
            _compile_alone()
            torch.set_num_threads(self._threads)
            enabled, dtype = autocast
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                work()
            done.append(True)

        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(_LONGEST_S)
        return 0 if done else _FAILED

    def has_ended(self) -> bool:
        """Return whether it has ended; never waits."""
        if not self._process:
            return self._result is not None
        if self._clock() - self._began > _LONGEST_S:
            self.stop()
            self._result = f"it took more than {_LONGEST_S:.0f} s"
            return True
        try:
            process, status = os.waitpid(self._process, os.WNOHANG)
        except ChildProcessError:  # the loop waits for all of its children
            process, status = self._process, _FAILED
        if not process:
            return False
        self._over("" if status == 0 else f"it ended with status {os.waitstatus_to_exitcode(status)}")
        return True

    def stop(self) -> None:
        """End it, with the compilers that it has started."""
        if not self._process:
            return
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(self._process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)
        self._over("it was ended")

    def _over(self, result: str) -> None:
        self._process, self._result = 0, result
        atexit.unregister(self.stop)


def _compile_alone() -> None:
    from torch._inductor import config

    config.compile_threads = 1  # one compiler at a time, and none of the processes that this one may have


def _detach(parent: int) -> None:
    """Cut what ties this process to the loop's, which forked it."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(_FAILED)
    os.nice(19)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.closerange(3, _MOST_FILES)

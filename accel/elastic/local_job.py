"""A training on this machine whose number of ranks is changed by one call: what a scheduler holds of it.

    job = LocalJob(["train.py", "--epochs=30"], folder="runs/one")
    job.resize(2)  ──torchrun──▶ 2 ranks, which save checkpoints in the folder
    job.resize(4)  ──SIGTERM──▶ a checkpoint after the step under way ──torchrun──▶ 4 ranks go on from it
    job.profile()     step times, noise and bounds, as the job has measured them

The script passes `checkpoint=` of the same folder to `accel.optimize`. Ranks are started anew: what a change costs is
the start of a process and the step under way, which the profile's `restart_s` tells.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from accel.elastic.run import PROFILE
from accel.elastic.torchrun_nodes import VARIABLE
from accel.errors import InvalidArgument
from accel.goodput.job import JobProfile

_LONGER_S = 5.0
"""Than torchrun waits for its workers it is waited for."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


class LocalJob:
    """Start a training under torchrun, and change its size.

    Args:
        arguments: of torchrun from the script on, such as `["train.py", "--epochs=30"]` or `["-m", "package.train"]`.
        folder: that the script passes as `checkpoint=`.
        save_s: how long ranks may take for the step under way and their checkpoint, s; after that they are killed, and
            the next start goes on from the checkpoint before. Default 60.
        launcher: what starts the ranks, in place of torchrun; `--nproc-per-node=N` and the arguments follow.

    Raises:
        InvalidArgument: if there are no arguments, or `save_s` is not positive.

    Example:
        >>> job = LocalJob(["train.py"], folder="runs/one")
        >>> job.resize(2)
        >>> job.resize(1)
        >>> job.wait()
        0
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: str | os.PathLike[str],
        *,
        save_s: float = 60.0,
        launcher: Sequence[str] = TORCHRUN,
    ) -> None:
        if not arguments:
            raise InvalidArgument("arguments must name the script. Found: none")
        if not save_s > 0:
            raise InvalidArgument(f"save_s must be positive, in seconds. Found: {save_s}")
        self._arguments, self._launcher, self._save_s = list(arguments), list(launcher), save_s
        self._profile = Path(folder) / PROFILE
        self._process: subprocess.Popen[bytes] | None = None
        self.ranks = 0
        """That it runs on now; 0 before the first start, and once it has ended or was stopped."""

    @property
    def status(self) -> int | None:
        """The exit status of the training; None while it runs, or is stopped."""
        return None if self._process is None else self._process.poll()

    def resize(self, ranks: int) -> None:
        """Let the training run on so many ranks from now on; 0 stops it, and a later call goes on.

        Does nothing where it runs on so many already, or has ended by itself.

        Args:
            ranks: at least 0.

        Raises:
            InvalidArgument: if the number is negative.
        """
        if ranks < 0:
            raise InvalidArgument(f"ranks must be at least 0. Found: {ranks}")
        if self.status is not None or (self._process is not None and ranks == self.ranks):
            self.ranks = 0 if self.status is not None else self.ranks
            return
        if self._process is not None and self._stopped() == 0:  # it has ended meanwhile
            self.ranks = 0
            return
        self._process, self.ranks = None, 0
        if ranks:
            command = [*self._launcher, f"--nproc-per-node={ranks}", *self._arguments]
            # By itself torchrun kills its workers 30 s after it has told them to end.
            environment = {VARIABLE: "1", **os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(self._save_s))}
            self._process = subprocess.Popen(command, start_new_session=True, env=environment)
            self.ranks = ranks

    def _stopped(self) -> int:
        """Have the ranks save and end; return the launcher's exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(self._save_s + _LONGER_S)
        except subprocess.TimeoutExpired:
            _kill(self._process)
            return self._process.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the training's exit status once it has ended.

        Args:
            timeout_s: how long to wait, s; None for ever.

        Raises:
            InvalidArgument: if it is stopped.
            TimeoutError: if it still runs after that time.
        """
        if self._process is None:
            raise InvalidArgument("the training must run to be waited for. Found: stopped; call resize(ranks) first")
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the training still runs after {timeout_s} s") from None
        self.ranks = 0
        return status

    def kill(self) -> None:
        """End the launcher and its ranks without a checkpoint; a later `resize` starts them again."""
        if self._process is not None and self._process.poll() is None:
            _kill(self._process)
            self._process, self.ranks = None, 0

    def profile(self) -> JobProfile | None:
        """Return what the job has measured of itself; None before its first decision about the batch.

        Raises:
            InvalidArgument: if the file is no profile.
        """
        return JobProfile.load(self._profile) if self._profile.exists() else None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it has started."""
    for each in (*_descendants(process.pid), process.pid):
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def _descendants(process: int) -> list[int]:
    """Return the processes that a process has started, and theirs: torchrun gives each rank a session of its own."""
    try:
        children = [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (OSError, ValueError):  # it has ended, or the system has no such file
        return []
    return [*children, *(other for child in children for other in _descendants(child))]

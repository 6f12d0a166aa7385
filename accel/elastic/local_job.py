"""A training on this machine whose number of ranks is changed by one call: what a scheduler holds of it.

    job.resize(4)  ──SIGTERM──▶  a checkpoint after the step under way ──torchrun──▶ 4 ranks go on from it
    in place       ──python──▶   2 more processes, which come to accel.optimize while the others train
                   ──order──▶    a checkpoint after the step under way; all 4 form a group, and go on from it

The script passes `accel.Elastic(checkpoint=)` of the same folder to `accel.optimize`; the variable ACCEL_CHECKPOINT
has it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel.elastic.batch_size.report import PROFILE
from accel.elastic.in_place import ORDERS, RANK, SEEN, open_store, value_of
from accel.elastic.saving.torchrun_nodes import VARIABLE
from accel.errors import InvalidArgument
from accel.goodput.job import JobProfile
from accel.scores import CHECKPOINT

_LONGER_S = 5.0
"""Than torchrun waits for its workers it is waited for."""
_LOOK_S = 0.02
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


class LocalJob:
    """Start a training, under torchrun if it has several ranks, and change its size.

    Args:
        arguments: of torchrun from the script on, such as `["train.py", "--epochs=30"]` or `["-m", "package.train"]`.
        folder: that the script passes as `accel.Elastic(checkpoint=)`.
        save_s: how long ranks may take for the step under way and their checkpoint, s; after that they are killed, and
            the next start goes on from the checkpoint before. Default 60.
        launcher: what starts the ranks, in place of torchrun; `--nproc-per-node=N` and the arguments follow. Default:
            torchrun, and for a single rank nothing, which saves the import of torch in a process more.
        in_place: keep the processes of ranks that stay, and form their process group anew. The script asks
            `torch.distributed` for rank and size where it needs them, since the size changes while it runs. Where that
            can't be (it has made groups of its own, say), ranks are started anew. Default False.
        join_s: how long processes that are added may take to come to `accel.optimize`, s; after that all ranks are
            started anew. Default 120.
        work_folder: in which the script runs. Default: that of this process.
        output: file that what the script prints is appended to. Default: it goes where this process's goes.
        variables: of the environment, beside those of this process.

    Raises:
        InvalidArgument: if there are no arguments, or a time is not positive.

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
        launcher: Sequence[str] | None = None,
        in_place: bool = False,
        join_s: float = 120.0,
        work_folder: str | os.PathLike[str] | None = None,
        output: str | os.PathLike[str] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        if not arguments:
            raise InvalidArgument("arguments must name the script. Found: none")
        for name, seconds in {"save_s": save_s, "join_s": join_s}.items():
            if not seconds > 0:
                raise InvalidArgument(f"{name} must be positive, in seconds. Found: {seconds}")
        self._arguments, self._launcher, self._save_s, self._join_s = list(arguments), launcher, save_s, join_s
        self._variables = dict(variables or {})
        self._folder, self._work_folder, self._output = Path(folder), work_folder, output
        self._orders: Any = open_store() if in_place else None
        self._number = 0
        """Of the last order."""
        self._launched: list[subprocess.Popen[bytes]] = []
        """Launchers, one for each time that ranks were added."""
        self.ranks = 0
        """That it runs on now; 0 before the first start, and once it has ended or was stopped."""
        self.kept = False
        """The last change has kept the processes of the ranks that stayed."""
        self.problem = ""
        """Why it has not, although it was to."""

    @property
    def status(self) -> int | None:
        """The exit status of the training; None while it runs, or is stopped."""
        statuses = [process.poll() for process in self._launched]
        failed = next((status for status in statuses if status), None)
        return failed if failed is not None or None in statuses or not statuses else 0

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
        if self.status is not None:
            self._end()
            return
        if self._launched and ranks == self.ranks:
            return
        self.kept = bool(self._launched and ranks and self._orders is not None) and self._changed_in_place(ranks)
        if self.kept:
            self.ranks = ranks
            return
        if self._launched and self._stopped() == 0:  # it has ended meanwhile
            self.ranks = 0
            return
        self._launched, self.ranks = [], 0
        if ranks:
            self._launched, self.ranks = [self._start(ranks)], ranks

    def _start(self, ranks: int) -> subprocess.Popen[bytes]:
        """Launch so many ranks of the script."""
        if ranks == 1 and self._launcher is None:
            return self._popen([sys.executable, *self._arguments], _alone(0, 1))
        return self._popen([*(self._launcher or TORCHRUN), f"--nproc-per-node={ranks}", *self._arguments], {})

    def _popen(self, command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # By itself torchrun kills its workers 30 s after it has told them to end.
        environment = {
            VARIABLE: "1",
            **os.environ,
            **self._variables,
            CHECKPOINT: str(self._folder),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(self._save_s)),
        }
        if self._orders is not None:
            environment |= {ORDERS: str(self._orders.port), SEEN: str(self._number)}
        with contextlib.ExitStack() as open_files:
            streams: dict[str, Any] = {}
            if self._output is not None:
                Path(self._output).parent.mkdir(parents=True, exist_ok=True)
                streams = {"stdout": open_files.enter_context(open(self._output, "ab")), "stderr": subprocess.STDOUT}
            own = {**environment, **variables}
            return subprocess.Popen(command, start_new_session=True, env=own, cwd=self._work_folder, **streams)

    # -- in place ------------------------------------------------------------------------------------------------------

    def _changed_in_place(self, ranks: int) -> bool:
        """Let the ranks that stay go on with others; return whether they do."""
        self._number += 1
        added = list[subprocess.Popen[bytes]]()
        self.problem = "it was interrupted"
        try:
            added += [self._add(rank, ranks) for rank in range(self.ranks, ranks)]
            self.problem = self._carried_out(ranks, added)
        finally:
            if self.problem:
                self._orders.set("order", f"{self._number} 0")  # taken back
                for process in added:
                    _kill(process)
        self._launched += [] if self.problem else added
        return not self.problem

    def _add(self, rank: int, ranks: int) -> subprocess.Popen[bytes]:
        """Start a process that is to be a rank, alone in a group of its own at first."""
        return self._popen([sys.executable, *self._arguments], {**_alone(rank, ranks), RANK: str(rank)})

    def _carried_out(self, ranks: int, added: Sequence[subprocess.Popen[bytes]]) -> str:
        """Give an order once those that are added have come; return '', or why it is not carried out."""
        number = self._number
        come = [f"come-{number}-{rank}" for rank in range(self.ranks, ranks)]
        late = "the added processes have not come"
        if problem := self._problem_until(lambda: not come or self._orders.check(come), added, self._join_s, late):
            return problem
        self._orders.set("order", f"{number} {ranks}")
        limit_s, answer = self._save_s + _LONGER_S, f"answer-{number}"
        late = "the ranks have not answered"
        problem = self._problem_until(lambda: self._orders.check([answer]), added, limit_s, late)
        return problem or value_of(self._orders, answer) or ""

    def _problem_until(
        self, holds: Callable[[], bool], added: Sequence[subprocess.Popen[bytes]], limit_s: float, late: str
    ) -> str:
        """Wait for something, and return '', or why it can't come any more."""
        deadline = time.monotonic() + limit_s
        while not holds():
            if self.status is not None:
                return "the training has ended"
            if any(process.poll() is not None for process in added):
                return "an added process has ended"
            if time.monotonic() > deadline:
                return f"{late} within {limit_s:.0f} s"
            time.sleep(_LOOK_S)
        return ""

    # -- ending --------------------------------------------------------------------------------------------------------

    def _stopped(self) -> int:
        """Have the ranks save and end; return the launchers' exit status, 0 if all have ended by themselves."""
        for process in self._launched:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._save_s + _LONGER_S
        for process in self._launched:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(process)
        return next((process.returncode for process in self._launched if process.returncode), 0)

    def _end(self) -> None:
        """It has ended by itself: of a failure of some, the others end too."""
        for process in self._launched:
            if process.poll() is None:
                _kill(process)
        self.ranks = 0

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the training's exit status once it has ended.

        Args:
            timeout_s: how long to wait, s; None for ever.

        Raises:
            InvalidArgument: if it is stopped.
            TimeoutError: if it still runs after that time.
        """
        if not self._launched:
            raise InvalidArgument("the training must run to be waited for. Found: stopped; call resize(ranks) first")
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (status := self.status) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the training still runs after {timeout_s} s")
            time.sleep(_LOOK_S)
        self._end()
        return status

    def kill(self) -> None:
        """End the launchers and their ranks without a checkpoint; a later `resize` starts them again."""
        if self._launched and self.status is None:
            self._end()
            self._launched = []

    def profile(self) -> JobProfile | None:
        """Return what the job has measured of itself; None before its first decision about the batch.

        Raises:
            InvalidArgument: if the file is no profile.
        """
        return JobProfile.load(path) if (path := self._folder / PROFILE).exists() else None


def _alone(rank: int, ranks: int) -> dict[str, str]:
    """Return the variables, as torchrun sets them, of a rank in a group of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**group, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}


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

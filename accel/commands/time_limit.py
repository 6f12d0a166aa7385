"""`accel run --until`: a training that has saved and ended before its time is over, to be queued again.

    the limit, less a margin ──SIGTERM to this process──▶ a checkpoint after the step under way ──▶ exit status 75

75 is sysexits.h's EX_TEMPFAIL: SLURM queues a job that ends so again where slurm.conf has RequeueExit=75; else the
batch script asks for it by `scontrol requeue`.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping

from accel.commands.script_job import say
from accel.errors import InvalidArgument
from accel.profiler.host import seconds_since_start
from accel.profiler.script import TERMINATED, Ending

REQUEUE = 75
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S, _SHARE = 120.0, 0.1
"""Before the limit a training is told to end: a tenth of the time, at most two minutes."""


def seconds_until(text: str, environment: Mapping[str, str]) -> float:
    """Return the seconds to a limit from now on.

    Args:
        text: such as `90s`, `30m` or `2h` from the start of this process; `slurm` for the end of the SLURM job.
        environment: of this process.

    Raises:
        InvalidArgument: if it is neither, is over, or there is no SLURM job that says when it ends.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        raise InvalidArgument("--until must be given without torchrun, which would start the ranks again; use srun")
    if text == "slurm":
        end = environment.get("SLURM_JOB_END_TIME", "")
        if not end.isdecimal():
            raise InvalidArgument(f"--until slurm must be in a SLURM job with SLURM_JOB_END_TIME. Found: {end!r}")
        left_s = int(end) - time.time()
    else:
        number = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
        if number is None:
            raise InvalidArgument(f"--until must be a time such as '90s', '30m' or '2h', or 'slurm'. Found: {text!r}")
        left_s = float(number[1]) * _UNITS[number[2]] - seconds_since_start()
    if left_s <= 0:
        raise InvalidArgument(f"--until must be a time to come. Found: {text!r}, over for {-left_s:.0f} s")
    return left_s


class TimeLimit:
    """Tell this process to end before a limit.

    Args:
        left_s: seconds to the limit.
    """

    def __init__(self, left_s: float) -> None:
        self.is_saved = False
        """The time was over, and the training saves a checkpoint: it can be queued again."""
        self._timer = threading.Timer(left_s - min(_LONGEST_S, _SHARE * left_s), self._over)
        self._timer.daemon = True

    def begin(self) -> None:
        """Let the time run."""
        self._timer.start()

    def ending(self, ending: Ending) -> Ending:
        """Let no more time run: the script has ended; return how, for the process's exit status."""
        self._timer.cancel()
        return Ending(REQUEUE, "out of time") if self.is_saved and ending.status == TERMINATED else ending

    def _over(self) -> None:
        elastic = sys.modules.get("accel.elastic.run")
        self.is_saved = elastic is not None and any(run.checkpoint is not None for run in elastic.RUNS.values())
        saved = "it saves and ends" if self.is_saved else "it ends; nothing is saved without accel.Elastic(checkpoint=)"
        if os.environ.get("RANK", "0") == "0":
            say(f"accel: the time of the script is over: {saved}")
        os.kill(os.getpid(), signal.SIGTERM)

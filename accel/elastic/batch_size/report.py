"""What a run whose batch is chosen tells others: each change for the report, the job's profile for a scheduler."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import InvalidArgument
from accel.goodput.job import JobProfile, LostTime
from accel.profiler.loop.observers import LoopObserver
from accel.profiler.stderr import warn
from accel.report.report import BatchRow, Report
from accel.report.words import finite

if TYPE_CHECKING:
    from accel.elastic.batch_size.record import BatchRecord

PROFILE = "job.json"
"""The job's profile, in the folder of its checkpoints."""
_NOTEWORTHY = 0.1
"""Change of the noise scale or of the progress that a scheduler should hear of."""


class BatchReport:
    """What a run tells of its batch, by the record of it."""

    def __init__(self, record: BatchRecord) -> None:
        self.note = ""
        """Why the batch size is not changed, or no more."""
        self._record = record

    def fail(self, error: Exception) -> None:
        text = str(error) if isinstance(error, InvalidArgument) else f"{type(error).__name__}: {error}"
        step = self._record.step
        stays = "the loop's own" if self._record.sampler.num_replicas == 1 else "as it is"
        self.note = f"{stays} from step {step.ended_before + step.ended} on: {text}"
        warn(f"the batch size is {self.note}", stacklevel=6)

    def describe(self, report: Report) -> None:
        """Put it into the report of the run; changes of the batch size begin with the user's own."""
        record = self._record
        report.max_batch_size, report.batch_note = record.max_batch_size, self.note
        report.progress = record.rates.progress
        report.batch_rows = [
            BatchRow(
                step=decision.step,
                batch=decision.batch,
                tried=decision.tried,
                why=decision.why,
                goodput=decision.goodput or None,
                measured=decision.measured or None,
                noise=finite(decision.noise),  # that of pure noise is infinite
            )
            for decision in (() if record.policy is None else record.policy.decisions)
        ]

    def profile(self, restart_s: float, lost: LostTime) -> JobProfile | None:
        """Return the job's profile; None while too little is known, and on ranks that don't decide."""
        record = self._record
        policy, noise, epochs = record.policy, record.noise.known, record.sampler.turns.total
        if policy is None or noise is None or not record.leads or (model := policy.times.model) is None:
            return None
        base = policy.base_batch
        return JobProfile(
            model=model,
            noise=noise,
            base_batch=base,
            limits=policy.batches.limits(record.most_tried),
            most_replicas=record.most_replicas,
            restart_s=restart_s,
            progress=record.rates.progress,
            total=float(epochs * -(-record.sampler.length // base)) if epochs else None,
            lost=lost,
        )


class ProfileFile:
    """The job's profile beside its checkpoints, for a scheduler."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = Path(folder) / PROFILE
        self._written = (0.0,) * 4
        """Batch, noise scale, progress and cost of a change of the profile that was written last."""

    def write(self, profile: JobProfile, batch: int, *, is_saved: bool = False) -> None:
        """Write it where the batch, or one of noise, progress and what a change costs by a tenth, has changed.

        A failure is a warning. Once a checkpoint is saved it is written in any case.
        """
        now = float(batch), profile.noise.phi, profile.progress, profile.restart_s
        is_close = (math.isclose(new, old, rel_tol=_NOTEWORTHY) for new, old in zip(now, self._written, strict=True))
        if batch == self._written[0] and all(is_close) and not is_saved:
            return
        self._written = now
        try:
            profile.save(self._path)
        except OSError as error:
            warn(f"the job's profile can't be written: {error}", stacklevel=7)

    def lost(self) -> LostTime | None:
        """Return where the time of a training has gone by the profile that is there; None if none can be read."""
        try:
            return JobProfile.load(self._path).lost
        except InvalidArgument:
            return None


class TimeBook(LoopObserver):
    """Book the time in which a run does not train, by cause; it follows the loader behind all others.

    `before` is that of the processes before this one; None if it is the first.
    """

    def __init__(self, before: LostTime | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._before, self._clock = before, clock
        self._compile_before = _compile_s()
        self._asked: float | None = None
        self._input = self._within_start = 0.0
        self._batches = 0

    def batch_requested(self) -> None:
        """Begin to wait. What was booked within the first step is part of the start."""
        if self._batches == 1:
            self._within_start = self._input + _compile_s() - self._compile_before
        self._asked = self._clock()

    def batch_delivered(self, batch: Any, proxy: Any) -> None:
        if self._asked is not None:
            self._input += self._clock() - self._asked
        self._asked = None
        self._batches += 1

    def lost(self, start_s: float, checkpoint_s: float) -> LostTime:
        """Return what is lost so far; given are the seconds to the first step's end and of all saves."""
        began = max(start_s - self._within_start, 0.0)
        own = LostTime(
            start=0.0 if self._before else began,
            restart=began if self._before else 0.0,
            compile=_compile_s() - self._compile_before,
            input=self._input,
            checkpoint=checkpoint_s,
        )
        return self._before.plus(own) if self._before else own


def _compile_s() -> float:
    """Return the seconds that torch.compile has taken in this process so far."""
    spent = getattr(sys.modules.get("torch._dynamo.utils"), "calculate_time_spent", None)
    return 0.0 if spent is None else float(spent()["total_wall_time"])

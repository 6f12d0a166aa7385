"""What a run whose batch is chosen tells others: each change for the report, the job's profile for a scheduler."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from accel.elastic.batch_size.policy import BatchDecision, BatchPolicy
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.goodput import BatchLimits
from accel.goodput.job import JobProfile
from accel.profiler.stderr import warn
from accel.report.model import BatchRow
from accel.report.words import finite

PROFILE = "job.json"
"""The job's profile, in the folder of its checkpoints."""
_NOTEWORTHY = 0.1
"""Change of the noise scale or of the progress that a scheduler should hear of."""


def rows_of(decisions: Iterable[BatchDecision]) -> list[BatchRow]:
    """Return the changes of the batch size, as they are shown."""
    return [
        BatchRow(
            step=decision.step,
            batch=decision.batch,
            tried=decision.tried,
            why=decision.why,
            goodput=decision.goodput or None,
            measured=decision.measured or None,
            noise=finite(decision.noise),  # that of pure noise is infinite
        )
        for decision in decisions
    ]


def profile_of(
    controller: BatchPolicy,
    noise: NoiseInterval,
    *,
    max_batch_size: int,
    most_replicas: int,
    restart_s: float,
    progress: float,
    epochs: int | None,
    samples: int,
) -> JobProfile | None:
    """Return the job's profile; None while step times are not known.

    Args:
        controller: what it has learnt.
        noise: the noise scale.
        max_batch_size: the most samples of a step that are tried, over all ranks.
        most_replicas: the most ranks that the training has run on.
        restart_s: what a change of the placement costs, s.
        progress: steps of the user's batch that the steps so far were worth.
        epochs: of the whole training; None where its script doesn't say.
        samples: of an epoch.
    """
    model, batches = controller.times.model, controller.batches
    if model is None:
        return None
    fits = batches.fits
    steps = -(-max_batch_size // fits) if batches.accumulates and fits is not None else 1
    limits = BatchLimits(
        max_batch_size=max_batch_size,
        local_max=None if fits is None else max(1, fits // batches.pieces),
        max_accumulation=batches.micro_batches * steps - 1,
    )
    return JobProfile(
        model=model,
        noise=noise,
        base_batch=controller.base_batch,
        limits=limits,
        most_replicas=most_replicas,
        restart_s=restart_s,
        progress=progress,
        total=None if not epochs else float(epochs * -(-samples // controller.base_batch)),
    )


class ProfileFile:
    """The job's profile beside its checkpoints, for a scheduler.

    Args:
        folder: of the checkpoints.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = Path(folder) / PROFILE
        self._written = 0, 0.0, 0.0
        """Batch, noise scale and progress of the profile that was written last."""

    def write(self, profile: JobProfile, batch: int) -> None:
        """Write it where the batch, or noise or progress by a tenth, has changed; a failure is a warning."""
        now = batch, profile.noise.phi, profile.progress
        is_close = (math.isclose(new, old, rel_tol=_NOTEWORTHY) for new, old in zip(now, self._written, strict=True))
        if batch == self._written[0] and all(is_close):
            return
        self._written = now
        try:
            profile.save(self._path)
        except OSError as error:
            warn(f"the job's profile can't be written: {error}", stacklevel=7)

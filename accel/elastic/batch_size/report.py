"""What a run whose batch is chosen tells others: each change for the report, the job's profile for a scheduler."""

from __future__ import annotations

from collections.abc import Iterable

from accel.elastic.batch_size.policy import BatchDecision, BatchPolicy
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.goodput import BatchLimits
from accel.goodput.job import JobProfile
from accel.report.model import BatchRow
from accel.report.words import finite


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
    if controller.model is None:
        return None
    fits, shares = controller.fits, controller.replicas * controller.micro_batches
    pieces = -(-max_batch_size // fits) if controller.accumulates and fits is not None else 1
    limits = BatchLimits(
        max_batch_size=max_batch_size,
        local_max=None if fits is None else max(1, fits // shares),
        max_accumulation=controller.micro_batches * pieces - 1,
    )
    return JobProfile(
        model=controller.model,
        noise=noise,
        base_batch=controller.base_batch,
        limits=limits,
        most_replicas=most_replicas,
        restart_s=restart_s,
        progress=progress,
        total=None if not epochs else float(epochs * -(-samples // controller.base_batch)),
    )

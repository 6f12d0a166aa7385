"""What a script, or whoever schedules it, may ask of a training under `accel.optimize(elastic=)`.

Each function takes the model that was passed to `accel.optimize`. Where accel is switched off (`ACCEL=0`) the script
still runs: nothing is saved, with a warning, and each step is worth one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from accel.elastic import left_alone
from accel.elastic.progress import CountsProgress
from accel.elastic.run import RUNS, ElasticRun
from accel.errors import InvalidArgument
from accel.goodput.job import JobProfile

T = TypeVar("T")


def request_checkpoint(model: nn.Module) -> None:
    """Save a checkpoint at the end of the step under way; of several ranks, when they meet next, within a second or so.

    Args:
        model: that was passed to `accel.optimize` with `checkpoint`. With several ranks one of them is enough.

    Raises:
        InvalidArgument: if it was not.

    Example:
        >>> if time.monotonic() > deadline:
        ...     request_checkpoint(model)
    """
    if not _is_left_alone(model, "request_checkpoint"):
        _part(model, "request_checkpoint", _SAVED, lambda run: run.checkpoint).request()


def save_checkpoint(model: nn.Module) -> None:
    """Save a checkpoint now, between two steps: after the last epoch, say, which no further step follows.

    Args:
        model: that was passed to `accel.optimize` with `checkpoint`. With several ranks all of them call it, at the
            same place; where one has left, nothing is saved, with a warning.

    Raises:
        InvalidArgument: if it was not.

    Example:
        >>> for epoch in remaining_epochs(loader, 30):
        ...     train(model, loader)
        >>> save_checkpoint(model)
    """
    if not _is_left_alone(model, "save_checkpoint"):
        _part(model, "save_checkpoint", _SAVED, lambda run: run.checkpoint).save_now()


def progress_of(model: nn.Module) -> CountsProgress:
    """Return what counts the progress of a training: its `progress` grows by each step's gain.

    Args:
        model: that was passed to `accel.optimize` with `max_batch_size`.

    Raises:
        InvalidArgument: if it was not.

    Example:
        >>> cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)
        >>> schedule = ProgressSchedule(cosine, progress_of(model))  # 10,000 steps of the user's batch
    """
    if (steps := left_alone.steps_of(model)) is not None:
        return steps
    return _Progress(model, _part(model, "progress_of", _GROWING, lambda run: run.batch).rates)


def job_profile(model: nn.Module) -> JobProfile:
    """Return what a cluster scheduler needs to know of a job: step times, noise, bounds, what a restart costs.

    With `checkpoint` it is written to `job.json` in that folder too, whenever the batch or the noise scale changes.

    Args:
        model: that was passed to `accel.optimize` with `max_batch_size`.

    Raises:
        InvalidArgument: if it was not, or nothing is known yet, or on another rank than 0.

    Example:
        >>> job_profile(model).speedup(nodes=2, replicas=8)
        5.1

    Source: Qiao et al. 2021, https://www.usenix.org/conference/osdi21/presentation/qiao, section 4.2.
    """
    run = _part(model, "job_profile", _GROWING, lambda run: run if run.batch is not None else None)
    if (profile := run.profile()) is None:
        raise InvalidArgument(
            "a job's profile needs step times and a noise scale. Found: not known yet on this rank; ask on rank 0, "
            "after the first decision about the batch (some hundreds of steps)"
        )
    return profile


class _Progress:
    """The progress of a training by what counts it at the time, which is another object once the ranks have changed."""

    def __init__(self, model: nn.Module, counts: CountsProgress) -> None:
        self._model, self._counts = model, counts

    @property
    def progress(self) -> float:
        """Steps of the user's batch that the steps so far were worth."""
        run = RUNS.get(self._model)
        if run is not None and run.batch is not None:  # after `undo` the last one counts on
            self._counts = run.batch.rates
        return self._counts.progress


def _is_left_alone(model: nn.Module, asked: str) -> bool:
    """Return whether accel was switched off for a training, and say that nothing is saved."""
    if left_alone.steps_of(model) is None:
        return False
    warnings.warn(f"{asked}: accel is switched off, so no checkpoint is saved", RuntimeWarning, stacklevel=3)
    return True


_SAVED, _GROWING = "checkpoint=FOLDER", "max_batch_size=N"


def _part(model: nn.Module, asked: str, setting: str, part: Callable[[ElasticRun], T | None]) -> T:
    """Return a part of a model's run; raise if it is not there."""
    run = RUNS.get(model)
    if run is None or (result := part(run)) is None:
        raise InvalidArgument(
            f"{asked} needs a model that is optimized with elastic.{setting.partition('=')[0]}. Found: a "
            f"{type(model).__name__} that is not; pass elastic=accel.Elastic({setting}) to accel.optimize"
        )
    return result

"""A learning-rate schedule by progress in place of steps, so that it takes as many samples' worth at any batch size.

A step at S > 1 counts for r steps of the base batch (AdaScale's gain, https://arxiv.org/abs/2007.05105, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accel.errors import InvalidArgument

# Ten gains of 1.1 sum up to 10.999999999999998: that is 11.
_ROUNDING = 1e-6


class CountsProgress(Protocol):
    """A `LearningRateScaler`, or `accel.progress_of` a model."""

    @property
    def progress(self) -> float:
        """Steps of the user's batch that the steps so far were worth."""


class ProgressSchedule:
    """Advance a scheduler that was written for one call per step as often as progress says.

    After each of the optimizer's steps, `step` calls `scheduler.step()` ⌊progress⌋ − done times: once at S = 1, none or
    several times at others. torch computes most schedules from the rate before, step by step, so that no call may be
    left out: three calls are three steps of the schedule. A scheduler with a fixed number of steps (OneCycleLR) stays
    at its last.

    Schedules by epoch need none of this: they are stepped once per epoch at any batch size.

    Args:
        scheduler: of torch, stepped by nobody else.
        scaler: counts the progress: a `LearningRateScaler`, or `progress_of(model)` under `optimize(elastic=)`.

    Raises:
        InvalidArgument: if the scheduler waits for a metric (ReduceLROnPlateau), not for steps.

    Example:
        >>> import torch
        >>> from accel.elastic.learning_rate import LearningRateScaler
        >>> from accel.elastic.scaling_rules import BatchScale
        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> scaler = LearningRateScaler(optimizer)
        >>> schedule = ProgressSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5), scaler)
        >>> scaler.update(BatchScale(256, 64, gain=2.5))
        >>> for _ in range(2):  # progress 2.5, then 5: two calls, then three
        ...     optimizer.step()
        ...     schedule.step()
        >>> optimizer.param_groups[0]["lr"] == 0.5**5
        True
    """

    def __init__(self, scheduler: LRScheduler, scaler: CountsProgress) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise InvalidArgument(
                "a schedule by progress must be one by steps, got ReduceLROnPlateau; call its step(metric) yourself"
            )
        self.scheduler, self._scaler = scheduler, scaler
        self._done = int(scaler.progress + _ROUNDING)

    def step(self) -> None:
        """Advance the scheduler to the scaler's progress; call it after each of the optimizer's steps."""
        due = int(self._scaler.progress + _ROUNDING)
        last = getattr(self.scheduler, "total_steps", None)
        for _ in range(due - self._done):
            if last is None or self.scheduler.last_epoch < last:
                self.scheduler.step()
        self._done = due

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and the number of steps that it was advanced by."""
        return {"done": self._done, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; load the scaler's too."""
        self.scheduler.load_state_dict(dict(state["scheduler"]))
        self._done = int(state["done"])

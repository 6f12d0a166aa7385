"""What was decided on the batch between two steps, and how its samples are dealt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Shares(NamedTuple):
    """How the samples of a step are dealt."""

    local: int
    """To each rank in each of the loop's batches."""
    steps: int
    """Of the loop, whose gradients are one step of its optimizer."""


@dataclass(frozen=True, kw_only=True)
class BatchDecision:
    """What was decided between two steps."""

    step: int
    """Steps that had ended."""
    batch: int
    """Samples of a step from now on, over all ranks."""
    accumulated: int = 1
    """Steps of the loop, whose gradients are accumulated to this one."""
    tried: bool
    """The batch has not been timed before: it is settled or undone at the next decision."""
    why: str
    goodput: float
    """Predicted, samples per second as if of the user's batch; 0 before any step was timed."""
    measured: float
    """The same by the time of its steps, as of the latest decision since; 0 until they were timed."""
    noise: float | None
    """The noise scale, samples; None while it is not known."""
    steps: int
    """Until the next decision, at least."""

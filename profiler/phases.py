"""The phases of a step, and what a step was measured to be; `accel.profiler.loop.clock` books the time to them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

MEANING = {
    "data": "waiting for the next batch",
    "copy": "copying to the device",
    "host": "the loop's own code inside the step",
    "forward": "the model's forward pass",
    "loss": "the loss, up to the start of the backward pass",
    "backward": "the backward pass",
    "communication": "collectives the loop calls itself, and DDP's that no computation hides",
    "optimizer": "the optimizer's step",
    "evaluation": "evaluation between two steps",
    "outside": "the loop's own code between the update and the next batch",
}
"""Phase → what it is, in the order of a step."""

PHASES = tuple(MEANING)


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One training step, from the request for its first batch to the next step's."""

    step: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    """Phase → seconds; the values add up to `seconds`."""
    samples: int = 0
    """Samples in all batches of the step; 0 when batches have no length or were not counted."""
    batches: int = 1
    shape: Hashable = None
    """Signature of the step's first batch: shapes and dtypes of its tensors."""
    first: bool = False
    """True for the first step of an epoch, which holds the start of the loader."""

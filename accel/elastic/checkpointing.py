"""How a run under `accel.optimize` is saved: the field `checkpoint` of its `elastic`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from accel.elastic.training_state import Stateful
from accel.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Settings of the checkpoints of a run; a folder's name alone means the defaults.

    Raises:
        InvalidArgument: if a setting is out of its range.

    Example:
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        >>> checkpoint = Checkpointing(folder="runs/one", schedulers=[schedule])
        >>> elastic = accel.Elastic(checkpoint=checkpoint)
        >>> model, loader, optimizer = accel.optimize(model, loader, optimizer, elastic=elastic)
    """

    folder: str | os.PathLike[str]
    """Where they are kept; with several ranks one that all of them can read."""
    schedulers: Sequence[Stateful] = ()
    """Learning-rate schedulers of the loop: they are not seen, so they must be named."""
    more: Mapping[str, Stateful] = field(default_factory=dict)
    """Whatever else has `state_dict` and `load_state_dict`, by a name: a GradScaler, say."""
    interval_s: float = 600.0
    """Seconds between two of them, at least; longer where saving would take more than 1 % of the time."""
    keep: int = 3
    """How many are kept."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loop's GradScaler, if it is named in `more`."""
        return next((each for each in self.more.values() if isinstance(each, torch.amp.GradScaler)), None)

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise InvalidArgument(f"interval_s must be above 0, in seconds, got {self.interval_s!r}")
        if type(self.keep) is not int or self.keep < 1:
            raise InvalidArgument(f"keep must be a whole number of checkpoints, at least 1, got {self.keep!r}")
        taken = {"sampler", "batch", "buckets"} & set(self.more)
        if taken:
            raise InvalidArgument(f"names in more must differ from accel's own, got {', '.join(sorted(taken))}")

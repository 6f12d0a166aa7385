"""What may change about a training beside its speed: the argument `elastic` of `accel.optimize`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from accel.elastic.scaling_rules import Rule
from accel.elastic.training_state import Stateful
from accel.errors import InvalidArgument
from accel.profiler.errors import check_numbers


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
    """Seconds between two, at least; more where saving would take above 1 % of the time."""
    keep: int = 3
    """How many are kept."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loop's GradScaler, if it is named in `more`."""
        return next((each for each in self.more.values() if isinstance(each, torch.amp.GradScaler)), None)

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike):
            raise InvalidArgument(f"folder must be a path, got {self.folder!r}; name the folder of the checkpoints")
        check_numbers(interval_s=self.interval_s)
        if not self.interval_s > 0:
            raise InvalidArgument(f"interval_s must be above 0, in seconds, got {self.interval_s!r}")
        if type(self.keep) is not int or self.keep < 1:
            raise InvalidArgument(f"keep must be a whole number of checkpoints, at least 1, got {self.keep!r}")
        taken = {"sampler", "batch", "buckets"} & set(self.more)
        if taken:
            raise InvalidArgument(f"names in more must differ from accel's own, got {', '.join(sorted(taken))}")


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Let the batch size grow while training, save the training and go on from what is saved, or both.

    Raises:
        InvalidArgument: if a setting is wrong; the message says how to correct it.

    Example:
        >>> elastic = Elastic(max_batch_size=512, checkpoint="runs/one")
        >>> model, loader, optimizer = accel.optimize(model, loader, optimizer, elastic=elastic)
    """

    max_batch_size: int | None = None
    """Most samples of a step over all ranks, up to which the batch grows by goodput; at least the loader's. Each sample
    still comes once an epoch, and the learning rate of each step follows its batch. None (default) keeps the batch."""
    scaling_rule: Rule | None = None
    """How the learning rate follows the batch: a rule of `accel.scaling_rules`, or a function. None (default): that of
    the optimizer, AdaScale for SGD and the square root for Adam."""
    checkpoint: str | os.PathLike[str] | Checkpointing | None = None
    """A folder, or `accel.Checkpointing`: the training is saved in it while it goes on and when the process is sent
    SIGTERM, and `optimize` goes on from the newest one there, on any number of ranks. Loop over
    `accel.remaining_epochs(loader, epochs)`. It needs the optimizer. None (default) saves nothing."""

    def __post_init__(self) -> None:
        most, rule, checkpoint = self.max_batch_size, self.scaling_rule, self.checkpoint
        if most is not None and (not isinstance(most, int) or isinstance(most, bool)):
            raise InvalidArgument(f"max_batch_size must be a number of samples or None. Found: {most!r}; pass 512, say")
        if rule is not None and not (callable(rule) or hasattr(rule, "multipliers")):
            raise InvalidArgument(
                "scaling_rule must be a rule of accel.scaling_rules or a function of a BatchScale. Found: "
                f"{rule!r}; AdaScale() is one"
            )
        if rule is not None and most is None:
            raise InvalidArgument(
                "scaling_rule needs max_batch_size: at a fixed batch there is nothing to scale by. Found: "
                "max_batch_size=None; pass both or neither"
            )
        if not isinstance(checkpoint, str | os.PathLike | Checkpointing | None):
            raise InvalidArgument(
                f"checkpoint must be a folder or accel.Checkpointing(folder=...). Found: {checkpoint!r}; pass a path"
            )

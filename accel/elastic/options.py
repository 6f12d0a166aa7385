"""What may change about a training beside its speed: the argument `elastic` of `accel.optimize`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from accel.elastic.checkpointing import Checkpointing
from accel.elastic.scaling_rules import Rule
from accel.errors import InvalidArgument


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

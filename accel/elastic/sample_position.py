"""Counts what a loop takes of an elastic loader, so that its position in the epoch is known at any time.

It follows the loader for good: also after `accel.undo` each epoch must have each sample once.
"""

from __future__ import annotations

from typing import Any

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.passes.proxy import LoaderProxy
from accel.session.listeners import Onlooker


class SamplePosition(Onlooker):
    """Follow a loader that an `ElasticSampler` makes the batches of.

    Args:
        sampler: of the loader.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler
        super().__init__()

    def batch_delivered(self, batch: Any, proxy: LoaderProxy) -> None:
        """Count the batch as consumed."""
        self.sampler.advance()

    def epoch_ended(self, proxy: LoaderProxy) -> None:
        """Go on to the next epoch."""
        self.sampler.end_epoch()


def remaining_epochs(loader: Any, total: int) -> range:
    """Return the epochs that a training has still to take, the one that it is in the midst of included.

    Args:
        loader: that `accel.optimize` returned under `checkpoint=` or `max_batch_size=`.
        total: epochs of the whole training.

    Raises:
        ValueError: if it is another loader.

    Example:
        >>> model, loader, optimizer = accel.optimize(model, loader, optimizer, checkpoint="runs/one")
        >>> for epoch in remaining_epochs(loader, 10):
        ...     for batch, target in loader:
        ...         ...
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, ElasticSampler):
        raise ValueError(
            "loader must be the one that accel.optimize returned under checkpoint= or max_batch_size=, got "
            f"{type(loader).__name__} without an ElasticSampler"
        )
    return range(sampler.epoch, max(total, sampler.epoch))

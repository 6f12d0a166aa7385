"""A dataset as it will be in another epoch, for batches that are made before the loop has begun that epoch.

Worker processes have copies of a dataset, which are sent the epoch that is expected next. Threads read the loop's own,
which is still in the epoch before. So a dataset may offer `epoch`, a number, and `at_epoch(epoch)`, which returns what
reads the same samples as the dataset itself after `set_epoch(epoch)`, and leaves the dataset as it is.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from accel.profiler.interruptions import ours


def dataset_epoch(dataset: Any) -> int | None:
    """Return the epoch of a dataset that can be had as in another one; None for any other dataset."""
    inner = _inner(dataset)
    epoch = declared(inner, "epoch")
    return epoch if type(epoch) is int and callable(declared(inner, "at_epoch")) else None


def declared(dataset: Any, name: str) -> Any:
    """Return an attribute of a dataset, None if there is none, whatever its `__getattr__` or a property raises."""
    try:
        return getattr(dataset, name)
    except ours():
        return None


def at_epoch(dataset: Any, epoch: int) -> Any:
    """Return a dataset as it will be in `epoch`, with the `Subset`s around it."""
    if type(dataset) is Subset:
        return Subset(at_epoch(dataset.dataset, epoch), dataset.indices)
    return dataset.at_epoch(epoch)


def _inner(dataset: Any) -> Any:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset

"""Whether a loader's batches can be made by others than the loader: the one place for the reasons why not."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler


def not_movable(loader: DataLoader[Any]) -> str:
    """Return '' if a `ContinuousLoader` can make the loader's batches, else the reason why not."""
    if loader._dataset_kind != 0:
        return "its dataset is iterable: the dataset itself decides which items a worker reads"
    return _own_iterator(loader)


def movable(loader: Any) -> str:
    """Return '' if the loader's batches can be made by workers that go on across epochs, else the reason why not."""
    if not isinstance(loader, DataLoader):
        return f"the loader is a {type(loader).__name__}, not a torch.utils.data.DataLoader"
    if reason := _own_iterator(loader):
        return reason
    if loader._dataset_kind != 0:
        return "the dataset is iterable: prefetching would consume items that an early break leaves"
    if loader.batch_sampler is None:
        return "the loader has no batch sampler (batch_size=None)"
    return not_continuable(loader) if loader.num_workers > 0 else ""


def not_continuable(loader: DataLoader[Any]) -> str:
    """Return '' if workers that go on could stand in for those of `loader`, which must be map-style, else why not."""
    if loader.persistent_workers:
        return "the loader keeps its workers itself (persistent_workers=True), and with them their random states"
    if not loader.in_order:
        return "the loader yields batches out of order (in_order=False)"
    if isinstance(loader.dataset, MapDataPipe):
        return "the dataset is a MapDataPipe, which torch shards in its own workers"
    if loader.pin_memory and torch.accelerator.is_available() and not torch.cuda.is_available():
        return "batches are pinned for a device that is not a CUDA one"
    return ""


def not_read_ahead(loader: DataLoader[Any]) -> str:
    """Return '' if index lists may be drawn before the loop asks for their batches, else the reason why not.

    torch's samplers, by their very classes, draw what they need when an epoch begins, and those
    with `peek_epoch` say so. Any other may read what the loop sets in the meantime: a loss, a
    counter, a batch size.
    """
    from accel.dataio.passes.epochs import can_draw_ahead, can_peek, ordering

    sampler: Any = ordering(loader)
    if can_peek(loader):
        return ""
    if type(sampler) not in _READ_AHEAD:
        return f"its sampler, a {type(sampler).__name__}, is not one of torch's: what it yields may follow the loop"
    if type(sampler) is SubsetRandomSampler and type(sampler.indices).__module__ not in ("builtins", "torch", "numpy"):
        return f"its SubsetRandomSampler has a {type(sampler.indices).__name__} of indices, which may follow the loop"
    if type(sampler) is RandomSampler and sampler.generator is not None and not can_draw_ahead(loader):
        return "its RandomSampler draws from the loader's generator as it goes"
    return ""


def not_elsewhere(loader: DataLoader[Any], *, exact: bool) -> str:
    """Return '' if the dataset may be read in other processes, as far as can be seen of it, else the reason why not.

    If it must be `exact`, what the loop could change without being seen is a reason, too.
    """
    from accel.dataio.dataset.handles import shared_handle
    from accel.dataio.dataset.watch import DatasetWatch
    from accel.dataio.fetching.fetch import fetch_of
    from accel.dataio.passes.epochs import ordering

    sampler: Any = ordering(loader)
    if exact and type(sampler) is SubsetRandomSampler and not isinstance(sampler.indices, (tuple, range)):
        return "the loop could set other indices in its SubsetRandomSampler within an epoch: allow='exact' leaves it"
    if exact and (unseen := DatasetWatch(fetch_of(loader), share=0.0).unseen):
        return f"the loop could change {unseen}, within an epoch without being seen: allow='exact' leaves it"
    return shared_handle(loader)


_READ_AHEAD = (
    *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    *(range, tuple),
)


def _own_iterator(loader: DataLoader[Any]) -> str:
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} overrides __iter__"
    if type(loader)._get_iterator is not DataLoader._get_iterator:
        return f"{type(loader).__name__} overrides _get_iterator"
    return ""

"""Make a batch from a list of indices, as a `DataLoader` does, and say which sample failed when one did.

A `TensorDataset`, or a `Subset` of one, with the default collate function is asked for its tensors
by the whole list, which copies the same rows that stacking would; a dataset with `__getitems__` for
the list of samples in one call. In place of both, and of one sample after the other, a cache may
stand that knows the samples (`keep_samples`).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from accel.profiler.errors import InvalidState
from accel.profiler.interruptions import Tolerated

_AT = "_accel_sample"


class SampleSource:
    """Where samples come from in place of the dataset, if `__getitems__` of another thing knows them."""

    def __init__(self) -> None:
        self.known: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleSource, ()  # another process fetches


class Fetch:
    """Make batches of a map-style dataset.

    Args:
        dataset: map-style dataset.
        collate: makes a batch from samples.
        batched: indices come in lists; False when the loader has `batch_size=None` and an index is a batch.
        source: where samples come from in place of the dataset; default the dataset.
    """

    accel_hides: ClassVar[frozenset[str]] = frozenset({"_source"})

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], batched: bool, source: SampleSource | None = None
    ) -> None:
        self.dataset, self.collate, self.batched = dataset, collate, batched
        self._source = source or SampleSource()

    def of(self, dataset: Any) -> Fetch:
        return Fetch(dataset, self.collate, self.batched)

    def __call__(self, indices: Any) -> Any:
        """Return the batch of `indices`; what the dataset or the collate function raises goes through.

        Only a StopIteration becomes a RuntimeError: it would be taken for the end of the epoch.
        """
        try:
            return self._batch(indices) if self.batched else self.collate(sample_of(self.dataset, indices))
        except StopIteration as error:
            raise InvalidState(f"the dataset raised StopIteration at {blame(error, indices)}") from error

    def _batch(self, indices: Any) -> Any:
        # Looked up for each batch, 2 µs: between two epochs the loop may give the dataset other tensors or places.
        whole = whole_tensors(self.dataset) if self.collate is default_collate else None
        if whole is not None:
            return _index(*whole, indices)
        many = getattr(self._source.known or self.dataset, "__getitems__", None)
        if many:
            return self.collate(many(indices))
        return self.collate([sample_of(self.dataset, index) for index in indices])


def sample_of(dataset: Any, index: Any) -> Any:
    """Return a sample; what the dataset raises says at which one."""
    try:
        return dataset[index]
    except BaseException as error:
        with Tolerated("an error can't be written to"):  # a class with __slots__ or a __setattr__
            setattr(error, _AT, index)
        raise


def _index(tensors: Sequence[Tensor], places: Sequence[int] | None, indices: Iterable[int]) -> list[Tensor]:
    rows = [operator.index(index if places is None else places[index]) for index in indices]
    if not rows:
        raise IndexError("list index out of range")  # as from collating no samples
    chosen = torch.tensor(rows)
    # Stacked samples are contiguous; rows of a channels_last tensor are channels_last again.
    return [tensor[chosen].contiguous() for tensor in tensors]


def whole_tensors(dataset: Any) -> tuple[Sequence[Tensor], Sequence[int] | None] | None:
    """Return the tensors of a `TensorDataset` and the places a `Subset` chose in it; None for any other dataset."""
    places: Sequence[int] | None = None
    if type(dataset) is Subset:
        places, dataset = dataset.indices, dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    plain = all(type(t) is Tensor and t.layout == torch.strided and not t.requires_grad for t in dataset.tensors)
    return (dataset.tensors, places) if plain else None


def fetch_of(loader: DataLoader[Any]) -> Fetch:
    """Return what makes the batches of `loader`, which must be map-style."""
    return Fetch(loader.dataset, loader.collate_fn, loader._auto_collation, _SOURCES.setdefault(loader, SampleSource()))


_SOURCES: weakref.WeakKeyDictionary[DataLoader[Any], SampleSource] = weakref.WeakKeyDictionary()


def keep_samples(loader: DataLoader[Any], known: Any) -> None:
    """Have all that makes batches of a loader take samples from `known`, workers that are forked from now on too."""
    _SOURCES.setdefault(loader, SampleSource()).known = known


def blame(error: BaseException, indices: Any) -> str:
    """Return which sample or samples were being fetched when `error` was raised."""
    index = getattr(error, _AT, None)
    if index is not None:
        return f"sample {index!r}"
    if isinstance(indices, Sequence) and not isinstance(indices, str | bytes):
        return "samples " + _few(list(indices))
    return f"sample {indices!r}"


def _few(indices: list[Any], most: int = 8) -> str:
    first = ", ".join(repr(index) for index in indices[:most])
    return f"[{first}{', …' if len(indices) > most else ''}]" + (f" ({len(indices)})" if len(indices) > most else "")

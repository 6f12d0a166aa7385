"""Make a batch from a list of indices, as a `DataLoader` does, and say which sample failed when one did.

A dataset is asked in the widest way it understands:

| the dataset | is asked for |
|---|---|
| `TensorDataset`, or a `Subset` of one, with the default collate function | its tensors, by the whole list |
| has `__getitems__` | the list of samples in one call |
| anything else | one sample after the other |

All three give the bits of the last one: for the first, indexing with a list copies the same rows that stacking would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

_AT = "_accel_sample"


class Fetch:
    """Make batches of `loader`'s dataset.

    Args:
        dataset: map-style dataset.
        collate: makes a batch from samples.
        batched: indices come in lists; False when the loader has `batch_size=None` and an index is a batch.

    Example:
        >>> fetch = Fetch(range(10), default_collate, batched=True)
        >>> fetch([2, 3])
        tensor([2, 3])
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], batched: bool) -> None:
        self.dataset, self.collate, self.batched = dataset, collate, batched
        self._whole = whole_tensors(dataset) if batched and collate is default_collate else None
        many = getattr(dataset, "__getitems__", None) if batched else None
        self._many: Callable[[Any], Any] | None = many if callable(many) else None

    @property
    def vectorised(self) -> bool:
        """True if a whole batch is one call to the dataset."""
        return self._whole is not None or self._many is not None

    def __call__(self, indices: Any) -> Any:
        """Return the batch of `indices`; what the dataset or the collate function raises goes through."""
        if self._whole is not None:
            return self._index_whole(indices)
        if self._many is not None:
            return self.collate(self._many(indices))
        if not self.batched:
            return self.collate(self._one(indices))
        return self.collate([self._one(index) for index in indices])

    def _one(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            with contextlib.suppress(AttributeError):  # an exception class with __slots__
                setattr(error, _AT, index)
            raise

    def _index_whole(self, indices: Sequence[int]) -> list[Tensor]:
        assert self._whole is not None
        tensors, places = self._whole
        chosen = torch.as_tensor(indices if places is None else [places[index] for index in indices])
        return [tensor[chosen] for tensor in tensors]


def whole_tensors(dataset: Any) -> tuple[Sequence[Tensor], Sequence[int] | None] | None:
    """Return the tensors of a `TensorDataset` and the places a `Subset` chose in it; None for any other dataset."""
    places: Sequence[int] | None = None
    if type(dataset) is Subset:
        places, dataset = dataset.indices, dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    plain = all(type(t) is Tensor and t.layout == torch.strided and not t.requires_grad for t in dataset.tensors)
    return (dataset.tensors, places) if plain else None


def thread_safe(dataset: Any) -> bool:
    """Tell whether several threads may read `dataset` at once: it says so, or it is tensors in memory."""
    return bool(getattr(dataset, "thread_safe", False)) or whole_tensors(dataset) is not None


def fetch_of(loader: DataLoader[Any]) -> Fetch:
    """Return what makes the batches of `loader`, which must be map-style."""
    return Fetch(loader.dataset, loader.collate_fn, loader._auto_collation)


def blame(error: BaseException, indices: Any) -> str:
    """Return which sample or samples were being fetched when `error` was raised."""
    index = getattr(error, _AT, None)
    if index is not None:
        return f"sample {index!r}"
    return "samples " + _few(list(indices)) if isinstance(indices, Sequence) else f"sample {indices!r}"


def _few(indices: list[Any], most: int = 8) -> str:
    shown = ", ".join(repr(index) for index in indices[:most])
    return f"[{shown}{', …' if len(indices) > most else ''}]" + (f" ({len(indices)})" if len(indices) > most else "")

"""Whether something has changed what fetching reads: the loop within or between epochs, or fetching itself.

Everything that dataset and collate function hold, and that their code names, is looked at once.
From then on what may have changed is compared: quickly before each batch, in some 50 µs,
thoroughly when an epoch begins.

| what | a change is seen by |
|---|---|
| attributes, slots, entries, classes, closures, globals, `os.environ` | another object in its place |
| a tensor | its version counter; of small ones the bytes, too |
| an array, bytes, up to 1 MiB together | its bytes |
| a long list of numbers, texts or tuples of these | its entries; of one as long as the dataset the batch's own |
| a random generator | its state |
| up to 64 MiB of arrays and a million entries of other long containers | thoroughly: a digest |

What can't be seen before a batch is named by `DatasetWatch.unseen`, what can't be seen at all by
`DatasetWatch.unseen_at_all`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from accel.dataio.dataset.handles import is_handle
from accel.dataio.dataset.numbers import differing, numbers_in, owners
from accel.dataio.dataset.reach import is_scalar
from accel.dataio.dataset.walk import Content, Holder, Walk
from accel.dataio.fetching.fetch import Fetch
from accel.profiler.interruptions import ours

# Rows of a long list that are compared beside those of the batch, in turn.
_TURN = 1024


class DatasetWatch:
    """Sees what changes in the dataset or the collate function of a `Fetch`.

    Args:
        fetch: what makes the batches.
        share: of 64 MiB of arrays and a million entries of long containers, that may be looked at thoroughly.

    Attributes:
        unseen: something that could change without being seen before a batch; '' if there is nothing of the kind.
        unseen_at_all: something that could change without being seen when an epoch begins, either.
        change: where `changed` has seen one.
        numbers: those of the dataset, see `accel.dataio.dataset.numbers`.

    Example:
        >>> data = [0.5, 1.5]
        >>> watch = DatasetWatch(Fetch(data, list, batched=True))
        >>> data[1] = 2.5
        >>> watch.changed(), watch.change
        (True, 'the dataset')
    """

    def __init__(self, fetch: Fetch, *, share: float = 1.0) -> None:
        self._owners = owners(fetch.dataset)
        self._levels = _levels(fetch.dataset)
        self._seen = seen = Walk(fetch, self._owners, [length for length, _ in self._levels], share)
        self.unseen, self.unseen_at_all = seen.unseen, seen.unseen_at_all
        self.change, self._turn = "", 0
        self.numbers = numbers_in(self._owners)
        self._versions = _versions(seen.counted)

    def changed(self, indices: Any = (), *, thoroughly: bool = False, numbers: bool = True) -> bool:
        """Return whether something is not as it was when this was made.

        Args:
            indices: of the batch that is about to be used.
            thoroughly: look at what takes longer, too.
            numbers: look at the numbers of the dataset, too.
        """
        try:
            self.change = (
                self._number_changed(numbers) or self._quickly(indices) or (self._thoroughly() if thoroughly else "")
            )
        except ours():  # what could be compared before can't be now
            self.change = "something"
        return bool(self.change)

    def _number_changed(self, all_of_them: bool) -> str:
        to_send = differing(self.numbers, numbers_in(self._owners))
        return "the dataset" if to_send is None or (to_send and all_of_them) else ""

    def _quickly(self, indices: Any) -> str:
        seen = self._seen
        if other := _other_holder(seen.holders):
            return other
        if _versions(seen.counted) != self._versions:
            return "a tensor"
        if not all(map(torch.UntypedStorage.resizable, seen.storages)):
            return "a tensor, by way of an array that shares its memory"
        return _other_content(seen.contents) or (self._other_row(indices) if seen.tables else "")

    def _thoroughly(self) -> str:
        return _other_holder(self._seen.slow_holders) or _other_content(self._seen.slow_contents)

    def _other_row(self, indices: Any) -> str:
        rows: dict[int, list[int]] = {}
        places = [int(index) for index in indices] if isinstance(indices, list) else []
        for length, chosen in self._levels:
            rows[length] = rows.get(length, []) + places
            places = places if chosen is None else [int(chosen[place]) for place in places]
        begin, self._turn = self._turn, self._turn + _TURN
        for name, table, kept in self._seen.tables:
            if len(table) != len(kept) or not all(_alike(table[row], kept[row]) for row in rows.get(len(kept), ())):
                return name
            part = slice(begin % len(kept), begin % len(kept) + _TURN)  # the others in turn
            now, before = table[part], kept[part]
            if not (all(map(is_, now, before)) or all(map(_alike, now, before))):
                return name
        return ""


def _levels(dataset: Any) -> list[tuple[int, Any]]:
    """Return the lengths of a dataset and those within its `Subset`s, with the places that these choose in the next."""
    levels = []
    while True:
        chosen = dataset.indices if type(dataset) is Subset else None
        try:
            levels.append((len(dataset), chosen))
        except ours():  # it has none
            levels.append((-1, chosen))
        if chosen is None:
            return levels
        dataset = dataset.dataset


def _other_holder(holders: list[Holder]) -> str:
    """Return the name of the first that holds something else than before; '' if there is none."""
    for name, read, kept in holders:
        now = read()
        if (len(now) != len(kept) or not all(map(is_, now, kept))) and not _accepted(now, kept):
            return name
    return ""


def _other_content(contents: list[Content]) -> str:
    return next((name for name, read, before in contents if read() != before), "")


def _accepted(now: Sequence[Any], kept: list[Any]) -> bool:
    """Return whether objects that are others now say the same, and compare with these from now on."""
    if len(now) != len(kept):
        return False
    for new, old in zip(now, kept, strict=True):
        # A handle that was None before is no change: each process opens it for itself.
        if not _alike(new, old) and not (old is None and is_handle(new)):
            return False
    kept[:] = now
    return True


def _alike(new: Any, old: Any) -> bool:
    """Return whether something is the same thing, or an equal number, text or tuple: 1 is not 1.0, and 0.0 not -0.0."""
    if new is old:
        return True
    if type(new) is tuple and type(old) is tuple:
        return len(new) == len(old) and all(map(_alike, new, old))
    return type(new) is type(old) and is_scalar(new) and repr(new) == repr(old)


def _versions(tensors: list[Tensor]) -> list[int]:
    attributes_each = map(len, map(attrgetter("__dict__"), tensors))  # of one that has any nothing is seen
    return [*map(attrgetter("_version"), tensors), *map(Tensor.data_ptr, tensors), *attributes_each]

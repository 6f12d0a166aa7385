"""Keep the samples of a dataset that yields the same ones in each epoch, so that they are decoded no more.

Of a sample that is fetched for the first time a digest of 64 bits is noted. If it is the same the
second time, the sample is kept, and from then on handed out from memory, as a copy. So nothing is
handed out that was not computed twice with the same bits, and an epoch that stays the only one
keeps nothing but digests. Now and then a sample that is kept is fetched all the same and compared
bit by bit. At the first difference, or random number drawn, everything kept is dropped for ever and
the dataset is fetched from as ever.

The cache lies below the collate function: order, batches and what collates them stay as they are.
"""

from __future__ import annotations

import math
import mmap
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from accel.dataio.dataset.numbers import declared
from accel.dataio.fetching.fetch import sample_of
from accel.dataio.fetching.randomness import others_could_draw, random_state, states_of_their_own, streams
from accel.dataio.samples.store import KEPT, UNKNOWN, NotKept, Places, SampleLayout, SampleStore
from accel.profiler import renamed
from accel.profiler.errors import InvalidArgument, InvalidType
from accel.profiler.host import available_memory

_OWN = frozenset({"dataset", "cache_book", "cache_keeper"})
# Of what is available: of memory, and of the disk.
_SHARE = 0.25
# Nothing more is kept once less than this share is left of the memory that was available at the beginning.
_RESERVE = 0.3
# Of the samples that are handed out, so many are fetched all the same and compared.
_CHECKED = 0.01
# Bytes kept between two looks at the memory that is available, which take 0.1 to 0.5 ms.
_LOOK_AFTER = 16 << 20
# The states of the generators are compared for so many samples, and then for one batch in 8: reading them takes 0.1 ms.
_COMPARED_FIRST, _COMPARED_LATER = 1024, 8
# Times that sample 0 is fetched to see what noting it would cost, and what else noting takes than making its bytes.
_TIMED, _REST_OF_NOTING = 5, 1.3
# From here on a fetch is long: it is timed once.
_LONG_S = 1e-3


Fetch = Callable[[list[Any]], Any]
"""Returns the samples of a list of indices."""


class CacheStats(NamedTuple):
    """What a cache has done so far; counts of several processes are close, not exact."""

    samples: int
    """In the dataset."""
    kept: int
    """Of these are kept now."""
    kept_bytes: int
    served: int
    """Handed out from memory."""
    fetched: int
    """Fetched from the dataset, checks included."""
    checked: int
    """Kept, and fetched all the same to be compared."""
    dropped: str
    """Why the cache has been given up; '' if it hasn't."""


class CacheBook:
    """What processes that share a cache tell each other of it: whether it serves, what was counted, why it was dropped.

    `notes` are numbers by their name, which forked processes share. There is no `store` in a
    process that the cache was copied into.
    """

    def __init__(self, store: SampleStore | None) -> None:
        self.store = store
        self.notes: Any = np.frombuffer(mmap.mmap(-1, _NOTES.itemsize), _NOTES)[0]
        self.notes["serves"] = True

    @property
    def places(self) -> int:
        return 0 if self.store is None else self.store.places

    def usable(self) -> SampleStore | None:
        """Return where samples are kept; None if they are no more."""
        return None if self.notes["reason"] else self.store

    @property
    def serves(self) -> bool:
        """Whether it hands out what is kept."""
        return self.usable() is not None and bool(self.notes["serves"])

    def forget(self) -> None:
        """Keep nothing of what there is: the dataset has changed."""
        self.notes["generation"] += 1
        if self.store is not None:
            self.store.forget()

    def give_up(self, reason: str, sample: int = 0) -> None:
        """Drop all that is kept, in all processes, for ever."""
        if self.store is None or self.notes["reason"]:
            return
        self.notes["sample"] = sample
        self.notes["reason"] = _REASONS.index(reason) + 1
        self.store.free()

    @property
    def dropped(self) -> str:
        if self.store is None:
            return "it was copied into another process, where nothing is kept"
        reason = int(self.notes["reason"])
        return _REASONS[reason - 1].format(int(self.notes["sample"])) if reason else ""

    def recent_hits(self) -> tuple[int, int]:
        """Return of how many samples it was looked up since the last call of this whether they are kept, and how many
        were."""
        asked, kept = int(self.notes["asked"]), int(self.notes["found"])
        self.notes["asked"] = self.notes["found"] = 0
        return asked, kept

    def stats(self, samples: int) -> CacheStats:
        store = self.usable()
        kept = 0 if store is None else int((store.state == KEPT).sum())
        size = 0 if store is None else kept * store.layout.size
        served, fetched, checked = (int(self.notes[each]) for each in ("served", "fetched", "checks"))
        return CacheStats(samples, kept, size, served, fetched, checked, self.dropped)


class SampleKeeper:
    """Hands out what is kept, and fetches the rest, and some all the same; keeps what comes out the same twice.

    `share_memory`: a batch's tensors may lie in memory of that batch, which is faster, if they are
    stacked at once.
    """

    def __init__(self, book: CacheBook, in_file: bool) -> None:
        self._book, self._in_file = book, in_file
        self._available_at_first = available_memory() or 0
        self.share_memory = False
        self._own = random.Random(0)

    def _recorded(self, store: SampleStore, indices: list[Any], places: Places, fetch: Fetch) -> Any:
        """Fetch samples, and keep those that come out as before."""
        generation = self._book.notes["generation"]
        samples = self._drawn_nothing(indices, fetch)
        if self._book.usable() is None or self._book.notes["generation"] != generation:
            return samples
        if type(samples) is not list or len(samples) != len(indices):
            self._book.give_up(_NO_LIST)
            return samples
        # What is kept came out the same twice; whether it still does, checks tell.
        new = np.flatnonzero(_has_place(store, places) & (store.state[places % store.places] != KEPT))
        if len(new):
            self._note(store, places[new], [samples[place] for place in new])
            if self._book.notes["generation"] != generation:  # the dataset has changed meanwhile
                store.state[places[new]] = UNKNOWN
        return samples

    def _drawn_nothing(self, indices: list[Any], fetch: Fetch) -> Any:
        """Fetch samples; give up if random numbers were drawn meanwhile, by the dataset or by another thread."""
        # In a thread of this package the loop may draw meanwhile: whoever moved fetching there has looked before.
        compares = not threading.current_thread().name.startswith("accel-") and self._compares()
        before = random_state() if compares else ()
        samples = fetch(indices)
        self._book.notes["fetched"] += len(indices)
        if compares and len(before) == len(streams()) and random_state() != before:
            self._book.give_up(_DRAWS_OR_OTHERS if others_could_draw() else _DRAWS)
        return samples

    def _compares(self) -> bool:
        """Return whether the generators' states are read for this batch: whoever draws does so for most samples."""
        self._book.notes["batches"] += 1
        return bool(self._book.notes["fetched"] < _COMPARED_FIRST or self._book.notes["batches"] % _COMPARED_LATER == 0)

    def _note(self, store: SampleStore, places: Places, samples: Sequence[Any]) -> None:
        """Note samples all at once, or one by one where one has another layout or comes twice."""
        rows = store.layout.rows(samples) if len(set(places.tolist())) == len(samples) else None
        if rows is not None:
            differs = store.note(places, rows, self._has_room)
            if differs is not None:
                self._book.give_up(_DIFFERS, differs)
        elif len(samples) > 1:
            for place in range(len(samples)):
                self._note(store, places[place : place + 1], samples[place : place + 1])

    def _has_room(self, more: int) -> bool:
        """Return whether memory is left for more samples: others may need it since."""
        store = self._book.store
        sample_bytes = 0 if store is None else store.layout.size
        before = int(self._book.notes["stored"])
        self._book.notes["stored"] += more
        if (before + more) * sample_bytes // _LOOK_AFTER != before * sample_bytes // _LOOK_AFTER:
            available = None if self._in_file else available_memory()
            self._book.notes["full"] = available is not None and available < _RESERVE * self._available_at_first
        return not self._book.notes["full"]

    def noting_share(self, fetch: Fetch) -> float:
        """Return how long noting a sample takes in the first epoch, in the time of its fetch; sample 0 is timed."""
        store = self._book.store
        assert store is not None
        fetch_s = note_s = math.inf
        with states_of_their_own():
            for _ in range(_TIMED):
                began = time.perf_counter()
                (sample,) = fetch([0])
                fetched = time.perf_counter()
                hash(tuple(store.layout.pack(sample) or ()))
                fetch_s, note_s = min(fetch_s, fetched - began), min(note_s, time.perf_counter() - fetched)
                if fetch_s > _LONG_S:
                    break
        return _REST_OF_NOTING * note_s / fetch_s if fetch_s > 0 else math.inf

    def get(self, indices: list[Any], fetch: Fetch, samples: int, *, whole: bool) -> Any:
        """Return some of so many samples, from memory what is kept; all or none of a `whole` batch."""
        store, places = self._book.usable(), _places(indices)
        if store is None or places is None:
            return fetch(indices)
        has_place = _has_place(store, places)
        kept = has_place.copy()
        kept[has_place] = store.state[places[has_place]] == KEPT
        hits = int(kept.sum())
        self._book.notes["asked"] += len(indices)
        self._book.notes["found"] += hits
        if self._book.serves and hits and (hits == len(indices) or not whole):
            chosen = self._to_check(indices, kept, whole, samples)
            generation = self._book.notes["generation"]
            if not chosen or self._same(store, chosen, fetch):
                served = self._served(store, indices, places, kept, fetch, generation)
                if served is not None:
                    return served
        return self._recorded(store, indices, places, fetch)

    def _served(
        self,
        store: SampleStore,
        indices: list[Any],
        places: Places,
        kept: np.ndarray[Any, Any],
        fetch: Fetch,
        generation: int,
    ) -> list[Any] | None:
        """Return a batch some of which is kept; None if that may not be handed out."""
        samples = store.layout.unpack(store.read(places[kept]), share=self.share_memory)
        # Another process may have dropped it all, and freed the memory, meanwhile.
        if self._book.usable() is None or self._book.notes["generation"] != generation:
            return None
        self._book.notes["served"] += len(samples)
        if len(samples) == len(indices):
            return samples
        others = [i for i, there in zip(indices, kept, strict=True) if not there]
        missing = self._recorded(store, others, places[~kept], fetch)
        if self._book.usable() is None:  # as these have shown: the others of the batch are fetched, too
            samples = fetch([i for i, there in zip(indices, kept, strict=True) if there])
        from_memory, fetched = iter(samples), iter(missing)
        return [next(from_memory if there else fetched) for there in kept]

    def _to_check(self, indices: list[int], kept: np.ndarray[Any, Any], whole: bool, samples: int) -> list[int]:
        """Return which samples of a batch are fetched all the same: at random, by a generator of its own."""
        if whole:
            return indices if self._own.random() < _CHECKED or self._owes_check(samples) else []
        count = int(_CHECKED * kept.sum() + self._own.random()) or int(self._owes_check(samples))
        return [indices[place] for place in self._own.sample(np.flatnonzero(kept).tolist(), count)] if count else []

    def _owes_check(self, samples: int) -> bool:
        """Return whether nothing was compared for as many samples as there are in an epoch."""
        since = int(self._book.notes["served"] - self._book.notes["checked_at"])
        if since and since < samples:
            return False
        self._book.notes["checked_at"] = self._book.notes["served"]
        return True

    def _same(self, store: SampleStore, indices: list[int], fetch: Fetch) -> bool:
        """Fetch samples that are kept, and drop everything if one is another than before."""
        generation = self._book.notes["generation"]
        samples = fetch(indices)
        self._book.notes["fetched"] += len(indices)
        if self._book.usable() is None:
            return False
        self._book.notes["checks"] += len(indices)
        for index, sample in zip(indices, samples, strict=True):
            parts = store.layout.pack(sample)
            if self._book.notes["generation"] != generation or store.state[index] != KEPT:
                return False
            if parts is None or not store.holds(index, parts):
                self._book.give_up(_DIFFERS, index)
                return False
        return True

    def check(self, most: int, fetch: Fetch) -> bool:
        """Fetch up to `most` samples that are kept, compare, and return whether they are the same."""
        store = self._book.usable()
        if store is None:
            return False
        kept = np.flatnonzero(store.state == KEPT).tolist()
        chosen = self._own.sample(kept, min(most, len(kept)))
        return not chosen or self._same(store, chosen, fetch)


class SampleCache(Dataset[Any]):
    """Wrap a map-style dataset that yields the same sample for an index each time; keep what was seen to be the same.

    Attributes of the dataset are attributes of the cache. Worker processes that are forked share what is kept, across
    epochs too; a cache that is pickled, as for workers by spawn, keeps nothing there and fetches.

    Args:
        dataset: with a length and indices from 0 on. Its samples are tuples, named tuples, lists or dicts of CPU
            tensors, arrays, numbers, texts and None, all of the shapes and types of sample 0; others are fetched each
            time.
        memory: bytes that may be kept at most; default a quarter of what is available to this process, its control
            group respected. Where not all samples fit, those with the lowest indices are kept.
        folder: on a local disk, for a file without a name that holds the samples in place of memory; `memory`
            then bounds that file, default a quarter of what is free there.

    Raises:
        InvalidType: if the dataset has no length, or is iterable.
        InvalidArgument: if it is empty, if samples of its kind can't be kept, or not one fits into `memory`.
        OSError: if `folder` has no room.

    Example:
        >>> cache = SampleCache([(torch.tensor([float(i)]), i) for i in range(4)])
        >>> for epoch in range(3):
        ...     samples = cache.__getitems__([2, 0])
        >>> samples
        [(tensor([2.]), 2), (tensor([0.]), 0)]
        >>> cache.stats().kept, cache.stats().dropped
        (2, '')
    """

    accel_hides: ClassVar[frozenset[str]] = _OWN - {"dataset"}

    @renamed.arguments(directory="folder")
    def __init__(self, dataset: Any, *, memory: int | None = None, folder: str | Path | None = None) -> None:
        if isinstance(dataset, SampleCache):
            raise InvalidArgument("the dataset is a SampleCache already; wrap the dataset inside it")
        indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not indexed or isinstance(dataset, IterableDataset):
            raise InvalidType(f"a SampleCache needs a dataset with a length and indices, got {type(dataset).__name__}")
        if memory is not None and memory < 1:
            raise InvalidArgument(f"memory must be at least 1 byte, got {memory}")
        if not len(dataset):
            raise InvalidArgument("the dataset is empty: there is no sample to keep")
        self.dataset = dataset
        path = None if folder is None else Path(folder)
        bound = memory if memory is not None else _bound(path)
        self.cache_book = CacheBook(_store(dataset, bound, path))
        self.cache_keeper = SampleKeeper(self.cache_book, in_file=path is not None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)  # while it is being made, or copied
        value = getattr(self.dataset, name)
        if name != "set_epoch":
            return value

        def set_epoch(epoch: int) -> Any:  # under which it may yield other samples
            self.forget()
            return value(epoch)

        return set_epoch

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:  # one of the dataset, which may yield other samples under it
            setattr(self.dataset, name, value)
            self.forget()

    def __repr__(self) -> str:
        return f"SampleCache({self.dataset!r})"

    def __getitem__(self, index: Any) -> Any:
        """Return a sample, from memory if it is kept."""
        one_by_one = partial(_fetch_each, self.dataset)
        return self.cache_keeper.get([index], one_by_one, len(self), whole=False)[0]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """Return the samples of a batch, from memory what is kept."""
        # What `__getitems__` returns for an index may depend on the others: then it is asked for all of them or none.
        whole = getattr(self.dataset, "__getitems__", None) is not None
        samples: list[Any] = self.cache_keeper.get(indices, self.fetch, len(self), whole=whole)
        return samples

    def fetch(self, indices: list[Any]) -> Any:
        """Return samples of the dataset, whether they are kept or not."""
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if many else _fetch_each(self.dataset, indices)

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.dataset = state["dataset"]
        self.cache_book = CacheBook(None)
        self.cache_keeper = SampleKeeper(self.cache_book, in_file=False)

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may read it at once: as the dataset declares, or as is seen of it."""
        from accel.dataio.dataset.thread_safety import unsafe

        safe = declared(self.dataset, "thread_safe")
        return safe if isinstance(safe, bool) else not unsafe(self.dataset)

    def forget(self) -> None:
        """Begin anew: call this after a change of the dataset."""
        self.cache_book.forget()

    def close(self) -> None:
        """Give the memory back; from now on each sample is fetched."""
        self.cache_book.give_up("it was closed")

    def stats(self) -> CacheStats:
        """Return what has been done so far."""
        return self.cache_book.stats(len(self.dataset))

    @property
    def dropped(self) -> str:
        """Why the cache has been given up; '' if it hasn't."""
        return self.cache_book.dropped


_DIFFERS = "sample {} came out differently when it was fetched again"
_DRAWS = "fetching a sample draws random numbers"
_DRAWS_OR_OTHERS = "fetching a sample, or another thread at the same time, draws random numbers"
_NO_LIST = "its __getitems__ doesn't return a list with a sample for each index"
# Processes tell each other by number.
_REASONS = (_DIFFERS, _DRAWS, _DRAWS_OR_OTHERS, _NO_LIST, "it was closed")
_NAMES = (
    *("serves", "reason", "sample", "generation", "checked_at"),
    *("served", "fetched", "checks", "asked", "found", "stored", "full", "batches"),
)
_NOTES = np.dtype([(name, np.int64) for name in _NAMES])


def _fetch_each(dataset: Any, indices: list[Any]) -> list[Any]:
    return [sample_of(dataset, each) for each in indices]


def _has_place(store: SampleStore, places: Places) -> np.ndarray[Any, Any]:
    return (places >= 0) & (places < store.places)


def _bound(directory: Path | None) -> int:
    free = available_memory() if directory is None else shutil.disk_usage(directory).free
    return int(_SHARE * (free or 0))


def _store(dataset: Any, most_bytes: int, directory: Path | None) -> SampleStore:
    """Return memory for samples that are like the first one, which is fetched under random states of its own."""
    try:
        with states_of_their_own():
            layout = SampleLayout(dataset[0])
    except NotKept as reason:
        raise InvalidArgument(f"samples can't be kept: one holds {reason}") from None
    store = SampleStore(layout, len(dataset), most_bytes, directory)
    if not store.places:
        raise InvalidArgument(f"not one sample of {layout.size:,} bytes fits into memory={most_bytes:,} bytes")
    return store


def _places(indices: Any) -> Places | None:
    """Return the indices as an array; None if they are not a list of ints."""
    if type(indices) is not list or not all(type(index) is int for index in indices):
        return None
    try:
        return np.array(indices, np.int64)
    except OverflowError:
        return None

"""A cache of the samples of a loader that the loop iterates, kept in step with the loop's dataset.

It lies below everything that makes the loader's batches: the loader's own iterator, threads, and
worker processes that are forked from now on. The loop may change its dataset at any time. So the
dataset is compared when an epoch begins (`accel.dataio.dataset.watch`), with the files that it
names, and its surface before each batch; after a change all is begun anew, and after a few changes,
or where a change could not be seen, given up. When an epoch begins some samples are fetched and
compared, too.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

from torch.utils.data import DataLoader, default_collate

from accel.dataio.batches import one_memory
from accel.dataio.dataset.reach import attributes, is_code
from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.fetching.fetch import Fetch, keep_samples, whole_tensors
from accel.dataio.fetching.randomness import states_of_their_own
from accel.dataio.sample_cache import SampleCache
from accel.profiler.errors import InvalidArgument
from accel.profiler.interruptions import ours

# Of what a look at an epoch's beginning may take for workers: an epoch's decoding takes longer. CIFAR-10 is 154 MB.
_LOOK_SHARE = 4.0
_MOST_CHANGES = 2
# Share of the dataset's samples that must fit, and of the samples that must come again.
_LEAST = 0.05
# Of those that fit, so many must be kept before it is worth handing them out.
_WORTH = 0.5
# As often each sample may have come round before too few of them were kept.
_MOST_ROUNDS = 4
# Noting a sample may take so much of the time of its fetch. It slows two epochs down, which the budget has allowed for;
# handing a sample out with its batch takes some seventh of noting it alone, so from here on little is won.
_MOST_NOTING = 1.0
# Samples compared when an epoch begins: at most so many, and this share.
_CHECKED_FIRST, _CHECKED_SHARE = 16, 0.01
# Of what a dataset holds, so many things are looked at for paths.
_MOST_NAMED = 100_000
# So many files are looked at each time, and more for so many seconds: 2 µs each, 2 ms on storage far away.
_FILES_LEAST, _FILES_S = 256, 0.05


def not_keepable(loader: DataLoader[Any]) -> str:
    """Return '' if samples of a map-style loader could be kept, as far as is known before one is fetched."""
    if loader.num_workers > 0:
        return "the loader has workers of its own, which fetch out of the loop's sight and end with each epoch"
    if isinstance(loader.dataset, SampleCache):
        return "the dataset is a SampleCache already"
    if whole_tensors(loader.dataset) is not None:
        return "the dataset is tensors in memory"
    return ""


def _hands_out_its_own(loader: DataLoader[Any]) -> bool:
    """Return whether what the loop gets of sample 0 may be an object of the dataset's, or memory; a stack is a copy."""
    if loader.collate_fn is default_collate:
        return False
    with states_of_their_own():
        return one_memory(loader.dataset[0], loader.dataset[0])


class KeptSamples:
    """Keep samples of a loader's dataset while the loop goes on; `finding` says why that can't be done."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.finding = ""
        self._cache: SampleCache | None = None
        self._asked = self._hits = self._rounds = 0
        self._is_worth_it = False
        self._changes = 0
        self._watch: DatasetWatch | None = None
        self._files = NamedFiles(loader.dataset)
        try:
            self._cache = cache = SampleCache(loader.dataset)
            noting = cache.cache_keeper.noting_share(cache.fetch)
            own = _hands_out_its_own(loader)
        except ours(TypeError, ValueError) as error:
            self.finding = str(error)
            return
        except ours() as error:  # whatever the dataset raises: the loop may never ask for that sample
            self.finding = f"sample 0 can't be fetched: {type(error).__name__}: {error}"
            return
        if (fits := cache.cache_book.places / len(cache)) < _LEAST:
            self._drop(f"only {fits:.1%} of its samples fit into the memory that may be used")
            return
        if noting > _MOST_NOTING:
            self._drop(f"noting a sample takes {noting:.0%} of the time of its fetch: there is little to be won")
            return
        if own:
            self._drop("samples are the dataset's own objects: what the loop writes into them must stay there")
            return
        cache.cache_book.notes["serves"] = False
        self.look()
        if not self.finding:
            keep_samples(loader, cache)

    @property
    def cache(self) -> SampleCache | None:
        """What keeps them; None once it has been given up."""
        if self._cache is not None and self._cache.dropped:
            self._drop(self._cache.dropped)
        return self._cache

    # -- what the strategy asks for ------------------------------------------------------------------------------------

    @property
    def waits(self) -> str:
        """What it waits for until handing out could pay; '' if it could, or if samples can't be kept."""
        cache = self.cache
        if cache is None or self._is_worth_it:
            return ""
        asked, hits = cache.cache_book.recent_hits()
        self._asked, self._hits = self._asked + asked, self._hits + hits
        if self._asked < min(1024, len(cache) / 4):
            return self._wait_text
        share, fits = self._hits / self._asked, cache.cache_book.places / len(cache)
        self._rounds += self._asked
        self._asked = self._hits = 0
        if share < _WORTH * fits and self._rounds < _MOST_ROUNDS * len(cache):
            return self._wait_text
        self._is_worth_it = share >= _LEAST
        if not self._is_worth_it:
            self._drop(f"only {share:.1%} of the samples that are asked for had come before with the same bits")
        return ""

    @property
    def _wait_text(self) -> str:
        return "it waits until most samples have come twice, with the same bits"

    def serve(self) -> None:
        """Hand out what is kept from the next batch on; raises InvalidArgument if samples are found to differ."""
        cache = self.cache
        if cache is None:
            raise InvalidArgument(self.finding)
        if self._watch is None or self._watch.changed():
            self.look()
        if not cache.stats().served and not self._check(cache):
            raise InvalidArgument(self.finding or "the dataset has changed")
        cache.cache_book.notes["serves"] = True

    def _check(self, cache: SampleCache) -> bool:
        """Compare some samples, and return whether nothing speaks against handing out what is kept."""
        most = max(1, min(_CHECKED_FIRST, int(_CHECKED_SHARE * len(cache))))
        try:
            return cache.cache_keeper.check(most, cache.fetch) and self.cache is not None
        except ours() as error:  # it is for the loop to come upon, if it asks for that sample
            self._drop(f"a sample can't be fetched again: {type(error).__name__}: {error}")
            return False

    def record(self) -> None:
        """Hand out nothing, and go on to keep what comes out the same."""
        if (cache := self.cache) is not None:
            cache.cache_book.notes["serves"] = False

    def close(self) -> None:
        self._drop("it was closed")

    def _drop(self, reason: str) -> None:
        if self._cache is None:
            return
        cache, self._cache, self.finding = self._cache, None, reason
        cache.close()
        keep_samples(self.loader, None)

    # -- called by the loader's proxy ----------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Compare the dataset with what it was when the last epoch began, and some samples with what is kept."""
        if self.cache is not None:
            self.look()
        if (cache := self.cache) is not None and cache.cache_book.serves:
            self._check(cache)

    def before_batch(self, rest: Any) -> None:
        """Have the loader's own iterator `rest` ask the cache, and see whether the loop has changed the dataset."""
        if (cache := self.cache) is None:
            return
        fetcher = getattr(rest, "_dataset_fetcher", None)
        if fetcher is not None and fetcher.dataset is self.loader.dataset:
            fetcher.dataset = cache
        if self._watch is not None and self._watch.changed():
            self.look()

    def look(self) -> None:
        """Look whether the dataset has changed; after a change begin anew, after a few give up."""
        cache = self._cache
        if cache is None:
            return
        # What stacks its samples at once copies them; another collate function may hold on to one.
        cache.cache_keeper.share_memory = self.loader.collate_fn is default_collate
        is_other = self._files.changed()
        if self._watch is None or self._watch.changed(thoroughly=True):
            is_other = is_other or self._watch is not None
            self._watch = DatasetWatch(Fetch(self.loader.dataset, list, batched=True), share=_LOOK_SHARE)
        if self._watch.unseen_at_all:
            self._drop("the dataset holds what can't be looked into for a change in place")
        elif is_other:
            self._changes += 1
            self._files = NamedFiles(self.loader.dataset)
            cache.forget()
            if self._changes > _MOST_CHANGES:
                self._drop("the dataset, or a file that it names, keeps changing")


class NamedFiles:
    """The files whose paths a dataset holds, in attributes or in lists, tuples and dicts.

    They are looked at in turn, as many at a time as take a moment. A name that is put together while
    a sample is fetched is not seen here. A folder doesn't count: a loop may save its results there.

    Example:
        >>> NamedFiles({"index": "samples.txt"}).changed()
        False
    """

    def __init__(self, dataset: Any) -> None:
        self._paths = deque(dict.fromkeys(_paths(dataset)))
        self._written: dict[str, tuple[int, ...] | None] = {}
        self.changed()

    def changed(self) -> bool:
        """Return whether one of the files whose turn it is was written or removed since its last look."""
        until, changed = time.perf_counter() + _FILES_S, False
        for count in range(len(self._paths)):
            if count >= _FILES_LEAST and time.perf_counter() > until:
                break
            path = self._paths.popleft()
            before, now = self._written.get(path), _written(path)
            changed = changed or (before is not None and now != before)
            if before or now:  # what is no file is not asked about again
                self._paths.append(path)
                self._written[path] = now
        return changed


def _written(path: str) -> tuple[int, ...] | None:
    """Return when a file was written, its size, and which one it is; None if there is none."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):  # no file, or a text that can't be the name of one
        return None
    return (state.st_mtime_ns, state.st_size, state.st_ino) if stat.S_ISREG(state.st_mode) else None


def _paths(dataset: Any) -> Iterator[str]:
    waiting, seen, left = deque([dataset]), set[int](), _MOST_NAMED
    while waiting and left:
        thing, left = waiting.popleft(), left - 1
        if isinstance(thing, str | PurePath):
            path = os.fspath(thing)
            if os.sep in path or "." in path:
                yield path
        elif isinstance(thing, int | float | bytes | None) or is_code(thing):
            continue
        elif id(thing) not in seen:
            seen.add(id(thing))
            waiting.extend(_parts(thing))


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):
        return [*thing, *thing.values()][:_MOST_NAMED]
    if isinstance(thing, list | tuple):
        return thing[:_MOST_NAMED]
    return [value for _, value in attributes(thing)]

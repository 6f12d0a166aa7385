"""Worker processes that fetch the batches of a running epoch, and of the next one before it is asked for.

The plain iterator of a `DataLoader` without workers draws index lists from its sampler one at a time. Here worker
processes are fed from that very iterator, so that the sample order is the plain loader's by construction, and the loop
can change over in the middle of an epoch without losing or doubling a sample.

At the end of an epoch the workers go on with the next epoch's indices, drawn under a *copy* of the random state. When
the loop does start the next epoch, the copy is compared with the real state: if they are equal, the prefetched batches
are exactly what the plain loader would have made, and the real state is advanced as it would have been. If not (the
model draws random numbers, say), they are thrown away and not tried again.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.witness import object_state


@dataclass
class Ahead:
    """The next epoch's index lists, drawn ahead, with what must still hold when it begins."""

    before: Any
    after: Any
    indices: Iterator[Any]
    epoch: int | None


class _Feed:
    """The index lists for the workers: the running epoch's, then what was drawn ahead of the next one."""

    def __init__(self, owner: ContinuousWorkers) -> None:
        # Weak, so that the pool is freed, and its processes ended, with the last reference to it. Left to the cycle
        # collector, torch's queues go first, the processes hear nothing, and each costs a 5 s time-out.
        self._owner = weakref.proxy(owner)
        self.stream: Iterator[Any] = iter(())
        self.open = False

    def _closed(self) -> bool:
        return not self.open

    def __iter__(self) -> Iterator[Any]:
        while self.open:
            for index in self.stream:
                self._owner.note_fed(index)
                yield index
                if self._closed():
                    return
            following = self._owner.look_ahead()
            if following is None:
                return
            self.stream = following


class ContinuousWorkers:
    """Fetch batches in worker processes from an index stream that may outlive the epoch.

    Args:
        loader: the user's loader, map-style, without workers of its own; its dataset, collate function, worker
            initialisation and process context are used as they are.
        workers: number of processes, at least 1.
        prefetch: batches each worker may be ahead, default 2.

    Raises:
        ValueError: if `workers` is less than 1.
    """

    def __init__(self, loader: DataLoader[Any], workers: int, prefetch: int = 2) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.loader = loader
        self.lookahead = workers * prefetch
        self._feed = _Feed(self)
        self._state = object_state(loader.dataset)
        self._inner: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self._feed,
            num_workers=workers,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=prefetch,
            persistent_workers=True,
            pin_memory=False,
            # A generator of its own: the workers' base seed must not be drawn from the loop's random state. Their seeds
            # don't matter, since only fetches that draw nothing are moved here.
            generator=torch.Generator().manual_seed(0),
        )
        self._batches: Iterator[Any] | None = None
        self._end_of_epoch: int | None = None
        self._ahead: Ahead | None = None
        self._fed = self._served = 0
        self._under_way: deque[Any] = deque()
        self._may_look_ahead = True
        self.failed_guesses = 0

    # -- one epoch ---------------------------------------------------------------------------------------------------

    def take(self, stream: Iterator[Any], *, ahead: bool = True) -> None:
        """Begin to feed the workers from `stream`, the index lists that are still to come in the running epoch.

        Args:
            stream: the index lists; drawn from at most `lookahead` batches early.
            ahead: go on with the next epoch at its end, if that can be foreseen.
        """
        self._refresh()
        self._ahead, self._end_of_epoch = None, None
        self._fed = self._served = 0
        self._under_way.clear()
        self._may_look_ahead = ahead and self.failed_guesses == 0
        self._feed.stream, self._feed.open = stream, True
        self._batches = iter(self._inner)

    def fetch(self) -> Any:
        """Return the next batch of the running epoch; raises StopIteration at its end or when drained."""
        if self._batches is None or self._served == self._end_of_epoch:
            raise StopIteration
        batch = next(self._batches)
        self._served += 1
        self._under_way.popleft()
        return batch

    @property
    def feeding(self) -> bool:
        """True until `close_feed`."""
        return self._feed.open

    def close_feed(self) -> None:
        """Draw no more indices: `fetch` then returns what is under way in this epoch and ends."""
        self._feed.open = False
        self._ahead = None

    def left(self) -> Iterator[Any]:
        """Return the index lists of this epoch that have not been served: those under way, then the rest.

        For going on without the workers, after a failure or when they are drained.
        """
        self.close_feed()
        if self._end_of_epoch is not None:
            return iter(list(self._under_way)[: self._end_of_epoch - self._served])
        return itertools.chain(list(self._under_way), self._feed.stream)

    def note_fed(self, index: Any) -> None:
        """Take note of an index list that goes to a worker."""
        self._fed += 1
        self._under_way.append(index)

    # -- the epoch after ---------------------------------------------------------------------------------------------

    def look_ahead(self) -> Iterator[Any] | None:
        """Return the next epoch's index lists when this one's have all been given out, or None to stop there."""
        if self._end_of_epoch is not None:
            return None  # one epoch ahead is enough: the look-ahead is bounded in batches
        self._end_of_epoch = self._fed
        if self._may_look_ahead:
            self._ahead = draw_ahead(self.loader)
        return None if self._ahead is None else self._ahead.indices

    def resume(self) -> bool:
        """Go on with the epoch drawn ahead, if it is what the loader would draw now; tell whether it is.

        On success the random states are advanced exactly as starting the plain loader's epoch would have.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or self._batches is None or self._served != self._end_of_epoch:
            return False  # nothing drawn ahead, or the loop left the epoch before its last batch
        if not still_holds(self.loader, ahead) or self._stale():
            # The loop draws random numbers between the two in a way that can't be foreseen: don't waste work again.
            self.failed_guesses += 1
            return False
        restore(self.loader, ahead.after)
        self._fed -= self._end_of_epoch
        self._served, self._end_of_epoch = 0, None
        return True

    # -- life --------------------------------------------------------------------------------------------------------

    def _stale(self) -> bool:
        return object_state(self.loader.dataset) != self._state

    def _refresh(self) -> None:
        """Start the workers anew if the loop has changed the dataset: their copies would not know."""
        if self._stale():
            self.shutdown()
            self._state = object_state(self.loader.dataset)

    def __del__(self) -> None:
        if hasattr(self, "_inner"):
            self.shutdown()

    def shutdown(self) -> None:
        """End the worker processes; the next `take` starts new ones."""
        self._feed.open = False
        self._ahead = None
        iterator, self._inner._iterator, self._batches = self._inner._iterator, None, None
        if iterator is not None:
            with contextlib.suppress(AttributeError):
                iterator._shutdown_workers()  # type: ignore[attr-defined]


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    sampler = loader.sampler
    own = [loader.generator, getattr(sampler, "generator", None)]
    found: list[torch.Generator] = []
    for generator in own:
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


def _capture(loader: DataLoader[Any]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(generator.get_state() for generator in _generators(loader))]


def restore(loader: DataLoader[Any], state: list[torch.Tensor]) -> None:
    """Put the random states back that a loader draws from."""
    torch.set_rng_state(state[0])
    for generator, saved in zip(_generators(loader), state[1:], strict=True):
        generator.set_state(saved)


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def foreseeable(loader: DataLoader[Any]) -> bool:
    """Tell whether the loader's next epoch can be drawn ahead: known samplers that draw everything when they begin."""
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in (SequentialSampler, DistributedSampler)


def draw_ahead(loader: DataLoader[Any]) -> Ahead | None:
    """Draw the next epoch's index lists under a copy of the random state, as starting the loader would draw them."""
    if not foreseeable(loader):
        return None
    before = _capture(loader)
    epoch = getattr(loader.sampler, "epoch", None)
    try:
        # The order in which a DataLoader draws: the workers' base seed first, then the sampler at its first index.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        if epoch is not None:
            loader.sampler.epoch = epoch + 1  # type: ignore[attr-defined]
        stream = iter(loader.batch_sampler)  # type: ignore[arg-type]
        first = next(stream, None)
        after = _capture(loader)
    finally:
        restore(loader, before)
        if epoch is not None:
            loader.sampler.epoch = epoch  # type: ignore[attr-defined]
    if first is None:
        return None
    return Ahead(before, after, _chain(first, stream), None if epoch is None else epoch + 1)


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def still_holds(loader: DataLoader[Any], ahead: Ahead) -> bool:
    """Tell whether starting the loader now would draw what `ahead` holds."""
    if ahead.epoch is not None and getattr(loader.sampler, "epoch", None) != ahead.epoch:
        return False
    return _same(_capture(loader), ahead.before)

"""Worker processes that fetch the batches of a running epoch, and of the next one before it is asked for.

The plain iterator of a `DataLoader` without workers draws index lists from its sampler one at a time. Here worker
processes are fed from that very iterator, so that the sample order is the plain loader's by construction, and the loop can change over in the middle of an epoch without losing or doubling a sample.

At the end of an epoch the workers go on with the next epoch's indices, drawn under a *copy* of the random state. When
the loop does start the next epoch, the copy is compared with the real state: if they are equal, the prefetched batches
are exactly what the plain loader would have made, and the real state is advanced as it would have been. If not (the
model draws random numbers, say), they are thrown away and not tried again.
"""

from __future__ import annotations

import contextlib
import itertools
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
    """The index lists for the workers: the current stream, then what was drawn ahead."""

    def __init__(self) -> None:
        self.stream: Iterator[Any] | None = None
        self.on_end: Any = None
        self.open = False

    def __iter__(self) -> Iterator[Any]:
        while self.open:
            index = next(self.stream, None) if self.stream is not None else None
            if index is None:
                self.stream = self.on_end() if self.on_end is not None else None
                if self.stream is None:
                    return
                continue
            yield index


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
        self._feed = _Feed()
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

    def take(self, stream: Iterator[Any]) -> None:
        """Begin to feed the workers from `stream`, the index lists that are still to come in the running epoch."""
        self._ahead = None
        self._start(_Counted(stream, self))

    def _start(self, stream: Iterator[Any]) -> None:
        self._refresh()
        self._fed = self._served = 0
        self._under_way.clear()
        self._end_of_epoch = None
        self._feed.stream, self._feed.open, self._feed.on_end = stream, True, self._look_ahead
        self._batches = iter(self._inner)

    def fetch(self) -> Any:
        """Return the next batch of the running epoch; raises StopIteration at its end or when drained."""
        if self._batches is None or self._served == self._end_of_epoch:
            raise StopIteration
        batch = next(self._batches)
        self._served += 1
        self._under_way.popleft()
        return batch

    def left(self) -> Iterator[Any]:
        """Return the index lists of this epoch that have not been served: those under way, then the rest of the stream.

        For going on without the workers, after `close_feed` or a failure.
        """
        if self._end_of_epoch is not None:
            return iter(list(self._under_way)[: self._end_of_epoch - self._served])
        return itertools.chain(list(self._under_way), self._feed.stream or ())

    def close_feed(self) -> None:
        """Draw no more indices: `fetch` then returns what is under way and ends."""
        self._feed.open = False
        self._ahead = None

    # -- the epoch after ---------------------------------------------------------------------------------------------

    def _look_ahead(self) -> Iterator[Any] | None:
        if self._end_of_epoch is not None:
            return None  # one epoch ahead is enough: the look-ahead is bounded in batches
        self._end_of_epoch = self._fed
        if not self._may_look_ahead:
            return None
        self._ahead = draw_ahead(self.loader)
        return None if self._ahead is None else _Counted(self._ahead.indices, self)

    def resume(self) -> bool:
        """Go on with the epoch drawn ahead, if it is what the loader would draw now; tell whether it is.

        On success the random states are advanced exactly as starting the plain loader's epoch would have.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or self._batches is None or self._served != self._end_of_epoch:
            return False  # nothing drawn ahead, or the loop left the epoch before its last batch
        if not still_holds(self.loader, ahead) or self._stale():
            self.failed_guesses += 1
            # The loop draws random numbers between epochs in a way that can't be foreseen: don't waste work again.
            self._may_look_ahead = False
            return False
        _restore(self.loader, ahead.after)
        assert self._end_of_epoch is not None
        self._fed -= self._end_of_epoch
        self._served = 0
        self._end_of_epoch = None
        if self._feed.stream is None:  # the whole of the next epoch was fed already: it was shorter than the look-ahead
            self._end_of_epoch = self._fed
        return True

    # -- life --------------------------------------------------------------------------------------------------------

    def _stale(self) -> bool:
        return object_state(self.loader.dataset) != self._state

    def _refresh(self) -> None:
        """Start the workers anew if the loop has changed the dataset: their copies would not know."""
        if self._stale():
            self.shutdown()
            self._state = object_state(self.loader.dataset)

    def shutdown(self) -> None:
        """End the worker processes."""
        self._feed.open = False
        self._ahead = None
        iterator, self._inner._iterator, self._batches = self._inner._iterator, None, None
        if iterator is not None:
            with contextlib.suppress(AttributeError):
                iterator._shutdown_workers()  # type: ignore[attr-defined]


class _Counted:
    """An iterator of index lists that counts what it gives to the workers."""

    def __init__(self, stream: Iterator[Any], owner: ContinuousWorkers) -> None:
        self._stream = stream
        self._owner = owner

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index = next(self._stream)
        self._owner._fed += 1
        self._owner._under_way.append(index)
        return index


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


def _restore(loader: DataLoader[Any], state: list[torch.Tensor]) -> None:
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
        _restore(loader, before)
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

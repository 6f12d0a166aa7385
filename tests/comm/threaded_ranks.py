"""Ranks as threads of one process: gloo's sends, receives and all-reduces over queues, so that many worlds fit a test.

What runs over it is the code that runs over gloo: channels, stages, compressors and their memory. Sizes that differ
between a sender and its receiver are an error, which gloo makes a broken connection of.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accel.comm.ranks.channel import GlooChannel

_PATIENCE_S = 120.0


class Broken(RuntimeError):
    """Another rank has raised an error."""


class World:
    """What the ranks share.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._queues: dict[Any, queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()
        self._failed = threading.Event()

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Return what `function(rank)` returned on each rank; raise what the first one raised."""
        found: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                with torch.no_grad():
                    found[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self._failed.set()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE_S)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "ranks still wait for each other"
        return found

    def channel(self, name: str, ranks: Sequence[int], rank: int) -> GlooChannel:
        """Return a rank's end of a channel; the name tells it from others between the same ranks."""
        found = GlooChannel.__new__(GlooChannel)
        found.ranks, found.rank, found.size = tuple(ranks), ranks.index(rank), len(ranks)
        found._group = _Group((self, name, found.ranks), found.rank, found.size) if found.size > 1 else None
        return found

    def put(self, key: Any, values: Tensor) -> None:
        """Leave values for the rank that takes them."""
        with self._lock:
            place = self._queues[key]
        place.put(values)

    def take(self, key: Any) -> Tensor:
        """Wait for values."""
        with self._lock:
            place = self._queues[key]
        while True:
            try:
                return place.get(timeout=0.05)
            except queue.Empty:
                if self._failed.is_set():
                    raise Broken("another rank has raised an error") from None


class _Work:
    def __init__(self, end: Callable[[], None] = lambda: None) -> None:
        self.wait = end


class _Group:
    def __init__(self, place: tuple[World, str, tuple[int, ...]], rank: int, size: int) -> None:
        (self._world, *self._name), self._rank, self._size = place, rank, size

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        self._world.put((*self._name, self._rank, to), tensors[0].clone())
        return _Work()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        def end() -> None:
            came = self._world.take((*self._name, source, self._rank))
            assert (came.dtype, came.shape) == (tensors[0].dtype, tensors[0].shape), (came.shape, tensors[0].shape)
            tensors[0].copy_(came)

        return _Work(end)

    def allreduce(self, tensors: list[Tensor]) -> _Work:
        (values,) = tensors
        for to in range(self._size):
            self._world.put((*self._name, "sum", self._rank, to), values.clone())
        parts = [self._world.take((*self._name, "sum", source, self._rank)) for source in range(self._size)]
        values.copy_(torch.stack(parts).sum(0))
        return _Work()

    def broadcast(self, tensors: list[Tensor]) -> _Work:
        for to in range(1, self._size) if self._rank == 0 else ():
            self._world.put((*self._name, "first", to), tensors[0].clone())
        if self._rank:
            tensors[0].copy_(self._world.take((*self._name, "first", self._rank)))
        return _Work()

    def allgather(self, outs: list[list[Tensor]], owns: list[Tensor]) -> _Work:
        for to in range(self._size):
            self._world.put((*self._name, "all", self._rank, to), owns[0].clone())
        for source, out in enumerate(outs[0]):
            out.copy_(self._world.take((*self._name, "all", source, self._rank)))
        return _Work()

    def abort(self) -> None:
        """Nothing is under way."""


def together(size: int, work: Callable[[GlooChannel], Any]) -> list[Any]:
    """Return what `work(channel)` returned on each rank, over one channel of all."""
    world = World(size)
    return world.run(lambda rank: work(world.channel("together", range(size), rank)))

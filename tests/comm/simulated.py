"""A world of many ranks in one process: what each sends is counted, and, with threads, arrives."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_PATIENCE_S = 120.0
"""Until a message counts as lost. On a busy machine one has taken more than ten."""


class Counting:
    """A channel of one rank among `size` that only counts."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.messages = 0
        self.bytes = 0
        self.peers: set[int] = set()

    def _sent(self, to: int, what: Tensor) -> None:
        if to != self.rank and what.numel():
            self.messages += 1
            self.bytes += what.nbytes
            self.peers.add(to)

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        for to, what in enumerate(sends):
            self._sent(to, what)
        for one in receives:
            one.zero_()

    def swap(self, peer: int, send: Tensor, receive: Tensor) -> None:
        self._sent(peer, send)
        receive.zero_()


class Mailed(Counting):
    """A channel whose messages arrive at the other threads."""

    def __init__(self, rank: int, boxes: list[list[queue.SimpleQueue[Tensor]]]) -> None:
        super().__init__(rank, len(boxes))
        self._boxes = boxes

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        others = [r for r in range(self.size) if r != self.rank]
        for to in others:
            self._send(to, sends[to])
        for source in others:
            self._receive(source, receives[source])

    def swap(self, peer: int, send: Tensor, receive: Tensor) -> None:
        self._send(peer, send)
        self._receive(peer, receive)

    def all_reduce(self, values: Tensor) -> None:
        parts = [torch.empty_like(values) for _ in range(self.size)]
        self.gather_equal(values.clone(), parts)
        values.copy_(torch.stack(parts).sum(0))

    def broadcast(self, values: Tensor) -> None:
        if self.rank:
            self._receive(0, values)
        else:
            for to in range(1, self.size):
                self._send(to, values)

    def gather_equal(self, own: Tensor, out: Sequence[Tensor]) -> None:
        self.exchange([own] * self.size, out)
        out[self.rank].copy_(own)

    def _send(self, to: int, what: Tensor) -> None:
        self._sent(to, what)
        if what.numel():
            self._boxes[self.rank][to].put(what.clone())

    def _receive(self, source: int, room: Tensor) -> None:
        if room.numel():
            room.copy_(self._boxes[source][self.rank].get(timeout=_PATIENCE_S))


def together(size: int, work: Callable[[Mailed], Any]) -> list[Any]:
    """Return what `work(channel)` returned on each rank."""
    boxes: list[list[queue.SimpleQueue[Tensor]]] = [[queue.SimpleQueue() for _ in range(size)] for _ in range(size)]
    found: list[Any] = [None] * size

    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                found[rank] = work(Mailed(rank, boxes))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(2 * _PATIENCE_S)
    if failed:
        raise failed[0]
    return found


class CountingStore:
    """A store of `torch.distributed` that counts what each rank does with it; `world` is shared by its ranks."""

    def __init__(self, world: dict[str, bytes], counts: Counter[int], rank: int) -> None:
        self.world, self.counts, self.rank = world, counts, rank
        self.bytes = 0

    def _count(self, operations: int = 1) -> None:
        self.counts[self.rank] += operations

    def set(self, key: str, value: bytes | str) -> None:
        self._count()
        self.world[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self._count()
        self.bytes += len(self.world[key])
        return self.world[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._count(len(keys))
        return [self.world[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        self._count()
        return all(key in self.world for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._count()
        total = int(self.world.get(key, b"0")) + amount
        self.world[key] = str(total).encode()
        return total

    def delete_key(self, key: str) -> bool:
        self._count()
        return self.world.pop(key, None) is not None

    def has_extended_api(self) -> bool:
        return True

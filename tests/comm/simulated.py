"""A world of many ranks in one process: what each sends, and asks of a store, is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor


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

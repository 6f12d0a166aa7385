"""What ranks tell each other between two steps: small objects, over a group of their own.

Objects go up a tree to rank 0, and its answer down again: rank r's parent is r without its lowest bit, so each rank
speaks to log2 n others at most, and n objects pass rank 0 alone.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from accel.comm.engine.channel import ConnectionBroken
from accel.comm.engine.post_mortem import CommError

T = TypeVar("T")
A = TypeVar("A")


class TalkChannel(Protocol):
    """What it needs of a channel: see `accel.comm.engine.channel.GlooChannel`."""

    rank: int
    size: int

    def swap(self, peer: int, send: Tensor, receive: Tensor) -> None:
        """Send to one rank and receive from it; an empty tensor is no message."""

    def close(self) -> None:
        """Free the group."""


class Talk:
    """Exchange objects over a channel; every rank calls the same methods in the same order.

    All raise `accel.comm.engine.post_mortem.CommError` if a rank has gone, or does not come in time.
    """

    def __init__(self, channel: TalkChannel) -> None:
        self._channel = channel
        self.rank, self.size = channel.rank, channel.size
        lowest = self.rank & -self.rank if self.rank else 1 << (self.size - 1).bit_length()
        self._parent = self.rank - lowest
        self._children = [
            self.rank + (1 << k) for k in range(lowest.bit_length() - 1) if self.rank + (1 << k) < self.size
        ]

    def collect(self, mine: T) -> list[T]:
        """Return on rank 0 what each rank passed, by rank; an empty list on the others."""
        with self._told():
            found = {self.rank: pickle.dumps(mine)}
            for child in self._children:
                found.update(pickle.loads(self._receive(child)))
            if self.rank:
                self._send(self._parent, pickle.dumps(found))
                return []
        return [pickle.loads(found[rank]) for rank in range(self.size)]

    def first(self, mine: T | None) -> T:
        """Return what rank 0 passed."""
        with self._told():
            data = self._receive(self._parent) if self.rank else pickle.dumps(mine)
            for child in reversed(self._children):  # the deepest branch first
                self._send(child, data)
        told: T = pickle.loads(data)
        return told

    def decide(self, mine: T, decision: Callable[[list[T]], A]) -> A:
        """Return on every rank what rank 0 makes of what each rank passed, by rank; raise everywhere what it raises."""
        told = self.collect(mine)
        answer: A
        answer, error = self.first(_outcome(decision, told) if self.rank == 0 else None)
        if error is not None:
            raise error
        return answer

    def gather(self, mine: T) -> list[T]:
        """Return on every rank what each passed, by rank; as much for each as there are ranks."""
        return self.decide(mine, list)

    def _send(self, peer: int, data: bytes) -> None:
        nothing = torch.empty(0, dtype=torch.uint8)
        self._channel.swap(peer, torch.tensor([len(data)]), nothing)
        self._channel.swap(peer, torch.frombuffer(bytearray(data), dtype=torch.uint8), nothing)

    def _receive(self, peer: int) -> bytes:
        length, nothing = torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        self._channel.swap(peer, nothing, length)
        data = torch.zeros(int(length), dtype=torch.uint8)
        self._channel.swap(peer, nothing, data)
        return data.numpy().tobytes()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except ConnectionBroken as error:
            raise CommError(
                f"rank {self.rank} could not agree with the others on how gradients go: {error}; every rank must take "
                "as many steps, and none may have ended"
            ) from error

    def close(self) -> None:
        """Free the group."""
        self._channel.close()


def _outcome(decision: Callable[[list[T]], A], told: list[T]) -> tuple[Any, Exception | None]:
    try:
        return decision(told), None
    except ValueError as error:
        return None, ValueError(str(error))
    except Exception as error:
        return None, CommError(f"rank 0 failed to decide for all: {type(error).__name__}: {error}")

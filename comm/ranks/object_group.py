"""Small objects that ranks exchange between two steps, over a process group of their own.

Objects go up a tree to rank 0, and its answer down again: rank r's parent is r without its lowest bit, so each rank
exchanges with log2 n others at most, and n objects pass rank 0 alone. Where every rank needs the result,
few ranks use one collective.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from accel.comm.ranks.channel import ConnectionBroken
from accel.comm.ranks.post_mortem import CommError
from accel.profiler.interruptions import ours

T = TypeVar("T")
A = TypeVar("A")

_LENGTH_BYTES, _FRAME_BYTES = 8, 1024
"""Of the first message and of the length that it begins with: on a slow network each message costs its latency."""
_FEW = 8
"""Ranks up to which one collective serves all: two swap 1 KB in 0.3 ms; up and down the tree it takes 4."""


class ObjectChannel(Protocol):
    """What it needs of a channel: see `accel.comm.ranks.channel.GlooChannel`."""

    rank: int
    size: int

    def swap(self, peer: int, send: Tensor, receive: Tensor) -> None:
        """Send to one rank and receive from it; an empty tensor is no message."""

    def gather_small(self, own: Tensor, out: Sequence[Tensor]) -> None:
        """Fill `out[r]` with what rank r passed as `own`, of one size on all."""

    def close(self) -> None:
        """Free the group."""


class ObjectGroup:
    """Exchange objects over a channel; every rank calls the same methods in the same order.

    Args:
        channel: of these objects alone; its timeout is how long a rank is waited for.
        lost: makes the error for a rank that has gone or did not come in time, by default an
            `accel.comm.ranks.post_mortem.CommError`.
    """

    def __init__(self, channel: ObjectChannel, lost: Callable[[ConnectionBroken], Exception] | None = None) -> None:
        self._channel, self._lost = channel, lost or self._disagreed
        self.rank, self.size = channel.rank, channel.size
        lowest = self.rank & -self.rank if self.rank else 1 << (self.size - 1).bit_length()
        self._parent = self.rank - lowest
        self._children = [
            self.rank + (1 << k) for k in range(lowest.bit_length() - 1) if self.rank + (1 << k) < self.size
        ]

    def collect(self, own: T) -> list[T]:
        """Return on rank 0 what each rank passed, by rank; an empty list on the others."""
        with self._connected():
            objects = {self.rank: pickle.dumps(own)}
            for child in self._children:
                objects.update(pickle.loads(self._receive(child)))
            if self.rank:
                self._send(self._parent, pickle.dumps(objects))
                return []
        return [pickle.loads(objects[rank]) for rank in range(self.size)]

    def first(self, own: T | None) -> T:
        """Return what rank 0 passed."""
        with self._connected():
            data = self._receive(self._parent) if self.rank else pickle.dumps(own)
            for child in reversed(self._children):  # the deepest branch first
                self._send(child, data)
        received: T = pickle.loads(data)
        return received

    def decide(self, own: T, decision: Callable[[list[T]], A]) -> A:
        """Return on every rank what rank 0 makes of what each rank passed, by rank; raise everywhere what it raises."""
        objects = self.collect(own)
        answer: A
        answer, error = self.first(_outcome(decision, objects) if self.rank == 0 else None)
        if error is not None:
            raise error
        return answer

    def gather(self, own: T) -> list[T]:
        """Return on every rank what each passed, by rank; as much for each as there are ranks."""
        if self.size > _FEW:
            return self.decide(own, list)
        with self._connected():
            frame, rest = _parts(pickle.dumps(own))
            frames = self._shared(frame)
            longest = _bytes(max(map(_beyond, frames)))
            longest[: len(rest)] = rest
            rests = self._shared(longest) if len(longest) else [longest] * self.size
        return [pickle.loads(_data(*message)) for message in zip(frames, rests, strict=True)]

    def _shared(self, own: Tensor) -> list[Tensor]:
        out = [torch.empty_like(own) for _ in range(self.size)]
        self._channel.gather_small(own, out)
        return out

    def _send(self, peer: int, data: bytes) -> None:
        for part in _parts(data):
            self._channel.swap(peer, part, _bytes(0))

    def _receive(self, peer: int) -> bytes:
        frame = _bytes(_FRAME_BYTES)
        self._channel.swap(peer, _bytes(0), frame)
        rest = _bytes(_beyond(frame))
        self._channel.swap(peer, _bytes(0), rest)
        return _data(frame, rest)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except ConnectionBroken as error:
            raise self._lost(error) from error

    def _disagreed(self, error: ConnectionBroken) -> CommError:
        return CommError(
            f"rank {self.rank} could not agree with the others on how gradients go: {error}; every rank must take "
            "as many steps, and none may have ended"
        )

    def close(self) -> None:
        """Free the group."""
        self._channel.close()


def _bytes(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def _parts(data: bytes) -> tuple[Tensor, Tensor]:
    """Return a message's frame, which begins with the length, and the bytes that it has no room for."""
    values, room = torch.frombuffer(bytearray(data), dtype=torch.uint8), _FRAME_BYTES - _LENGTH_BYTES
    frame = _bytes(_FRAME_BYTES)
    frame[:_LENGTH_BYTES] = torch.tensor([len(data)]).view(torch.uint8)
    frame[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = values[:room]
    return frame, values[room:]


def _length(frame: Tensor) -> int:
    return int(frame[:_LENGTH_BYTES].view(torch.int64))


def _beyond(frame: Tensor) -> int:
    """Return the bytes that follow a frame."""
    return max(_LENGTH_BYTES + _length(frame) - _FRAME_BYTES, 0)


def _data(frame: Tensor, rest: Tensor) -> bytes:
    return torch.cat((frame[_LENGTH_BYTES:], rest))[: _length(frame)].numpy().tobytes()


def _outcome(decision: Callable[[list[T]], A], objects: list[T]) -> tuple[Any, Exception | None]:
    try:
        return decision(objects), None
    except ValueError as error:
        return None, ValueError(str(error))
    except ours() as error:
        return None, CommError(f"rank 0 failed to decide for all: {type(error).__name__}: {error}")

"""Small objects that ranks exchange between two steps, over a process group of their own.

As torch.distributed's own object collectives do it; those take registered groups alone, which all ranks of the world
must take part in making. Each rank sends as much as there are ranks.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from accel.comm.ranks.channel import ConnectionBroken, GlooChannel
from accel.comm.ranks.failure import CommError
from accel.profiler.errors import InvalidArgument
from accel.profiler.interruptions import ours

T = TypeVar("T")
A = TypeVar("A")


class ObjectGroup:
    """Exchange objects over a channel; every rank calls the same methods in the same order.

    Args:
        channel: of these objects alone; its timeout is how long a rank is waited for.
        lost: makes the error for a rank that has gone or did not come in time, by default a
            `accel.CommError`.
    """

    def __init__(self, channel: GlooChannel, lost: Callable[[ConnectionBroken], Exception] | None = None) -> None:
        self._channel, self._lost = channel, lost or self._diverged
        self.rank, self.size = channel.rank, channel.size

    def gather(self, own: T) -> list[T]:
        """Return on every rank what each passed, by rank."""
        data = _bytes_of(own)
        with self._connected():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self._channel.gather_equal(torch.tensor([len(data)]), sizes)
            longest = max(int(size) for size in sizes)
            rows = list(torch.zeros(self.size, longest, dtype=torch.uint8))
            self._channel.gather_equal(torch.cat((data, data.new_zeros(longest - len(data)))), rows)
        return [_object_of(row[: int(size)]) for row, size in zip(rows, sizes, strict=True)]

    def all_true(self, own: bool) -> bool:
        """Return on every rank whether all passed True: one all-reduce, for every step."""
        count = torch.tensor([float(own)])
        with self._connected():
            self._channel.all_reduce(count)
        return int(count) == self.size

    def first(self, own: T | None) -> T:
        """Return what rank 0 passed."""
        data = _bytes_of(own if self.rank == 0 else None)
        with self._connected():
            size = torch.tensor([len(data)])
            self._channel.broadcast(size)
            data = data if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            self._channel.broadcast(data)
        received: T = _object_of(data)
        return received

    def decide(self, own: T, decision: Callable[[list[T]], A]) -> A:
        """Return on every rank what rank 0 makes of what each rank passed, by rank; raise everywhere what it raises."""
        objects = self.gather(own)
        answer: A
        answer, error = self.first(_outcome(decision, objects) if self.rank == 0 else None)
        if error is not None:
            raise error
        return answer

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except ConnectionBroken as error:
            raise self._lost(error) from error

    def _diverged(self, error: ConnectionBroken) -> CommError:
        return CommError(
            f"rank {self.rank} could not agree with the others on how gradients go: {error}; every rank must take "
            "as many steps, and none may have ended"
        )

    def close(self) -> None:
        """Free the group."""
        self._channel.close()


def _bytes_of(own: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)


def _object_of(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _outcome(decision: Callable[[list[T]], A], objects: list[T]) -> tuple[Any, Exception | None]:
    try:
        return decision(objects), None
    except ValueError as error:
        return None, InvalidArgument(str(error))
    except ours() as error:
        return None, CommError(f"rank 0 failed to decide for all: {type(error).__name__}: {error}")

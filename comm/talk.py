"""What ranks tell each other between two steps: small objects, over a group of their own."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch
from torch import Tensor

from accel.comm.channel import Channel, ConnectionBroken
from accel.comm.post_mortem import CommError

T = TypeVar("T")


class Talk:
    """Exchange objects over a channel; every rank calls the same methods in the same order."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.rank, self.size = channel.rank, channel.size

    def gather(self, mine: T) -> list[T]:
        """Return what each rank passed, by rank.

        Raises:
            accel.comm.post_mortem.CommError: if a rank has gone, or does not come in time.
        """
        try:
            return self._gather(mine)
        except ConnectionBroken as error:
            raise CommError(
                f"rank {self.rank} could not agree with the others on how gradients go: {error}; every rank must take "
                "as many steps, and none may have ended"
            ) from error

    def _gather(self, mine: T) -> list[T]:
        data = pickle.dumps(mine)
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._channel.all_gather(torch.tensor([len(data)]), lengths)
        parts: list[Tensor] = [torch.zeros(int(one), dtype=torch.uint8) for one in lengths]
        self._channel.all_gather(own, parts)
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def first(self, mine: T | None) -> T:
        """Return what rank 0 passed."""
        told: list[Any] = self.gather(mine if self.rank == 0 else None)
        return told[0]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Free the group."""
        self._channel.close()

"""The number of an epoch, as a plain value that also reaches copies in other processes.

Worker processes have copies of a dataset. Those of a `ContinuousLoader` are sent what changed, and may be an epoch
ahead of the loop. Those that a `DataLoader` keeps are sent nothing, so the newest number lies in shared memory as well.
A copy counts how often the number has changed, and takes the shared one if that has changed more often.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor


class Epoch:
    """Number of an epoch.

    Args:
        number: to begin with.
        changes: how often it has changed before.
    """

    accel_hides: ClassVar[frozenset[str]] = frozenset({"_shared"})  # what lies there reaches worker processes by itself

    def __init__(self, number: int = 0, changes: int = 0) -> None:
        self._number, self._changes = number, changes
        self._shared: Tensor = torch.tensor([number, changes], device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    @property
    def number(self) -> int:
        """The newest number."""
        shared = self._shared.numpy()
        # The count first: the number is written before it.
        return int(shared[0]) if shared[1] > self._changes else self._number

    def set(self, number: int) -> None:
        """Change the number, here and in copies that share its memory."""
        if number == self.number:
            return
        shared = self._shared.numpy()
        self._number, self._changes = int(number), max(self._changes, int(shared[1])) + 1
        shared[0] = self._number
        shared[1] = self._changes

    def at(self, number: int) -> Epoch:
        """Return one that has memory of its own, as this one will be once it is set to `number`."""
        return Epoch(number, self._changes + (number != self.number))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]  # a deep copy's is not

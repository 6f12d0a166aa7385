"""Which loaders feed the training: those whose batches reach a backward pass."""

from __future__ import annotations

from typing import Any
from weakref import ref


class TrainingLoaders:
    """The loaders that are known to feed the training; true once there is one, also when it is gone.

    They are not kept alive, and not told by their ids: a loop that makes its loaders anew in each epoch may get one for
    the validation where a training loader lay.
    """

    def __init__(self) -> None:
        self._known: list[ref[Any]] = []

    def __bool__(self) -> bool:
        return bool(self._known)

    def __contains__(self, loader: Any) -> bool:
        return any(known() is loader for known in self._known)

    def add(self, loader: Any) -> None:
        """Know a loader, and forget those that are gone."""
        if loader not in self:
            self._known = [*(known for known in self._known if known() is not None), ref(loader)]

    def clear(self) -> None:
        """Forget all."""
        self._known = []

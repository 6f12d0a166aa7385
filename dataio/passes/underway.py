"""Which passes over one loader are under way: a loop may begin one within another."""

from __future__ import annotations

import weakref
from typing import Any


class PassesUnderWay:
    """Know the passes that the loop has begun and holds, without keeping one alive."""

    def __init__(self) -> None:
        self._begun: list[weakref.ref[Any]] = []
        self.asked: weakref.ref[Any] | None = None
        """The pass that was asked last, by its name; set, and not by a call, for each batch."""

    def begin(self, one: Any) -> weakref.ref[Any]:
        """Note that a pass has begun; return what it is named by from then on."""
        reference = weakref.ref(one)
        self._begun = [each for each in self._begun if each() is not None]
        self._begun.append(reference)
        return reference

    def end(self, one: weakref.ref[Any]) -> None:
        """Note that a pass has no more batches."""
        self._begun = [each for each in self._begun if each is not one]

    def leave(self, one: Any) -> None:
        """Note that a pass was left, though it is held."""
        self._begun = [each for each in self._begun if each() is not one]

    @property
    def current(self) -> Any:
        """The pass that was asked last; None if there is none."""
        return None if self.asked is None else self.asked()

    @property
    def only(self) -> Any:
        """The pass that was asked last, if no other is under way, as in nearly every loop; else None."""
        begun = self._begun
        return begun[0]() if len(begun) == 1 and begun[0] is self.asked else None

    @property
    def newest(self) -> Any:
        """The pass that was begun last, of those that are held and have not ended; None if there is none."""
        return next((one for each in reversed(self._begun) if (one := each()) is not None), None)

    @property
    def oldest(self) -> Any:
        """The pass that was begun first, of those that are held and have not ended; None if there is none."""
        return next((one for each in self._begun if (one := each()) is not None), None)

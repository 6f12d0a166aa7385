"""Whose turn it is to search, where one loop trains several optimized models.

Two searches in the same steps would each measure the other's trials as their own. So a search waits while another
one's steps alternate with its own, and a finished plan is not tried again meanwhile. A search whose loop has ended has
no more steps, and so delays no other.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class Searcher(Protocol):
    """A session, as `Turns` needs it."""

    last_turn: int
    """Number of its last step, among those of all searchers."""

    @property
    def name(self) -> str:
        """The model's name, for messages."""

    @property
    def searching(self) -> bool:
        """True while its trials may switch something on or off."""


class Turns:
    """The order in which the searches of this process have their steps."""

    def __init__(self) -> None:
        self._now = 0
        self._searchers: weakref.WeakSet[Searcher] = weakref.WeakSet()
        self._is_one = True

    def join(self, searcher: Searcher) -> None:
        """Add a searcher."""
        searcher.last_turn = self._now
        self._searchers.add(searcher)
        self._is_one = len(self._searchers) < 2

    def leave(self, searcher: Searcher) -> None:
        """Remove a searcher."""
        self._searchers.discard(searcher)
        self._is_one = len(self._searchers) < 2

    def step(self, searcher: Searcher) -> Searcher | None:
        """Note a step of `searcher`, and return one that searches in the same loop, or None.

        Ranks that run the same loop get the same answer at the same step.
        """
        self._now += 1
        since, searcher.last_turn = searcher.last_turn, self._now
        if self._is_one:
            return None
        others = (other for other in self._searchers if other is not searcher and other.last_turn > since)
        return min((other for other in others if other.searching), key=lambda other: other.last_turn, default=None)


TURNS = Turns()

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
        self._last: weakref.WeakKeyDictionary[Searcher, int] = weakref.WeakKeyDictionary()
        # A lone searcher, once known, and its latest step: to look it up in the dictionary, and to write, costs 5 µs.
        self._alone: weakref.ref[Searcher] | None = None
        self._last_alone = 0

    def join(self, searcher: Searcher) -> None:
        """Add a searcher."""
        if len(self._last) == 1:
            (alone,) = self._last
            self._last[alone] = max(self._last[alone], self._last_alone)
        self._last[searcher], self._alone = self._now, None

    def leave(self, searcher: Searcher) -> None:
        """Remove a searcher."""
        self._last.pop(searcher, None)
        self._alone = None

    def step(self, searcher: Searcher) -> Searcher | None:
        """Note a step of `searcher`, and return one that searches in the same loop, or None.

        Ranks that run the same loop get the same answer at the same step.
        """
        self._now += 1
        if self._alone is not None and self._alone() is searcher:
            self._last_alone = self._now
            return None
        if len(self._last) == 1 and searcher in self._last:
            self._alone, self._last_alone = weakref.ref(searcher), self._now
            return None
        self._alone = None
        since = self._last.get(searcher, self._now - 1)
        self._last[searcher] = self._now
        others = [o for o, last in self._last.items() if o is not searcher and last > since and o.searching]
        return others[0] if others else None


TURNS = Turns()
"""The turns of this process."""

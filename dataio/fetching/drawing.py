"""Make batches from random states of their own, and leave the generators as they were where nothing draws from them.

The generators of Python, torch and numpy are one for all threads. While a batch is made from states of its own, another
thread that draws gets its numbers from these, and what it has drawn from them since the batch began is put back with
the rest. A thread that draws should have a generator of its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

from accel.dataio.fetching.randomness import Stream, streams

# Batches for which no random number is drawn, after which none is looked for any more: 0.1 ms each.
_TRIED = 16
_NEVER = 1 << 62


class Drawing:
    """Makes batches from their seeds, and knows whether fetching draws, as far as was seen.

    Attributes:
        draws: fetching was seen to draw random numbers.
    """

    def __init__(self) -> None:
        self.draws = False
        self._quiet = 0
        self._before: list[tuple[Stream, Any]] = []

    def look_again(self) -> None:
        """Look again: what is fetched from has changed."""
        self._quiet = min(self._quiet, 0)

    def put_back(self) -> None:
        """Put back the loop's random states, also where Ctrl-C came between."""
        for stream, state in self._before:
            stream.write(state)
        self._before = []

    def make(self, fetch: Callable[[Any], Any], indices: Any, seed: int | None) -> Any:
        """Return the batch of `indices`, made from random states that `seed` gives; None for those there are."""
        if seed is None or self._quiet >= _TRIED:
            return fetch(indices)
        self._before = [(stream, stream.read()) for stream in streams()]
        began = []
        try:
            for stream, _ in self._before:
                stream.seed(seed)
                began.append((stream, stream.read()))
            batch = fetch(indices)
        finally:
            self.draws = self.draws or any(stream.read() != state for stream, state in began)
            self.put_back()
        # Counted in a row: one draw, however late in the first batches, and all batches are seeded.
        self._quiet = -_NEVER if self.draws else self._quiet + 1
        return batch


def others_could_draw(waiting: Collection[int] = ()) -> bool:
    """Return whether a thread beside this one could draw random numbers now.

    Args:
        waiting: threads, by identifier, that wait for this one. Those of this package draw none.
    """
    named = threading.enumerate()
    mine = {threading.get_ident(), *waiting}
    unnamed = len(sys._current_frames()) > len(named)  # started by native code
    return unnamed or any(each.ident not in mine and not each.name.startswith("accel-") for each in named)

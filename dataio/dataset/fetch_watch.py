"""Watch whether fetching a batch draws random numbers or changes the dataset.

Fetching may move to another process only if it is a function of the indices alone. A dataset that
draws random numbers (augmentation), counts, caches or keeps its own generator is such a function of
history, and moving it would change what the model sees. A watch compares, around a fetch in the
plain loop, the global random states (torch, numpy, Python), the dataset's own state with what its
code names (`accel.dataio.dataset.watch`), and where files stand that were open before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from accel.dataio.dataset.handles import moved, positions
from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.fetching.fetch import Fetch
from accel.dataio.fetching.randomness import others_could_draw, random_state

_DRAWS_OR_OTHERS = "random numbers are drawn while a sample is fetched, by it or by another thread"


_T = TypeVar("_T")


class FetchWatch:
    """Collects, over some fetches of the plain loop, why fetching may not move.

    Args:
        dataset: what is fetched from, or a `Fetch` of it: then the collate function is looked at too.
        draws: look at the global random states too.
        aside: entered for each look of `around`, which takes up to 10 ms: so that a caller can leave it out.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        draws: bool = True,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._fetch = dataset if isinstance(dataset, Fetch) else Fetch(dataset, list, batched=True)
        self._draws, self._aside = draws, aside
        self.finding = ""
        self.fetches = 0
        self._watch: DatasetWatch | None = None
        self.moved_file = ""
        """A file that was open before a fetch and stood elsewhere after it."""
        self._seen: tuple[Any, dict[str, int]] | None = None

    def around(self, fetch: Callable[[], _T]) -> _T:
        """Return what `fetch` returns, and keep the first finding."""
        with self._aside():
            self.before()
        batch = fetch()
        with self._aside():
            self.after()
        return batch

    def before(self) -> None:
        if self._watch is None or self._watch.changed():  # by the loop, meanwhile
            self._watch = DatasetWatch(self._fetch)
        self._seen = (self._random_state(), positions())

    def after(self) -> None:
        """Compare the states after the fetch with those before; keeps the first finding."""
        if self._seen is None or self._watch is None:
            return
        (drawn, stood), self._seen = self._seen, None
        # What takes long is looked at once.
        changed = self._watch.changed(thoroughly=not self.fetches)
        self.fetches += 1
        self.moved_file = self.moved_file or moved(stood, positions())
        if self.finding:
            return
        if self._random_state() != drawn:
            # Where the thread that drew can't be identified, fetching stays where it is.
            self.finding = _DRAWS_OR_OTHERS if others_could_draw() else "fetching a sample draws random numbers"
        elif changed and self._watch.change.startswith("the collate function"):
            self.finding = "making a batch changes what the collate function keeps"
        elif changed:
            self.finding = "fetching a sample changes the dataset"
        elif self.moved_file:
            self.finding = f"fetching a sample reads from a file that was open before, {self.moved_file}"

    def _random_state(self) -> Any:
        return random_state() if self._draws else None

"""Watch whether fetching a batch draws random numbers or changes the dataset.

Fetching may move to another process only if it is a function of the indices alone. A dataset that draws random numbers
(augmentation), counts, caches or keeps its own generator is such a function of history, and moving it would change what
the model sees. A watch compares, around a fetch in the plain loop, the global random states (torch, numpy, Python),
the dataset's own state with what its code names (`accel.dataio.dataset.snapshot`), and where files stand that were open
before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from accel.dataio.dataset.handles import moved, positions
from accel.dataio.dataset.snapshot import DatasetSnapshot, Path, compare, take_snapshot
from accel.dataio.fetching.drawing import others_could_draw
from accel.dataio.fetching.fetch import Fetch
from accel.dataio.fetching.randomness import random_state

# Of what a look at an epoch's beginning takes: around each fetch there is less time.
_SHARE = 1 / 64
_DRAWS_OR_OTHERS = "random numbers are drawn while a sample is fetched, by it or by another thread"


_T = TypeVar("_T")


class FetchWatch:
    """Collects, over some fetches of the plain loop, why fetching may not move.

    Args:
        dataset: what is fetched from, or a `Fetch` of it: then the collate function is looked at too.
        draws: look at the global random states too.
        aside: entered for each look of `around`, which takes up to 10 ms: so that a caller can leave it out of what the
            fetch took.

    Example:
        >>> watch = FetchWatch(dataset)
        >>> batch = watch.around(fetch)
        >>> watch.finding          # '' while fetching depends on the indices alone
    """

    def __init__(
        self,
        dataset: Any,
        *,
        draws: bool = True,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.dataset, self._draws, self._aside = dataset, draws, aside
        self.finding = ""
        self.fetches = 0
        self.moved_file = ""
        """A file that was open before a fetch and stood elsewhere after it."""
        self._seen: tuple[Any, DatasetSnapshot, dict[str, int]] | None = None

    def around(self, fetch: Callable[[], _T]) -> _T:
        """Return what `fetch` returns, and keep the first finding."""
        with self._aside():
            self.before()
        batch = fetch()
        with self._aside():
            self.after()
        return batch

    def before(self) -> None:
        """Note the states before a fetch."""
        self._seen = (self._random_state(), self._snapshot(), positions())

    def after(self) -> None:
        """Compare the states after the fetch with those before; keeps the first finding."""
        if self._seen is None:
            return
        (drawn, own, stood), self._seen = self._seen, None
        changed = _changed(own, self._snapshot(), isinstance(self.dataset, Fetch))
        self.fetches += 1
        self.moved_file = self.moved_file or moved(stood, positions())
        if self.finding:
            return
        if self._random_state() != drawn:
            # Where the thread that drew can't be identified, fetching stays where it is.
            self.finding = _DRAWS_OR_OTHERS if others_could_draw() else "fetching a sample draws random numbers"
        elif changed:
            self.finding = changed
        elif self.moved_file:
            self.finding = f"fetching a sample reads from a file that was open before, {self.moved_file}"

    def _snapshot(self) -> DatasetSnapshot:
        # Big arrays are looked at once, the others around each fetch that is watched.
        return take_snapshot(self.dataset, share=1.0 if not self.fetches else _SHARE)

    def _random_state(self) -> Any:
        return random_state() if self._draws else None


def _changed(old: DatasetSnapshot, new: DatasetSnapshot, collates: bool) -> str:
    """Return what a fetch has changed, '' if nothing; `collates` if the snapshots are of a `Fetch`."""
    if not compare(old, new):
        return ""
    states = [{**each.rest, **each.leaves} for each in (old, new)]
    paths = {path for path in {**states[0], **states[1]} if states[0].get(path, _NONE) != states[1].get(path, _NONE)}
    if collates and paths and all(path[:1] == _COLLATE for path in paths):
        return "making a batch changes what the collate function keeps"
    return "fetching a sample changes the dataset"


_COLLATE: Path = (("attribute", "collate"),)
_NONE = object()

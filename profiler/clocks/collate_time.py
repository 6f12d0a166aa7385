"""The share of the collate function in fetching a batch in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CollateTimer:
    """Fetches batches, and times the collate function.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._now = clock
        self._collate_s = self._fetch_s = 0.0

    @property
    def share(self) -> float:
        """Share of the fetching so far."""
        return self._collate_s / self._fetch_s if self._fetch_s else 0.0

    def fetch(self, iterator: Any, original: Callable[[Any], Any]) -> Any:
        """Fetch a batch from a loader's iterator by its own `__next__`."""
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        collate = getattr(fetcher, "collate_fn", None)
        if fetcher is None or collate is None:
            return original(iterator)

        def timed(samples: Any) -> Any:
            began = self._now()
            try:
                return collate(samples)
            finally:
                self._collate_s += self._now() - began

        began = self._now()
        fetcher.collate_fn = timed
        try:
            return original(iterator)
        finally:
            fetcher.collate_fn = collate
            self._fetch_s += self._now() - began

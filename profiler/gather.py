"""One report from all ranks: they meet at the launcher's store.

The store is torchrun's own, at the address in the variables it sets. The script's process group is not used: it may be
gone, or busy, when the report is made.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from accel.profiler.rendezvous import Rendezvous


class Exchange:
    """Collects what the ranks have seen, and lets them agree on what is tried.

    Args:
        timeout_s: how long to wait for the others.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._timeout_s = timeout_s

    @property
    def launched(self) -> bool:
        """True under a launcher with several ranks."""
        return self.size > 1

    def elect(self, own: Sequence[str], most: int) -> list[str]:
        """Return on every rank what most of the ranks bring, at most so many; nothing if one of them does not come.

        Raises:
            OSError: if the store can't be reached, whatever the reason.
        """

        def elected(brought: list[Any]) -> list[str]:
            if None in brought:
                return []
            votes = Counter(each for theirs in brought for each in theirs)
            return [each for each, _ in votes.most_common(most)]

        with self._rendezvous("suspects", self._timeout_s) as rendezvous:
            return rendezvous.meet(list(own), elected, "", all_must_come=False)

    def collect(self, own: Any, at_most_s: float | None = None) -> dict[int, Any]:
        """Return on rank 0 what the ranks brought that came in time, by rank; nothing on the others, which don't wait.

        Args:
            own: what this rank brings.
            at_most_s: how long to wait for them at most; None as long as for anything.

        Raises:
            OSError: if the store can't be reached, whatever the reason.
        """
        patience_s = self._timeout_s if at_most_s is None else min(at_most_s, self._timeout_s)
        with self._rendezvous("report", patience_s) as rendezvous:
            if self.rank:
                rendezvous.arrive(own)
                return {}
            brought = rendezvous.meet(own, list, "", all_must_come=False)
        return {rank: theirs for rank, theirs in enumerate(brought) if theirs is not None}

    @contextlib.contextmanager
    def _rendezvous(self, meeting: str, patience_s: float) -> Iterator[Rendezvous]:
        try:
            yield Rendezvous(self._store(meeting), self.rank, self.size, patience_s)
        except (RuntimeError, KeyError, ValueError) as error:
            raise OSError(f"the launcher's store can't be reached: {error}") from None

    def _store(self, meeting: str) -> Any:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self._timeout_s))
        run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return PrefixStore(f"accel-profile/{run}/{meeting}", store)

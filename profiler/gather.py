"""One report from all ranks: they meet at the launcher's store.

The store is torchrun's own, at the address in the variables it sets. The script's process group is not used: it may be
gone, or busy, when the report is made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from accel.profiler.rendezvous import Rendezvous

A = TypeVar("A")


class Exchange:
    """Exchange small values across ranks.

    Args:
        timeout_s: how long to wait for the others.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._timeout = timeout_s
        self._store: Any = None

    @property
    def launched(self) -> bool:
        """True under a launcher with several ranks."""
        return self.size > 1

    def decide(self, what: str, own: Any, decision: Callable[[list[Any]], A]) -> A:
        """Return on every rank what one of them makes of what all brought, by rank; None for those that did not come.

        Args:
            what: the ranks decide on; each thing is decided once.
            own: what this rank brings.
            decision: called on rank 0, or, if that does not come, on the one that has waited longest.

        Raises:
            OSError: if the store can't be reached, whatever the reason, so that callers can let the script continue.
        """
        with self._rendezvous(what, self._timeout) as rendezvous:
            return rendezvous.meet(own, decision, "", all_must_come=False)

    def collect(self, what: str, own: Any, timeout_s: float | None = None) -> dict[int, Any]:
        """Return on rank 0 what the ranks brought that came in time, by rank; nothing on the others, which don't wait.

        Args:
            what: they bring.
            own: what this rank brings.
            timeout_s: how long to wait for them at most; None as long as for anything.

        Raises:
            OSError: as in `decide`.
        """
        patience_s = self._timeout if timeout_s is None else min(timeout_s, self._timeout)
        with self._rendezvous(what, patience_s) as rendezvous:
            if self.rank:
                rendezvous.arrive(own)
                return {}
            brought = rendezvous.meet(own, list, "", all_must_come=False)
        return {rank: theirs for rank, theirs in enumerate(brought) if theirs is not None}

    @contextlib.contextmanager
    def _rendezvous(self, what: str, patience_s: float) -> Iterator[Rendezvous]:
        try:
            yield Rendezvous(self._prefixed(what), self.rank, self.size, patience_s)
        except (RuntimeError, KeyError, ValueError) as error:
            raise OSError(f"the launcher's store can't be reached: {error}") from None

    def _prefixed(self, what: str) -> Any:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        if self._store is None:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self._timeout))
        run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return PrefixStore(f"accel-profile/{run}/{what}", self._store)

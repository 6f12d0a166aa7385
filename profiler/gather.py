"""One report from all ranks: each posts its evidence in the launcher's store, and rank 0 reads it.

The store is torchrun's own, at the address in the variables it sets. The script's process group is not used: it may be
gone, or busy, when the report is made.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

_POLL_S, _MAX_POLL_S = 0.05, 0.4
"""Pauses between two polls, doubling: 1,000 ranks share one store."""


class Exchange:
    """Post and collect small JSON values across ranks.

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

    def _open(self) -> Any:
        if self._store is None:
            from torch._C._distributed_c10d import PrefixStore, TCPStore

            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self._timeout))
            self._store = PrefixStore(f"accel-profile/{run}", store)
        return self._store

    def post(self, key: str, value: Any) -> None:
        """Store a value under this rank's key.

        Raises:
            OSError: if the store can't be reached, whatever the reason, so that callers can let the script go on.
        """
        try:
            self._open().set(f"{key}/{self.rank}", json.dumps(value))
        except (RuntimeError, KeyError, ValueError) as error:
            raise OSError(f"the launcher's store can't be reached: {error}") from None

    def collect(self, key: str, timeout_s: float | None = None) -> dict[int, Any]:
        """Return the values of all ranks that posted one in time, by rank.

        Args:
            key: under which they posted it.
            timeout_s: how long to wait for them at most; None as long as for anything.

        Raises:
            OSError: if there is no store.
        """
        keys = {rank: f"{key}/{rank}" for rank in range(self.size)}
        for _ in self._polls(timeout_s):
            if self._has(list(keys.values())):
                break
        values = {rank: self._read(path) for rank, path in keys.items()}
        return {rank: value for rank, value in values.items() if value is not None}

    def broadcast(self, key: str, value: Any) -> Any:
        """Post a value on rank 0, and return on every rank what rank 0 posted; None if it did not in time.

        Raises:
            OSError: if there is no store.
        """
        if self.rank == 0:
            self.post(key, value)
            return value
        for _ in self._polls():
            posted = self._read(f"{key}/0")
            if posted is not None:
                return posted
        return None

    def _polls(self, timeout_s: float | None = None) -> Iterator[None]:
        """Yield until the timeout, with a pause after each poll."""
        deadline = time.monotonic() + (self._timeout if timeout_s is None else min(timeout_s, self._timeout))
        pause_s = _POLL_S
        while time.monotonic() < deadline:
            yield
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)

    def _read(self, key: str) -> Any:
        return self._query(lambda store: json.loads(store.get(key)) if store.check([key]) else None)

    def _has(self, keys: list[str]) -> bool:
        return bool(self._query(lambda store: store.check(keys)))

    def _query(self, request: Callable[[Any], Any]) -> Any:
        try:
            return request(self._open())
        except (RuntimeError, KeyError, ValueError) as error:
            raise OSError(f"the launcher's store can't be reached: {error}") from None

"""One report from all ranks: each posts what it saw in the launcher's store, and rank 0 reads it.

The store is torchrun's own, found by the variables it sets. So nothing is asked of the script's process group, which
may be gone, or busy, when the report is made.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

_POLL_S = 0.05


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
        """Leave a value under this rank's key; a store that can't be reached is no reason to fail the script.

        Raises:
            OSError: if there is no store.
        """
        try:
            self._open().set(f"{key}/{self.rank}", json.dumps(value))
        except (RuntimeError, KeyError, ValueError) as error:
            raise OSError(f"the launcher's store can't be reached: {error}") from None

    def collect(self, key: str) -> dict[int, Any]:
        """Return the values of all ranks that posted one in time, by rank.

        Raises:
            OSError: if there is no store.
        """
        found: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout
        while len(found) < self.size and time.monotonic() < deadline:
            for rank in set(range(self.size)) - set(found):
                value = self._read(f"{key}/{rank}")
                if value is not None:
                    found[rank] = value
            if len(found) < self.size:
                time.sleep(_POLL_S)
        return found

    def decided(self, key: str, value: Any) -> Any:
        """Post a value on rank 0, and return on every rank what rank 0 posted; None if it did not in time.

        Raises:
            OSError: if there is no store.
        """
        if self.rank == 0:
            self.post(key, value)
            return value
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            found = self._read(f"{key}/0")
            if found is not None:
                return found
            time.sleep(_POLL_S)
        return None

    def _read(self, key: str) -> Any:
        try:
            store = self._open()
            return json.loads(store.get(key)) if store.check([key]) else None
        except (RuntimeError, KeyError, ValueError) as error:
            raise OSError(f"the launcher's store can't be reached: {error}") from None

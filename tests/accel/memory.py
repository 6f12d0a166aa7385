"""What an earlier run left, for simulated runs: kept in memory, three days old unless a test says otherwise."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from accel.cache.remembered_plans import RememberedPlans
from accel.search.remembered import RememberedSearch

DAY_S = 86400.0
NOW = datetime.fromisoformat("2026-11-23T12:00:00+00:00").timestamp()


class FakeMemory(RememberedPlans):
    """Keeps one result, and a list of what was asked of it."""

    def __init__(self, search: RememberedSearch | None = None, interrupted: str = "") -> None:
        self.search, self.interrupted = search, interrupted
        self.note = "a file"
        self.calls: list[str] = []

    def recall(self) -> RememberedSearch | None:
        self.calls.append("recall")
        return self.search

    def begin_check(self) -> None:
        self.calls.append("begin_check")

    def store(self, search: RememberedSearch) -> None:
        self.calls.append("store")
        self.search = search

    def forget(self) -> None:
        self.calls.append("forget")
        self.search = None


def day(days_ago: float) -> str:
    return datetime.fromtimestamp(NOW - days_ago * DAY_S).astimezone().isoformat()


def remembered(days_ago: float = 3, **fields: Any) -> RememberedSearch:
    return RememberedSearch(searched=day(days_ago), **fields)

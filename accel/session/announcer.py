"""Messages while a run goes on: one line at a time, on stderr, on the rank that prints."""

from __future__ import annotations

import sys

from accel.report.model import StrategyRow
from accel.run import ranks


class Announcer:
    """Print messages for the user."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    @property
    def has_printed(self) -> bool:
        """True if a line was printed."""
        return bool(self._printed)

    def say(self, line: str) -> None:
        """Print one line, once, on the rank that prints."""
        if line not in self._printed and ranks.leads():
            self._printed.add(line)
            print(f"accel: {line}", file=sys.stderr, flush=True)

    def announce(self, row: StrategyRow, done: int, total: int) -> None:
        """Print one line about a decision."""
        from accel.report.optimize_document import decision_line  # brings rich: only where there is something to print

        print(decision_line(row, done, total), file=sys.stderr, flush=True)

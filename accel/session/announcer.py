"""Messages while a run goes on: one line at a time, on stderr, on the rank that prints."""

from __future__ import annotations

import logging

from accel.profiler import stderr
from accel.report.model import StrategyRow
from accel.run import ranks

log = logging.getLogger("accel")


class Announcer:
    """Print messages for the user; decisions of the first search are logged, and their outcome is the report's."""

    def __init__(self) -> None:
        self._printed: set[str] = set()
        self._kept: set[str] = set()
        self._prints_decisions = False

    @property
    def has_printed(self) -> bool:
        """True if a line was printed."""
        return bool(self._printed)

    def say(self, line: str) -> None:
        """Print one line, once, on the rank that prints."""
        if line not in self._printed and ranks.leads():
            self._printed.add(line)
            stderr.write(f"accel: {line}")

    def search_has_ended(self) -> None:
        """The report has been printed: from now on, print what changes the plan."""
        self._prints_decisions = True

    def announce(self, row: StrategyRow) -> None:
        """Log a decision; print it if it changes the plan that was reported."""
        changes_plan = row.status == "kept" or row.name in self._kept
        if row.status == "kept":
            self._kept.add(row.name)
        else:
            self._kept.discard(row.name)
        prints = self._prints_decisions and changes_plan
        if not prints and not log.isEnabledFor(logging.DEBUG):
            return
        from accel.report.optimize_document import decision_line  # brings rich: only where there is something to print

        line = decision_line(row)
        log.debug(line)
        if prints:
            stderr.write(line)

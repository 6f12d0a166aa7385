"""What a check is: a row of checks.json, and a function of its name that yields a `Hit` for each thing that is wrong.

    "mtu": {"level": "info", "title": "small packets on a fast link", "costs": "...", "fix": "ip link set dev {} ..."}

    def mtu(host: Host) -> Iterator[Hit]:
        yield Hit("/sys/class/net/eth0/mtu: 1500", "eth0")

A row with `variables` needs no function: these are on, or have one of some values.

One that can't look raises `NotSeen`; what it yielded before stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

INFO, WARN, ERROR = "info", "warn", "error"
LEVELS = (INFO, WARN, ERROR)


class Hit(NamedTuple):
    """What a check saw, before the words of its row are added."""

    evidence: str
    """What was read where."""
    about: str = ""
    """What takes the place of `{}` in the row's fix."""
    fix: str = ""
    """Where it differs from the row's."""
    level: str = ""
    """Where it differs from the row's."""


@dataclass(frozen=True)
class CheckFinding:
    """One thing that is wrong or costs time."""

    check: str
    level: str
    """`info`: may matter. `warn`: costs time or will. `error`: does not work, or works by accident."""
    title: str
    costs: str
    """What it costs, and who measured it."""
    evidence: str
    change: str
    """What to set."""


class Check(NamedTuple):
    """One row of the tables of checks."""

    name: str
    level: str
    title: str
    costs: str
    fix: str
    """What to set, with `{}` for what a hit is about."""
    when: Callable[[Any], Iterator[Hit]]
    """Takes a Host, or an NcclLog in a check of a log."""

    def finding(self, hit: Hit) -> CheckFinding:
        """Add the row's words to what was seen."""
        change = hit.fix or self.fix.replace("{}", hit.about)
        return CheckFinding(self.name, hit.level or self.level, self.title, self.costs, hit.evidence, change)

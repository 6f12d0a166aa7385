"""What a check is: a small function that yields findings, in a registry in the order of the report.

    @check("mtu", INFO, "small packets on a fast link", costs="...")
    def mtu(host: Host) -> Iterator[Finding]:
        yield found("/sys/class/net/eth0/mtu: 1500", change="ip link set dev eth0 mtu 9000")

A check that finds nothing yields nothing. One that can't look raises `NotSeen`; what it yielded before stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

INFO, WARN, ERROR = "info", "warn", "error"
LEVELS = (INFO, WARN, ERROR)


@dataclass(frozen=True)
class Found:
    """What a check saw, before the registry's words are added."""

    evidence: str
    """What was read where."""
    change: str
    """What to set."""
    level: str | None = None
    """Where it differs from the check's own."""


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


@dataclass(frozen=True)
class Check:
    """One row of the registry."""

    name: str
    level: str
    title: str
    costs: str
    look: Callable[[Any], Iterator[Found]]
    """Takes a Host, or an NcclLog if `of_log`."""
    of_log: bool = False

    def finding(self, found: Found) -> CheckFinding:
        """Add the registry's words to what was seen."""
        return CheckFinding(self.name, found.level or self.level, self.title, self.costs, found.evidence, found.change)


CHECKS: dict[str, Check] = {}

Look = Callable[[Any], Iterator[Found]]


def check(name: str, level: str, title: str, *, costs: str, of_log: bool = False) -> Callable[[Look], Look]:
    """Register the decorated function as a check."""

    def register(look: Look) -> Look:
        assert name not in CHECKS and level in LEVELS, name
        CHECKS[name] = Check(name, level, title, costs, look, of_log)
        return look

    return register

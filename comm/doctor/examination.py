"""Look at what slows communication down: settings, links, devices, system, and the log of a run.

Nothing is sent and nothing changed: files are read, environment variables and limits are compared with what NCCL, gloo
and the kernel make of them. What could not be looked at is reported with its reason, so that no finding is not the same
as nothing wrong.

A check is a row of checks.json, and a function of its name that yields a `Hit` for each thing that is wrong:

    "mtu": {"level": "info", "title": "small packets on a fast link", "costs": "...", "fix": "ip link set dev {} ..."}

    def mtu(host: Host) -> Iterator[Hit]:
        yield Hit("/sys/class/net/eth0/mtu: 1500", "eth0")

A row with `variables` needs no function: these are on, or have one of some values; nor does one with a `trouble`, whose
lines of a log it quotes. One that can't look raises `NotSeen`; what it yielded before stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from accel.comm.doctor import machine, nccl_log, settings
from accel.comm.doctor.host import INFO, LEVELS, Hit, Host, NotSeen
from accel.comm.doctor.nccl_log import NcclLog


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


_FUNCTIONS: dict[str, Any] = {
    name: function for module in (settings, machine, nccl_log) for name, function in vars(module).items()
}


def _check(name: str, row: Mapping[str, Any]) -> Check:
    if "variables" in row:
        when: Any = settings.variables(row["variables"])
    else:
        when = nccl_log.quoting(row["trouble"]) if "trouble" in row else _FUNCTIONS[name]
    return Check(name, row["level"], row["title"], row["costs"], row["fix"], when)


_ROWS = json.loads((Path(__file__).parent / "checks.json").read_text(encoding="utf-8"))
MACHINE, LOG = (tuple(_check(*row) for row in _ROWS[table].items()) for table in ("machine", "log"))
"""The checks, in the order of the report."""
NO_LOG = "no log was given (--log FILE takes what NCCL_DEBUG=INFO prints)"


@dataclass(frozen=True)
class Examination:
    """The findings of the checks."""

    findings: tuple[CheckFinding, ...]
    """The worst first."""
    passed: tuple[str, ...]
    """Checks that looked and found nothing."""
    unseen: tuple[tuple[str, str], ...]
    """(check, why it could not look)."""

    @property
    def bad(self) -> bool:
        """True if a finding is a warning or worse."""
        return any(finding.level != INFO for finding in self.findings)


def examine(host: Host, log: NcclLog | None = None) -> Examination:
    """Run every check.

    Args:
        host: the machine, or a made-up one.
        log: an NCCL log; settings that it shows count before this process's environment.

    Example:
        >>> examine(Host()).bad
        False
    """
    if log is not None:
        host = replace(host, logged=log.settings)
    findings, passed, unseen = [], [], []
    for check, subject in [*((check, host) for check in MACHINE), *((check, log) for check in LOG)]:
        hits, reason = look(check, subject)
        findings += hits
        if reason:
            unseen.append((check.name, reason))
        elif not hits:
            passed.append(check.name)
    findings.sort(key=lambda finding: -LEVELS.index(finding.level))
    return Examination(tuple(findings), tuple(passed), tuple(unseen))


def look(check: Check, subject: Host | NcclLog | None) -> tuple[list[CheckFinding], str]:
    """Run one check on the machine or the log.

    Returns:
        What it found, and why it could not look at everything, '' if it could.
    """
    if subject is None:
        return [], NO_LOG
    findings: list[CheckFinding] = []
    try:
        for hit in check.when(subject):
            findings.append(check.finding(hit))
    except NotSeen as reason:
        return findings, str(reason)
    except (ValueError, KeyError, IndexError) as error:
        # A file of a kernel nobody tried: the other checks still have something to say.
        return findings, f"{check.name} could not make sense of what it read ({type(error).__name__}: {error})"
    return findings, ""

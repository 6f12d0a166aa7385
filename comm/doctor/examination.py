"""Look at what slows communication down: settings, links, devices, system, and the log of a run.

Nothing is sent and nothing changed: files are read, environment variables and limits are compared with what NCCL, gloo
and the kernel make of them. What could not be looked at is reported with its reason, so that no finding is not the same
as nothing wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel.comm.doctor import devices, links, logs, settings, system
from accel.comm.doctor.checks import LEVELS, WARN, Check, CheckFinding
from accel.comm.doctor.host import Host, NotSeen
from accel.comm.doctor.nccl_log import NcclLog

_FUNCTIONS: dict[str, Any] = {
    name: function for module in (settings, links, devices, system, logs) for name, function in vars(module).items()
}


def _checks(rows: Mapping[str, Mapping[str, Any]]) -> tuple[Check, ...]:
    return tuple(
        Check(name, row["level"], row["title"], row["costs"], row["fix"], _when(name, row))
        for name, row in rows.items()
    )


def _when(name: str, row: Mapping[str, Any]) -> Any:
    return settings.variables(row["variables"]) if "variables" in row else _FUNCTIONS[name]


_ROWS = json.loads((Path(__file__).parent / "checks.json").read_text(encoding="utf-8"))
MACHINE, LOG = _checks(_ROWS["machine"]), _checks(_ROWS["log"])
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
        return any(LEVELS.index(finding.level) >= LEVELS.index(WARN) for finding in self.findings)


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

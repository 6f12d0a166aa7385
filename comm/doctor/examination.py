"""Look at what slows communication down: settings, links, devices, system, and the log of a run.

Nothing is sent and nothing changed: files are read, environment variables and limits are compared with what NCCL, gloo
and the kernel make of them. What could not be looked at is told with its reason, so that no finding is not the same as
nothing wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from accel.comm.doctor import (
    devices as doctor_devices,
)
from accel.comm.doctor import (
    links as doctor_links,
)
from accel.comm.doctor import (
    logs as doctor_logs,
)
from accel.comm.doctor import (
    settings as doctor_settings,
)
from accel.comm.doctor import (
    system as doctor_system,
)
from accel.comm.doctor.checks import CHECKS, LEVELS, WARN, Check, CheckFinding, Found
from accel.comm.doctor.host import Host, NotSeen
from accel.comm.doctor.nccl_log import NcclLog

MODULES = (doctor_settings, doctor_links, doctor_devices, doctor_system, doctor_logs)

# Importing a module registers its checks.
IN_ORDER = [check for module in MODULES for check in CHECKS.values() if check.look.__module__ == module.__name__]

NO_LOG = "no log was given (--log FILE takes what NCCL_DEBUG=INFO prints)"


@dataclass(frozen=True)
class Examination:
    """What the checks found."""

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
    for check in IN_ORDER:
        found, why = look(check, host, log)
        findings += [check.finding(one) for one in found]
        if why:
            unseen.append((check.name, why))
        elif not found:
            passed.append(check.name)
    findings.sort(key=lambda finding: -LEVELS.index(finding.level))
    return Examination(tuple(findings), tuple(passed), tuple(unseen))


def look(check: Check, host: Host, log: NcclLog | None) -> tuple[list[Found], str]:
    """Run one check; return what it found and why it could not look at everything, '' if it could."""
    if check.of_log and log is None:
        return [], NO_LOG
    found: list[Found] = []
    try:
        for one in check.look(log if check.of_log else host):
            found.append(one)
    except NotSeen as reason:
        return found, str(reason)
    except (ValueError, KeyError, IndexError) as error:
        # A file of a kernel nobody tried: the other checks still have something to say.
        return found, f"{check.name} could not make sense of what it read ({type(error).__name__}: {error})"
    return found, ""

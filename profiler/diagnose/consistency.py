"""No finding may contradict the table of phases printed below it: a cause takes no longer than its phases.

A finding's share may come from another source than the table, such as operators or samples: it is cut to what the
phases hold, and so is what an experiment saves, whose steps are not those of the table. They hold no evaluation between
two epochs (17 ms a step were saved, 92 % of the experiment's steps and 32 % of the run's), and the machine may have
been busier in the rest of the run (91 % where the phases hold 89 %).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accel.profiler.diagnose.anatomy import Anatomy
from accel.profiler.diagnose.causes import CAUSES
from accel.profiler.diagnose.findings import NEAR, scaled
from accel.profiler.report import Finding, Saving

BATCHES = "the loop's own iterator"
OWN_CODE = "the loop's own code"
"""Parts of a phase, by these names in the evidence tree, that belong to one cause each and to no other."""
_OWNERS = {"input.iterator": BATCHES, "host.step_code": OWN_CODE}


@dataclass(frozen=True, kw_only=True)
class PhaseShares:
    """The phases of the mean step and their known parts, as shares of the step."""

    shares: Mapping[str, float]
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Name of a part → phase → share."""

    @classmethod
    def of_anatomy(cls, anatomy: Anatomy) -> PhaseShares:
        """Return the shares of an anatomy."""
        return cls(shares=anatomy.shares, parts={BATCHES: anatomy.batches, OWN_CODE: anatomy.own_code})

    def room(self, cause: str) -> float:
        """Return the largest share of the step that a cause can account for, and its remedy can save."""
        entry = CAUSES.get(cause)
        if entry is None or not entry.phases:
            return 1.0
        own = _OWNERS.get(cause)
        if own == BATCHES:
            return sum(self.parts.get(own, {}).values())
        # Code that could not be assigned to a phase may be in any of them.
        placed = bool(own and self.parts.get(own))
        rest = 0.0
        for phase in ("host",) if placed else entry.phases:  # without the parts that have a cause of their own
            parts = sum(part.get(phase, 0.0) for part in self.parts.values())
            rest += max(0.0, self.shares.get(phase, 0.0) - parts)
        return rest + (sum(self.parts.get(own, {}).values()) if own else 0.0)


def within_phases(findings: Sequence[Finding], phases: PhaseShares) -> list[Finding]:
    """Return the findings that the phases leave room for, their shares and savings cut to it."""
    cut = [(finding.share, within(finding, phases.room(finding.cause))) for finding in findings]
    return [finding for claimed, finding in cut if finding.share >= min(NEAR, claimed)]


def within(finding: Finding, room: float) -> Finding:
    """Cap shares and savings at what the phases hold; a measured saving is also reported as it was measured."""
    measured, why = finding.measured, finding.why
    if measured is not None and measured.value > room:
        saved = f"the experiment saved {measured.value:.0%} of its own steps"
        why = [*why, f"{saved}, and the phases hold {room:.0%} of the mean step"]
    return dataclasses.replace(
        finding,
        why=why,
        share=min(finding.share, room),
        predicted=_bounded(finding.predicted, room),
        measured=_bounded(measured, room),
    )


def _bounded(saving: Saving | None, room: float) -> Saving | None:
    """Cap a saving; the interval of one that exceeds the room keeps its relative width, it is no surer than before."""
    if saving is None or saving.high <= room:
        return saving
    if saving.value > room:
        saving = scaled(saving, room / saving.value)
    return Saving(value=saving.value, low=saving.low, high=min(saving.high, room))

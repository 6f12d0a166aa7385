"""No finding may contradict the table it stands above: what a cause takes, its phases must hold.

A finding's share comes from one source (operators, samples, an experiment) and the table of phases from the clocks.
Where they disagree, one of them is wrong, and a reader can't know which: such a finding is taken back, and said to be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accel.profiler.diagnose.anatomy import Anatomy
from accel.profiler.diagnose.causes import CAUSES
from accel.profiler.report import Finding, Node, Saving

BATCHES = "the loop's own iterator"
OWN_CODE = "the loop's own code"
"""Parts of a phase, by these names in the evidence tree, that belong to one cause each and to no other."""
_OWNERS = {"input.iterator": BATCHES, "host.step_code": OWN_CODE}
SLACK = 0.02
"""Of the step: phases are means over a run, a share of two traced steps is not; and a share is rounded for the eye."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the phases of the mean step hold, as shares of the step."""

    shares: Mapping[str, float]
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Name of a part → phase → share."""

    @classmethod
    def of_anatomy(cls, found: Anatomy) -> Held:
        """Return what an anatomy says."""
        return cls(shares=found.shares, parts={BATCHES: found.batches, OWN_CODE: found.own_code})

    @classmethod
    def of_tree(cls, root: Node) -> Held:
        """Return what the evidence tree of a report shows."""
        parts = {
            name: {phase.name: part.share for phase in root.children for part in phase.children if part.name == name}
            for name in (BATCHES, OWN_CODE)
        }
        return cls(shares={phase.name: phase.share for phase in root.children}, parts=parts)

    def room(self, cause: str) -> float:
        """Return the share of the step that a cause can take, and its remedy can save."""
        known = CAUSES.get(cause)
        if known is None or not known.phases:
            return 1.0
        own = _OWNERS.get(cause)
        if own == BATCHES:
            return sum(self.parts.get(own, {}).values())
        # Code whose phase is not known may be in each of them.
        placed = bool(own and self.parts.get(own))
        rest = sum(self._rest(phase) for phase in (("host",) if placed else known.phases))
        return rest + (sum(self.parts.get(own, {}).values()) if own else 0.0)

    def _rest(self, phase: str) -> float:
        """Return a phase's share without the parts that have a cause of their own."""
        return max(0.0, self.shares.get(phase, 0.0) - sum(part.get(phase, 0.0) for part in self.parts.values()))


def hold(findings: Sequence[Finding], held: Held) -> tuple[list[Finding], list[str]]:
    """Check findings against the phases.

    Args:
        findings: what is claimed.
        held: what the phases hold.

    Returns:
        The findings that stand, none with a share or a saving above what its phases hold, and a sentence for each that
        was taken back.
    """
    standing, told = [], []
    for finding in findings:
        room = held.room(finding.cause)
        claim = max([finding.share, *(saving.low for saving in (finding.predicted, finding.measured) if saving)])
        if claim > room + SLACK:
            told.append(_taken_back(finding.cause, claim, room))
        else:
            standing.append(_within(finding, room))
    return standing, told


def _taken_back(cause: str, claim: float, room: float) -> str:
    phases = ", ".join(CAUSES[cause].phases)
    return f"{cause} was taken back: it claims {claim:.0%} of the step, and what it can take of {phases} is {room:.0%}"


def _within(finding: Finding, room: float) -> Finding:
    """Bound shares and savings by what the phases hold; a measured one is told as it was measured, too."""
    measured, why = finding.measured, finding.why
    if measured is not None and measured.value > room:
        why = [*why, f"the experiment saved {measured.value:.0%}, and the phases hold {room:.0%}: the rest is noise"]
    return dataclasses.replace(
        finding,
        why=why,
        share=min(finding.share, room),
        predicted=_bounded(finding.predicted, room),
        measured=_bounded(measured, room),
    )


def _bounded(saving: Saving | None, room: float) -> Saving | None:
    if saving is None or saving.high <= room:
        return saving
    return Saving(value=min(saving.value, room), low=min(saving.low, room), high=room)

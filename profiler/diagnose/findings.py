"""Building findings: shares, predictions with intervals, and the sentences of the report."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel.profiler.diagnose.causes import CAUSES
from accel.profiler.report import Finding, Saving
from accel.profiler.trial import interval

if TYPE_CHECKING:
    from accel.profiler.diagnose.anatomy import Anatomy
    from accel.profiler.evidence import Evidence, LineTime, ThreadShare
    from accel.profiler.phases import Measurement

WORTH = 0.10
"""Share of the step that is worth a cause."""
NEAR, SURE = 0.08, 0.12
"""Between these shares something is borderline, from the second on a cause: of a share near a single limit, one run
of a script would name it and the next would not."""
_BESIDE = ("data", "host", "evaluation", "outside")
"""Phases in which a GPU has work only if it was launched before."""


def finding(cause: str, share: float, why: list[str], predicted: Saving | None) -> Finding:
    """Make a finding of a cause in the table."""
    entry = CAUSES[cause]
    return Finding(
        cause=cause,
        bottleneck=entry.bottleneck.value,
        title=entry.title,
        why=why,
        remedy=entry.remedy,
        strategy=entry.strategy,
        share=share,
        predicted=predicted,
    )


def saving(steps: Sequence[Measurement], removable: Callable[[Measurement], float]) -> Saving:
    """Return the share of the steps' time that is removable, with a 95 % interval over ten stretches of the run."""
    value = sum(map(removable, steps)) / sum(m.seconds for m in steps)
    size = max(1, len(steps) // 10)
    stretches = [steps[i : i + size] for i in range(0, size * (len(steps) // size), size)]
    shares = [sum(map(removable, part)) / sum(m.seconds for m in part) for part in stretches]
    if len(shares) < 2:
        return Saving(value=value, low=0.0, high=1.0)
    low, high = interval(shares, 0.025)
    half = (high - low) / 2
    return Saving(value=value, low=max(0.0, value - half), high=min(1.0, value + half))


def about(share: float, low: float, high: float) -> Saving:
    """Return the saving of a share of the step, between these multiples of it."""
    return Saving(value=share, low=low * share, high=min(1.0, high * share))


def scaled(whole: Saving, factor: float) -> Saving:
    """Return a part of a saving."""
    return Saving(value=whole.value * factor, low=whole.low * factor, high=whole.high * factor)


def of_share(whole: Saving, share: float) -> Saving:
    """Return the saving of a share of the step, with the relative uncertainty of the whole phase that it is part of."""
    # The share is a mean over the steps, the saving leaves outliers out: a phase that few steps have saves nothing.
    return scaled(whole, share / whole.value if whole.value > 0.0 else 0.0)


def of_phases(evidence: Evidence, *names: str) -> Saving:
    return saving(evidence.steps, lambda m: sum(m.phases.get(name, 0.0) for name in names))


def ms_of(anatomy: Anatomy, share: float) -> str:
    return f"{anatomy.step_s * share * 1e3:.3g} of {anatomy.step_s * 1e3:.3g} ms"


def thread_text(share: ThreadShare | None) -> str:
    if share is None:
        return ""
    return f"{share.run:.0%} on a core, {share.wait:.0%} waiting for one, {share.blocked:.0%} asleep"


def where(line: LineTime) -> str:
    """Return a line's place and text."""
    text = f": {line.source[:60]}" if line.source else ""
    return f"{os.path.basename(line.file)}:{line.line}{text}"


def rows_in(evidence: Evidence, phases: Sequence[str]) -> list[LineTime]:
    """Return the sampled lines in some phases; if these are a GPU's, without those in which the host waits for it."""
    syncs = evidence.trace.syncs if evidence.trace is not None and evidence.host_ms else []
    # A trace has other paths than a stack; and a wait that it has no line of is not in all samples without one.
    waits = {(os.path.basename(sync.file), sync.line) for sync in syncs if sync.file}
    rows = (row for row in evidence.lines if row.phase in phases)
    return [row for row in rows if (os.path.basename(row.file), row.line) not in waits]


def lines_in(evidence: Evidence, phases: Sequence[str]) -> list[LineTime]:
    return [line for line in rows_in(evidence, phases) if line.file]


def top_lines(evidence: Evidence, phases: Sequence[str], tag: str | None = None) -> list[str]:
    """Return sentences on the lines of the loop's source in which most of the time in some phases was spent."""
    rows = [row for row in lines_in(evidence, phases) if tag is None or tag in row.tags]
    total = sum(row.seconds for row in rows_in(evidence, phases))
    return [f"{row.seconds / total:.0%} of it in {where(row)}" for row in rows[:2] if row.seconds >= 0.15 * total]


def tagged(evidence: Evidence, phases: Sequence[str], tag: str) -> float:
    """Return the share of the sampled time in some phases that carries a tag."""
    rows = rows_in(evidence, phases)
    total = sum(row.seconds for row in rows)
    return sum(row.seconds for row in rows if tag in row.tags) / total if total > 0 else 0.0


def collected(evidence: Evidence, anatomy: Anatomy) -> float:
    """Return the share of the step that the garbage collector takes: of a GPU's, no more than it idles."""
    return min(evidence.gc_share, _idle(evidence, anatomy))


def _idle(evidence: Evidence, anatomy: Anatomy) -> float:
    """Return the most that a GPU can idle for the sake of the host, as a share of the step; 1 without a GPU."""
    trace = evidence.trace
    if trace is not None and trace.busy_ms is not None and anatomy.step_s > 0:
        return max(0.0, 1.0 - trace.busy_ms / (anatomy.step_s * 1e3) - anatomy.shares["communication"])
    return sum(anatomy.shares[phase] for phase in _BESIDE) if evidence.host_ms else 1.0


# -- no finding contradicts the table of phases: a cause takes no longer than its phases -------------------------------

# A finding's share may come from another source than the table, such as operators or samples: it is cut to what the
# phases hold, and so is what an experiment saves, whose steps are not those of the table. They hold no evaluation
# between two epochs (17 ms a step were saved, 92 % of the experiment's steps and 32 % of the run's), and the machine
# may have been busier in the rest of the run (91 % where the phases hold 89 %).

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
    # A quotient and a product round: the value, too, may come out above the room.
    return Saving(value=min(saving.value, room), low=min(saving.low, room), high=min(saving.high, room))

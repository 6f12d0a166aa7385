"""Name what holds a run back, from the evidence alone.

Each rule looks for one cause and returns a finding or None. A cause counts if it takes a tenth of the step or more. No
finding is an answer too: the step is what the model costs. A verdict is refused with too few steps, on a crowded
machine (that is the finding then), and when the two largest findings are of one size within noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.diagnose import (
    anatomy,
    consistency,
    rules_compute,
    rules_input,
    rules_loop,
)
from accel.profiler.diagnose import (
    phase_contents as inside,
)
from accel.profiler.diagnose.anatomy import Anatomy
from accel.profiler.diagnose.causes import CROWDS
from accel.profiler.diagnose.communication_wait import exchanged
from accel.profiler.diagnose.consistency import Held
from accel.profiler.diagnose.findings import WORTH, finding, thread_text
from accel.profiler.evidence import Evidence
from accel.profiler.report import Finding

MIN_STEPS = 20
CROWDED_WAIT = 0.25
"""Share of the time the training thread waits for a core, from which on nothing else is believed."""
CROWDED_CORES = 0.3
"""Cores kept busy by others, of all, from which on nothing else is believed if that holds this run up."""
HELD_UP = 0.1
"""Share of the quota's periods, from which on a run that waits for a core waits for its own quota."""
OVERLAP = "two causes overlap within noise"
PHASES_OF = {
    Bottleneck.INPUT: ("data",),
    Bottleneck.TRANSFER: ("copy",),
    Bottleneck.COMPUTE: ("forward", "loss", "backward"),
    Bottleneck.COMMUNICATION: ("communication",),
    Bottleneck.OPTIMIZER: ("optimizer",),
    Bottleneck.OUTSIDE: ("outside", "evaluation"),
}
"""The phases of the classes that have some."""

Rule = Callable[[Evidence, Anatomy], "Finding | None"]


@dataclass
class Diagnosis:
    """What the evidence says."""

    anatomy: Anatomy
    findings: list[Finding] = field(default_factory=list)
    """The largest first."""
    refused: str = ""
    taken_back: list[str] = field(default_factory=list)
    """What contradicted the phases, a sentence each."""

    @property
    def limits(self) -> list[Bottleneck]:
        """The classes by their share of the step, the largest first, worth a finding or not."""
        return sorted((part for part in PHASES_OF if self.share(part) > 0), key=lambda part: -self.share(part))

    def share(self, part: Bottleneck) -> float:
        """Return a class's share of the step, by the clocks."""
        return sum(self.anatomy.shares.get(phase, 0.0) for phase in PHASES_OF.get(part, ()))


def diagnose(evidence: Evidence, *, min_steps: int = MIN_STEPS) -> Diagnosis:
    """Name the causes.

    Args:
        evidence: one rank's run.
        min_steps: with fewer, the verdict is refused.
    """
    found = inside.look(anatomy.of(exchanged(evidence.steps, evidence.ddp_wait_share)), evidence)
    result = Diagnosis(anatomy=found)
    if found.steps < min_steps:
        result.refused = f"{found.steps} steps were seen, {min_steps} are needed"
        return result
    crowd = _crowded(evidence)
    if crowd is not None:
        result.findings = [crowd]
        return result
    findings = [f for rule in _RULES if (f := rule(evidence, found)) is not None]
    if any(f.cause == "launch.small_ops" for f in findings):  # the update is part of that
        findings = [f for f in findings if f.cause != "optimizer.update"]
    findings, result.taken_back = consistency.hold(findings, Held.of_anatomy(found))
    result.findings = ordered(findings)
    result.refused = refusal(result.findings, result.taken_back)
    return result


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings by what removing them gives, as far as that is known."""
    return sorted(findings, key=lambda f: -_size(f))


def _size(finding: Finding) -> float:
    known = finding.measured or finding.predicted
    return known.value if known is not None else finding.share / 2


def too_close(findings: Sequence[Finding]) -> str:
    """Say so if the two largest findings can't be put in order."""
    if len(findings) < 2:
        return ""
    first, second = (f.measured or f.predicted for f in findings[:2])
    if first is None or second is None or second.high < first.low:
        return ""
    return (
        f"{OVERLAP}: {findings[0].cause} ({first.value:.0%} of the step) and {findings[1].cause} ({second.value:.0%})"
    )


def refusal(findings: Sequence[Finding], taken_back: Sequence[str]) -> str:
    """Say why there is no verdict: nothing is left of what was found, or two causes can't be put in order."""
    return taken_back[0] if taken_back and not findings else too_close(findings)


def _crowded(evidence: Evidence) -> Finding | None:
    thread, others = evidence.thread, evidence.foreign_cores
    waits = thread is not None and thread.wait > CROWDED_WAIT
    taken = others is not None and others > CROWDED_CORES * evidence.cores and _disturbed(evidence, others)
    if not waits and not taken:
        return None
    why = []
    if thread is not None:
        why.append(f"the training thread was {thread_text(thread)}")
    if others is not None:
        why.append(f"processes outside this run kept {others:.2g} of {evidence.cores} cores busy")
    held_up = evidence.throttled is not None and evidence.throttled > HELD_UP
    if held_up:
        why.append(f"the quota of {evidence.cores} cores held this run up in {evidence.throttled:.0%} of its periods")
    own = not taken and (others is not None or held_up or evidence.loader.workers > 0)
    name = CROWDS[own]
    return finding(name, thread.wait if thread is not None else 0.0, why, None)


def _disturbed(evidence: Evidence, others: float) -> bool:
    """Tell whether processes that hold cores hold this run up: its thread stands in line, or its pool must."""
    thread = evidence.thread
    if thread is None or thread.wait >= WORTH:
        return True
    # The threads beside it are not looked at. One that mostly sleeps leaves them little to do.
    return thread.blocked < 0.5 and evidence.threads + others > evidence.cores


_RULES: tuple[Rule, ...] = (
    rules_loop.collector,
    rules_input.epoch_start,
    rules_input.loader,
    rules_input.iterator,
    rules_compute.transfer,
    rules_compute.sync,
    rules_compute.anomaly,
    rules_compute.double,
    rules_compute.threads,
    rules_compute.small_ops,
    rules_compute.bandwidth,
    rules_loop.communication,
    rules_loop.optimizer,
    rules_loop.step_code,
    rules_loop.evaluation,
    rules_loop.stalls,
    rules_loop.each_step,
)

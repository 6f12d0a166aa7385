"""Name what holds a run back, from the evidence alone.

Each rule looks for one cause and returns a finding or None. A cause counts if it takes an eighth of the step or so;
what takes a tenth, give or take a fifth of that, is borderline, and no cause that comes and goes. No finding is an
answer too: the step takes what the model costs. A verdict is refused with too few steps, on a crowded machine (which is
then the finding), and when the two largest findings can't be told apart within noise. Neighbours that keep a part of
the cores busy are told beside the verdict, and change none but that small causes are borderline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.diagnose import anatomy as anatomies
from accel.profiler.diagnose.anatomy import Anatomy
from accel.profiler.diagnose.causes import CROWDS, PHASES_OF
from accel.profiler.diagnose.findings import SURE, WORTH, PhaseShares, collected, finding, thread_text, within_phases
from accel.profiler.diagnose.rules import RULES
from accel.profiler.diagnose.step_times import wait_as_communication
from accel.profiler.evidence import SHARED_CORES, Evidence
from accel.profiler.report import Finding

MIN_STEPS = 20
CROWDED_WAIT = 0.25
"""Share of the time the training thread waits for a core, above which no other figure is trusted."""
CROWDED_CORES = 0.6
"""Share of the cores kept busy by others, if that delays this run, above which no other figure is trusted. Below, from
`SHARED_CORES` on, they are told beside the verdict."""
CROWDED_TOGETHER, SHARED_WAIT = 0.88, 0.45
"""Then, no other figure is trusted where the share of the cores held by others plus that of the time waited for one is
more than the first, or the latter alone more than the second. One busy process on two cores: 0.66 to 0.79 and 0.31 to
0.43, and the shares of the step were as without it; two: 0.95 to 1.01, and 0.40 to 0.51."""
WORTH_BESIDE = 0.15
"""Least share of a cause beside such neighbours, and of what it saves. Without a busy process and beside one, a
healthy script's loader took 0.07 and 0.09 to 0.11; beside one, another one's update took 0.16, of which 0.07 could be
saved. The faults of the matrix were 0.2 and more, and their savings 0.37."""
THROTTLED = 0.1
"""Share of throttled quota periods, above which a run that waits for a core waits for its own quota."""
OVERLAP = "two causes overlap within noise"


@dataclass
class Diagnosis:
    """The causes that the evidence supports."""

    anatomy: Anatomy
    findings: list[Finding] = field(default_factory=list)
    """The largest first."""
    borderline: list[Finding] = field(default_factory=list)
    """What may be a cause or none; the largest first."""
    refused: str = ""
    collected: float = 0.0
    """Share of the step that the garbage collector takes, worth a finding or not."""
    crowd: Finding | None = None
    """Others that keep cores busy, or this run's own processes; among `findings` only if no other figure is trusted."""

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
    steps = wait_as_communication(evidence.steps, evidence.ddp_wait_share)
    anatomy = anatomies.with_parts(anatomies.of(steps), evidence)
    result = Diagnosis(anatomy=anatomy, collected=collected(evidence, anatomy))
    if anatomy.steps < min_steps:
        result.refused = f"{anatomy.steps} steps were seen, {min_steps} are needed"
        return result
    result.crowd = _crowded(evidence)
    if result.crowd is not None and _hides_all(evidence):
        result.findings = [result.crowd]
        return result
    findings = [f for rule in RULES if (f := rule(evidence, anatomy)) is not None]
    beside_others = result.crowd is not None
    if any(f.cause == "launch.small_ops" and _is_sure(f, beside_others) for f in findings):
        # The update is part of that.
        findings = [f for f in findings if f.cause != "optimizer.update"]
    findings = within_phases(findings, PhaseShares.of_anatomy(anatomy))
    result.findings = ordered([f for f in findings if _is_sure(f, beside_others)])
    result.borderline = ordered([f for f in findings if f not in result.findings])
    result.refused = too_close(result.findings)
    return result


def _is_sure(finding: Finding, beside_others: bool) -> bool:
    """Return whether a finding is a cause, and not borderline.

    Beside other processes what removing it saves must be enough as well, as far as that is known.
    """
    if finding.share < (1.5 * SURE if finding.cause.startswith("optimizer.") else SURE):
        return False
    saved = finding.share if finding.predicted is None else min(finding.share, finding.predicted.value)
    return not beside_others or saved >= WORTH_BESIDE


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings by what removing them saves, as far as that is known."""
    return sorted(findings, key=lambda f: -_size(f))


def _size(finding: Finding) -> float:
    estimate = finding.measured or finding.predicted
    return estimate.value if estimate is not None else finding.share / 2


def too_close(findings: Sequence[Finding]) -> str:
    """Return a sentence if the two largest findings can't be put in order, '' otherwise."""
    if len(findings) < 2:
        return ""
    first, second = (f.measured or f.predicted for f in findings[:2])
    if first is None or second is None or second.high < first.low:
        return ""
    return (
        f"{OVERLAP}: {findings[0].cause} ({first.value:.0%} of the step) and {findings[1].cause} ({second.value:.0%})"
    )


def _crowded(evidence: Evidence) -> Finding | None:
    thread, others = evidence.thread, evidence.foreign_cores
    occupied = _occupied(evidence, SHARED_CORES)
    if not occupied and (thread is None or thread.wait <= CROWDED_WAIT):
        return None
    why = []
    if thread is not None:
        why.append(f"the training thread was {thread_text(thread)}")
    if others is not None:
        why.append(f"processes outside this run kept {others:.2g} of {evidence.cores} cores busy")
    throttled = evidence.throttled is not None and evidence.throttled > THROTTLED
    if throttled:
        why.append(f"the quota of {evidence.cores} cores held this run up in {evidence.throttled:.0%} of its periods")
    own = not occupied and (others is not None or throttled or evidence.loader.workers > 0)
    name = CROWDS[own]
    return finding(name, thread.wait if thread is not None else 0.0, why, None)


def _hides_all(evidence: Evidence) -> bool:
    """Return whether a crowd leaves no other figure to be trusted; several ranks also wait for whoever it delays."""
    if evidence.thread is None or evidence.world_size > 1 or _occupied(evidence, CROWDED_CORES):
        return True
    wait = evidence.thread.wait
    if _occupied(evidence, SHARED_CORES):
        return wait > SHARED_WAIT or wait + (evidence.foreign_cores or 0.0) / evidence.cores > CROWDED_TOGETHER
    return wait > CROWDED_WAIT


def _occupied(evidence: Evidence, share: float) -> bool:
    """Return whether others keep more than a share of the cores busy, and delay this run."""
    others = evidence.foreign_cores
    return others is not None and others > share * evidence.cores and _disturbed(evidence, others)


def _disturbed(evidence: Evidence, others: float) -> bool:
    """Return whether processes that occupy cores delay this run: its thread waits for a core, or its pool must."""
    thread = evidence.thread
    if thread is None or thread.wait >= WORTH:
        return True
    ranks = evidence.local_world_size if evidence.device == "cpu" else 1
    if thread.blocked < 0.5:
        return ranks * (evidence.loop_threads or evidence.threads) + others > evidence.cores
    # The pool's threads are not measured. A training thread that mostly sleeps leaves them little to do; but a rank may
    # sleep for another one whose core was taken.
    return ranks > 1 and ranks + others > evidence.cores

"""Name what holds a run back, from the evidence alone.

Each rule looks for one cause and returns a finding or None. A cause counts if it takes a tenth of the step or more. No
finding is an answer too: the step is what the model costs. A verdict is refused with too few steps, on a crowded
machine (that is the finding then), and when the two largest findings are of one size within noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from accel.profiler import anatomy
from accel.profiler.anatomy import Anatomy
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.causes import CAUSES
from accel.profiler.evidence import Evidence, LineTime, ThreadShare
from accel.profiler.phases import Measurement
from accel.profiler.report import Finding, Saving
from accel.profiler.trial import interval

WORTH = 0.10
"""Share of the step from which on something is called a cause."""
MIN_STEPS = 20
CROWDED_WAIT = 0.25
"""Share of the time the training thread waits for a core, from which on nothing else is believed."""
CROWDED_CORES = 0.3
"""Cores kept busy by others, of all, from which on nothing else is believed."""
SMALL_BATCH_FACTOR = 8
"""How much larger a batch the prediction for small operations assumes."""

_PHASES_OF = {
    Bottleneck.INPUT: ("data",),
    Bottleneck.TRANSFER: ("copy",),
    Bottleneck.COMPUTE: ("forward", "loss", "backward"),
    Bottleneck.COMMUNICATION: ("communication",),
    Bottleneck.OPTIMIZER: ("optimizer",),
    Bottleneck.OUTSIDE: ("outside", "evaluation"),
}

Rule = Callable[[Evidence, Anatomy], "Finding | None"]


@dataclass
class Diagnosis:
    """What the evidence says."""

    anatomy: Anatomy
    findings: list[Finding] = field(default_factory=list)
    """The largest first."""
    refused: str = ""

    @property
    def limits(self) -> list[Bottleneck]:
        """The classes by their share of the step, the largest first, worth a finding or not."""
        return sorted((part for part in _PHASES_OF if self.share(part) > 0), key=lambda part: -self.share(part))

    def share(self, part: Bottleneck) -> float:
        """Return a class's share of the step, by the clocks."""
        return sum(self.anatomy.shares.get(phase, 0.0) for phase in _PHASES_OF.get(part, ()))


def diagnose(evidence: Evidence, *, min_steps: int = MIN_STEPS) -> Diagnosis:
    """Name the causes.

    Args:
        evidence: one rank's run.
        min_steps: with fewer, the verdict is refused.
    """
    found = anatomy.of(evidence.steps)
    result = Diagnosis(anatomy=found)
    if found.steps < min_steps:
        result.refused = f"{found.steps} steps were seen, {min_steps} are needed"
        return result
    crowd = _crowded(evidence)
    if crowd is not None:
        result.findings = [crowd]
        return result
    result.findings = ordered([f for rule in _RULES if (f := rule(evidence, found)) is not None])
    result.refused = too_close(result.findings)
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
        f"two causes overlap within noise: {findings[0].cause} ({first.value:.0%} of the step) and "
        f"{findings[1].cause} ({second.value:.0%})"
    )


# -- small parts -------------------------------------------------------------------------------------------------------


def finding(cause: str, share: float, why: list[str], predicted: Saving | None) -> Finding:
    """Make a finding of a cause in the table."""
    known = CAUSES[cause]
    return Finding(
        cause=cause,
        bottleneck=known.bottleneck.value,
        title=known.title,
        why=why,
        remedy=known.remedy,
        strategy=known.strategy,
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


def scaled(whole: Saving, factor: float) -> Saving:
    """Return a part of a saving."""
    return Saving(value=whole.value * factor, low=whole.low * factor, high=whole.high * factor)


def _of_phases(evidence: Evidence, *names: str) -> Saving:
    return saving(evidence.steps, lambda m: sum(m.phases.get(name, 0.0) for name in names))


def _ms(found: Anatomy, share: float) -> str:
    return f"{found.step_s * share * 1e3:.3g} of {found.step_s * 1e3:.3g} ms"


def _thread(share: ThreadShare | None) -> str:
    if share is None:
        return ""
    return f"{share.run:.0%} on a core, {share.wait:.0%} waiting for one, {share.blocked:.0%} asleep"


def where(line: LineTime) -> str:
    """Return a line's place and text."""
    text = f": {line.source[:60]}" if line.source else ""
    return f"{os.path.basename(line.file)}:{line.line}{text}"


def _lines(evidence: Evidence, phases: Sequence[str]) -> list[LineTime]:
    return [line for line in evidence.lines if line.phase in phases and line.file]


def _top_lines(evidence: Evidence, phases: Sequence[str], tag: str | None = None) -> list[str]:
    """Say in which lines of the loop's source most of the time in some phases went."""
    rows = [row for row in _lines(evidence, phases) if tag is None or tag in row.tags]
    total = sum(row.seconds for row in evidence.lines if row.phase in phases)
    return [f"{row.seconds / total:.0%} of it in {where(row)}" for row in rows[:2] if row.seconds >= 0.15 * total]


def _tagged(evidence: Evidence, phases: Sequence[str], tag: str) -> float:
    """Return the share of the sampled time in some phases that carries a tag."""
    rows = [row for row in evidence.lines if row.phase in phases]
    total = sum(row.seconds for row in rows)
    return sum(row.seconds for row in rows if tag in row.tags) / total if total > 0 else 0.0


# -- the host ----------------------------------------------------------------------------------------------------------


def _crowded(evidence: Evidence) -> Finding | None:
    thread, others = evidence.thread, evidence.foreign_cores
    waits = thread is not None and thread.wait > CROWDED_WAIT
    taken = others is not None and others > CROWDED_CORES * evidence.cores
    if not waits and not taken:
        return None
    why = []
    if thread is not None:
        why.append(f"the training thread was {_thread(thread)}")
    if others is not None:
        why.append(f"processes outside this run kept {others:.2g} of {evidence.cores} cores busy")
    own = not taken and (others is not None or evidence.loader.workers > 0)
    name = "host.own_processes" if own else "host.oversubscribed"
    return finding(name, thread.wait if thread is not None else 0.0, why, None)


def _collector(evidence: Evidence, found: Anatomy) -> Finding | None:
    if evidence.gc_share < WORTH:
        return None
    why = [f"the garbage collector ran for {_ms(found, evidence.gc_share)}"]
    share = evidence.gc_share
    return finding("host.gc", share, why, Saving(value=share, low=0.9 * share, high=min(1.0, 1.1 * share)))


def _step_code(evidence: Evidence, found: Anatomy) -> Finding | None:
    share = found.shares["host"] - _collected_in(evidence, found, "host")
    if share < WORTH:
        return None
    why = [f"the loop's own code between the batch and the update takes {_ms(found, share)}"]
    why += _top_lines(evidence, ["host"])
    return finding("host.step_code", share, why, _of_phases(evidence, "host"))


def _collected_in(evidence: Evidence, found: Anatomy, phase: str) -> float:
    """Return the part of a phase that the garbage collector explains: it is booked to the largest of the two."""
    largest = max(("host", "outside"), key=lambda name: found.shares[name])
    return min(found.shares[phase], evidence.gc_share) if phase == largest else 0.0


# -- input -------------------------------------------------------------------------------------------------------------


def _epoch_start(evidence: Evidence, found: Anatomy) -> Finding | None:
    if found.epoch_start < WORTH:
        return None
    firsts = sum(m.first for m in evidence.steps)
    why = [
        f"{firsts} of {found.steps} steps begin an epoch; beyond an ordinary wait they wait "
        f"{_ms(found, found.epoch_start)} of the mean step",
        f"the loader has {evidence.loader.workers} workers"
        + ("" if evidence.loader.persistent else ", started anew for each epoch"),
    ]
    predicted = Saving(value=found.epoch_start, low=0.9 * found.epoch_start, high=found.epoch_start)
    return finding("input.epoch_start", found.epoch_start, why, predicted)


def _input(evidence: Evidence, found: Anatomy) -> Finding | None:
    share = found.shares["data"] - found.epoch_start
    if share < WORTH:
        return None
    whole = _of_phases(evidence, "data")
    predicted = scaled(whole, share / whole.value)
    why = [f"the loop waits for its loader for {_ms(found, share)}"]
    if evidence.loader.workers:
        return _from_workers(evidence, share, why, predicted)
    thread = evidence.data_thread
    if evidence.collate_share >= 0.5:
        why.append(f"{evidence.collate_share:.0%} of that is the collate function")
        return finding("input.collate", share, why, predicted)
    if thread is not None:
        why.append(f"meanwhile the training thread is {_thread(thread)}")
    why += _top_lines(evidence, ["data"])
    blocked = thread is not None and thread.blocked >= 0.5
    return finding("input.storage" if blocked else "input.cpu", share, why, predicted)


def _from_workers(evidence: Evidence, share: float, why: list[str], predicted: Saving) -> Finding:
    shares = [worker.share for worker in evidence.workers]
    if not shares:
        why.append("what the workers do could not be seen")
        return finding("input.workers", share, why, predicted)
    mean = ThreadShare(
        run=sum(s.run for s in shares) / len(shares),
        wait=sum(s.wait for s in shares) / len(shares),
        blocked=sum(s.blocked for s in shares) / len(shares),
    )
    why.append(f"{len(shares)} workers are {_thread(mean)}")
    # A loop that waits has handed out all the work there is, so a worker that sleeps sleeps in its work.
    return finding("input.worker_storage" if mean.blocked >= 0.5 else "input.workers", share, why, predicted)


def iterator_share(evidence: Evidence, found: Anatomy) -> float:
    """Return the share of the step in which the loop's own iterator makes a batch, by sampled lines."""
    if evidence.loader.kind != "own iterator":
        return 0.0
    return found.each * _tagged(evidence, ["outside"], "next batch")


def _iterator(evidence: Evidence, found: Anatomy) -> Finding | None:
    share = iterator_share(evidence, found)
    if share < WORTH:
        return None
    rows = [row for row in evidence.lines if row.phase == "outside" and "next batch" in row.tags]
    seconds = sum(row.seconds for row in rows)
    asleep = sum(row.seconds * row.blocked for row in rows) / seconds
    why = [
        f"the loop waits for its own iterator for {_ms(found, share)}, {asleep:.0%} of it asleep",
        *_top_lines(evidence, ["outside"], "next batch"),
    ]
    whole = _of_phases(evidence, "outside")
    return finding("input.iterator", share, why, scaled(whole, share / whole.value))


# -- device ------------------------------------------------------------------------------------------------------------


def _transfer(evidence: Evidence, found: Anatomy) -> Finding | None:
    trace = evidence.trace
    share = max(found.shares["copy"], (trace.copy_share or 0.0) if trace else 0.0)
    if evidence.device == "cpu" or share < WORTH:
        return None
    why = [f"copies from the host that nothing hides take {_ms(found, share)}"]
    why.append("the loader pins its memory" if evidence.loader.pinned else "the loader does not pin its memory")
    return finding("transfer.pageable", share, why, Saving(value=share, low=0.5 * share, high=share))


def _sync(evidence: Evidence, found: Anatomy) -> Finding | None:
    trace = evidence.trace
    if trace is None or not trace.syncs or trace.device_busy is None:
        return None
    # A wait for a device that is busy anyway costs nothing: only what leaves the device idle can be won.
    share = min(sum(point.ms for point in trace.syncs) / 1e3 / found.step_s, 1.0 - trace.device_busy)
    if share < WORTH:
        return None
    top = max(trace.syncs, key=lambda point: point.ms)
    why = [
        f"the host waits {sum(p.ms for p in trace.syncs):.3g} ms a step for the device, which idles "
        f"{1 - trace.device_busy:.0%} of the time",
        f"most of it in {top.name} at {os.path.basename(top.file)}:{top.line}, {top.calls:.3g} times a step",
    ]
    return finding("sync.read", share, why, Saving(value=share, low=0.0, high=share))


# -- computation -------------------------------------------------------------------------------------------------------


def _anomaly(evidence: Evidence, found: Anatomy) -> Finding | None:
    if not evidence.anomaly_mode:
        return None
    why = [
        "torch.is_anomaly_enabled() is true: each operation records its stack and each gradient is searched for NaN",
        f"forward and backward take {_ms(found, found.computing)}",
    ]
    return finding("compute.anomaly", found.computing, why, None)


def _double(evidence: Evidence, found: Anatomy) -> Finding | None:
    share = found.computing + found.shares["optimizer"]
    if evidence.dtype != "float64" or share < WORTH:
        return None
    why = [f"most parameters are float64; forward, backward and update take {_ms(found, share)}"]
    ratio = 0.5
    if evidence.roofline is not None and {"float32", "float64"} <= set(evidence.roofline.gflops):
        limits = evidence.roofline.gflops
        ratio = limits["float64"] / limits["float32"]
        why.append(
            f"this device reaches {limits['float32']:.3g} GFLOP/s in float32, {limits['float64']:.3g} in float64"
        )
    value = share * (1 - ratio)
    return finding("compute.float64", share, why, Saving(value=value, low=0.7 * value, high=min(share, 1.2 * value)))


def idle_cores(evidence: Evidence) -> float:
    """Return the cores of this host that the run leaves idle."""
    workers = sum(worker.share.run + worker.share.wait for worker in evidence.workers)
    return evidence.cores - evidence.local_world_size * evidence.threads - workers - (evidence.foreign_cores or 0.0)


def _threads(evidence: Evidence, found: Anatomy) -> Finding | None:
    small = evidence.trace is not None and evidence.trace.small_share >= 0.5
    if evidence.device != "cpu" or small or found.computing < 0.5 or idle_cores(evidence) < 0.5 * evidence.cores:
        return None
    why = [f"{evidence.threads} of {evidence.cores} cores compute, {idle_cores(evidence):.2g} are idle"]
    value = found.computing * (1 - evidence.threads / evidence.cores)
    return finding("compute.threads", found.computing, why, Saving(value=0.8 * value, low=0.0, high=value))


def _small_ops(evidence: Evidence, found: Anatomy) -> Finding | None:
    trace = evidence.trace
    if trace is None or trace.small_share < 0.5:
        return None
    if trace.device_busy is not None and trace.device_busy > 0.8:
        return None
    host_side = found.computing + found.shares["optimizer"]
    share = host_side * trace.small_share if trace.device_busy is None else 1.0 - trace.device_busy
    if share < WORTH:
        return None
    why = [
        f"{trace.ops_per_step:.0f} operations a step, {trace.small_share:.0%} of their time in calls too short for "
        f"their launch",
        f"the prediction is per sample, for a batch {SMALL_BATCH_FACTOR} times as large",
    ]
    if trace.device_busy is not None:
        why.append(f"the device runs a kernel {trace.device_busy:.0%} of the time")
    value = share * (1 - 1 / SMALL_BATCH_FACTOR)
    return finding("launch.small_ops", share, why, Saving(value=value, low=0.7 * value, high=share))


def _bandwidth(evidence: Evidence, found: Anatomy) -> Finding | None:
    trace = evidence.trace
    if trace is None or trace.elementwise_share < 0.6 or trace.small_share >= 0.5:
        return None
    share = found.computing * trace.elementwise_share
    if share < 0.3:
        return None
    why = [f"{trace.elementwise_share:.0%} of the operators' time is element-wise work on large tensors"]
    top = next((op for op in trace.ops if op.kind == "elementwise" and op.gb_per_s), None)
    if top is not None and evidence.roofline is not None:
        limit = evidence.roofline.gb_per_s
        why.append(f"{top.name} moves {top.gb_per_s:.3g} GB/s; a large copy here moves {limit:.3g}")
    return finding("memory.bound", share, why, None)


# -- several ranks -----------------------------------------------------------------------------------------------------


def _communication(evidence: Evidence, found: Anatomy) -> Finding | None:
    share = (evidence.ddp_wait_share or 0.0) + found.shares["communication"]
    if evidence.world_size < 2 or share < WORTH:
        return None
    why = [f"{_ms(found, share)} are spent exchanging gradients that no computation hides"]
    predicted = Saving(value=share, low=0.7 * share, high=min(1.0, 1.1 * share))
    return finding("communication.exposed", share, why, predicted)


# -- update ------------------------------------------------------------------------------------------------------------


def _optimizer(evidence: Evidence, found: Anatomy) -> Finding | None:
    share, facts = found.shares["optimizer"], evidence.optimizer
    if share < 1.5 * WORTH:
        return None
    why = [f"{facts.name or 'the optimizer'} takes {_ms(found, share)} to update {facts.tensors} tensors"]
    whole = _of_phases(evidence, "optimizer")
    if not facts.multi_tensor and facts.tensors >= 20:
        why.append("parameter by parameter, in Python")
        return finding("optimizer.per_parameter", share, why, scaled(whole, 0.7))
    why += _top_lines(evidence, ["optimizer"])
    # What can't be saved: reading and writing parameters, gradients and two moments once.
    ideal_s = 28.0 * facts.elements / (evidence.roofline.gb_per_s * 1e9) if evidence.roofline else 0.0
    left = min(0.9, ideal_s / (share * found.step_s)) if found.step_s else 0.0
    return finding("optimizer.update", share, why, scaled(whole, 1.0 - left))


# -- outside -----------------------------------------------------------------------------------------------------------


def _evaluation(evidence: Evidence, found: Anatomy) -> Finding | None:
    share = found.shares["evaluation"]
    if share < WORTH:
        return None
    why = [f"forward passes without gradients between two updates take {_ms(found, share)}"]
    if found.stall_every:
        why.append(f"every {found.stall_every:.0f} steps")
    return finding("outside.evaluation", share, why, _of_phases(evidence, "evaluation"))


def _stalls(evidence: Evidence, found: Anatomy) -> Finding | None:
    share = found.stalls - found.shares["evaluation"]
    if share < WORTH or share < found.stalls / 2:
        return None
    every = f"every {found.stall_every:.0f} steps" if found.stall_every else "once"
    why = [f"work between two steps stops the training {every}: {_ms(found, share)} of the mean step"]
    saves = Saving(value=share, low=0.8 * share, high=min(1.0, 1.2 * share))
    name = "outside.checkpoint" if _tagged(evidence, ["outside"], "checkpoint") >= 0.5 else "outside.periodic"
    return finding(name, share, why + _top_lines(evidence, ["outside"]), saves)


def _each_step(evidence: Evidence, found: Anatomy) -> Finding | None:
    evaluating = max(0.0, found.shares["evaluation"] - found.stalls)
    share = found.each - evaluating - iterator_share(evidence, found) - _collected_in(evidence, found, "outside")
    if share < WORTH:
        return None
    why = [f"work between each update and the next batch takes {_ms(found, share)}"]
    whole = _of_phases(evidence, "outside")
    return finding("outside.step", share, why + _top_lines(evidence, ["outside"]), scaled(whole, share / whole.value))


_RULES: tuple[Rule, ...] = (
    _collector,
    _epoch_start,
    _input,
    _iterator,
    _transfer,
    _sync,
    _anomaly,
    _double,
    _threads,
    _small_ops,
    _bandwidth,
    _communication,
    _optimizer,
    _step_code,
    _evaluation,
    _stalls,
    _each_step,
)

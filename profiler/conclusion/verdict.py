"""From evidence and findings to the report: the verdict's words, the tree that adds up, one report from all ranks."""

from __future__ import annotations

import dataclasses
import platform
import statistics
from collections.abc import Mapping
from typing import Any

import torch

from accel.profiler import naming
from accel.profiler.diagnose import consistency
from accel.profiler.diagnose.anatomy import Anatomy
from accel.profiler.diagnose.causes import CAUSES, CROWDS
from accel.profiler.diagnose.communication_wait import exchanged
from accel.profiler.diagnose.consistency import BATCHES, OWN_CODE, Held
from accel.profiler.diagnose.findings import WORTH
from accel.profiler.evidence import Evidence, ThreadShare
from accel.profiler.naming import Diagnosis
from accel.profiler.phases import MEANING
from accel.profiler.report import Finding, HostFacts, Node, ProfileReport, RankRow, Saving, StepRow
from accel.profiler.system import link

_TIMELINE = 120
_LINES = 12


def report(evidence: Evidence, diagnosis: Diagnosis) -> ProfileReport:
    """Write the report of one rank.

    Args:
        evidence: what was seen.
        diagnosis: what it means, experiments included.
    """
    found = diagnosis.anatomy
    trace = evidence.trace
    told = ProfileReport(
        findings=diagnosis.findings,
        refused=diagnosis.refused,
        evidence=tree(evidence, found) if found.steps else None,
        steps=found.steps,
        step_ms=found.step_s * 1e3,
        ranks=[row(evidence, found)],
        timeline=[
            StepRow(step=m.step, ms=m.seconds * 1e3, phases_ms={k: v * 1e3 for k, v in m.phases.items() if v})
            for m in exchanged(evidence.steps[-_TIMELINE:], evidence.ddp_wait_share)
        ],
        lines=[line for line in evidence.lines if line.file][:_LINES],
        ops=trace.ops if trace else [],
        syncs=trace.syncs if trace else [],
        roofline=evidence.roofline,
        gpus=evidence.gpus,
        host=_host(evidence),
        trace_file=trace.file if trace else "",
        unseen=[*evidence.unseen, *(said for said in diagnosis.taken_back if said not in evidence.unseen)],
    )
    conclude(told, found)
    return told


def conclude(told: ProfileReport, found: Anatomy) -> None:
    """Put the verdict and what to do next into words; a finding that contradicts the evidence is taken back first."""
    _take_back(told)
    told.bottleneck = "" if told.refused else told.findings[0].bottleneck if told.findings else "none"
    told.verdict = _verdict(told, found)
    told.next = [f"{f.remedy}{_by_itself(f)}" for f in told.findings] or _nothing_to_do(told)


def _take_back(told: ProfileReport) -> None:
    if told.evidence is None:
        return
    told.findings, taken_back = consistency.hold(told.findings, Held.of_tree(told.evidence))
    told.unseen += [sentence for sentence in taken_back if sentence not in told.unseen]
    if taken_back and (not told.refused or told.refused.startswith(naming.OVERLAP)):
        told.refused = naming.refusal(told.findings, taken_back)


def _by_itself(finding: Finding) -> str:
    return f" (accel.optimize tries it: {finding.strategy})" if finding.strategy else ""


def _verdict(told: ProfileReport, found: Anatomy) -> str:
    if told.refused:
        return f"no verdict: {told.refused}"
    if not told.findings:
        parts = {"forward and backward": found.computing, **{k: found.shares[k] for k in ("optimizer", "data")}}
        largest = max(parts, key=lambda part: parts[part])
        return f"nothing holds the run back: {largest} take {parts[largest]:.0%} of the step, and no cause stands out"
    first = told.findings[0]
    if first.cause in CROWDS:
        return f"{first.cause}: {first.title}; nothing else can be said until that is gone"
    return f"{first.cause}: {first.title}; {saves(first)}"


def saves(finding: Finding) -> str:
    """Say what removing a cause gives, and how that is known."""
    known = finding.measured or finding.predicted
    if known is None:
        return f"it is part of {finding.share:.0%} of the step"
    how = "confirmed by experiment" if finding.confirmed else "not confirmed" if finding.measured else "predicted"
    return f"removing it saves {known.value:.0%} [{known.low:.0%}, {known.high:.0%}] of the step, {how}"


def _nothing_to_do(told: ProfileReport) -> list[str]:
    if told.refused:
        return ["let it train for longer: more epochs, or a larger part of the data"] if told.steps < 20 else []
    return ["accel.optimize(model, loader) tries faster kernels, memory formats and compilation on the real steps"]


# -- the tree ----------------------------------------------------------------------------------------------------------


def tree(evidence: Evidence, found: Anatomy) -> Node:
    """Take the mean step apart; the children of each node add up to it."""

    def node(name: str, share: float, note: str = "", children: list[Node] | None = None) -> Node:
        return Node(name=name, ms=share * found.step_s * 1e3, share=share, note=note, children=children or [])

    children = []
    for phase, share in found.shares.items():
        if share <= 0:
            continue
        parts: list[Node] = []
        if phase == "data":
            parts = _data_parts(evidence, found, node)
        elif phase == "outside":
            parts = _outside_parts(evidence, found, node)
        else:
            parts = _parts(evidence, found, phase, node)
        on_device = evidence.device_ms.get(phase)
        told = f"; the device works {on_device:.3g} ms in it" if on_device else ""
        children.append(node(phase, share, MEANING[phase] + told, parts))
    return node("step", 1.0, f"mean of {found.steps} steps{_kinds_of_step(evidence, found)}", children)


def _data_parts(evidence: Evidence, found: Anatomy, node: Any) -> list[Node]:
    ordinary = found.shares["data"] - found.epoch_start
    parts = [node("start of epochs", found.epoch_start)] if found.epoch_start else []
    thread = evidence.data_thread
    if thread is None:
        return [*parts, node("ordinary wait", ordinary)] if parts else []
    return [
        *parts,
        node("on a core", ordinary * thread.run, "computing the batch"),
        node("waiting for a core", ordinary * thread.wait, "the machine is crowded"),
        node("asleep", ordinary * thread.blocked, "storage, network or worker processes"),
    ]


def _parts(evidence: Evidence, found: Anatomy, phase: str, node: Any) -> list[Node]:
    """Return what a phase of the model, or the loop's own code beside it, is made of."""
    batches, own = found.batches.get(phase, 0.0), found.own_code.get(phase, 0.0)
    parts = [node(BATCHES, batches, "by sampled lines")] if batches else []
    parts += [node(OWN_CODE, own, "in no operator, by the trace of two steps")] if own else []
    works = found.works(phase)
    kinds = evidence.trace.kinds.get(phase) if evidence.trace is not None else None
    if kinds and not found.own_unplaced:
        return parts + _computing_parts(kinds, works, node)
    return [*parts, node("the rest", works)] if parts else []


def _computing_parts(kinds: Mapping[str, float], share: float, node: Any) -> list[Node]:
    """Return what a pass is made of, by the trace of its own operators."""
    product, elementwise = kinds.get("matmul", 0.0), kinds.get("elementwise", 0.0)
    return [
        node("matrix products and convolutions", share * product, "by the trace of two steps"),
        node("element-wise work", share * elementwise),
        node("other operators", share * max(0.0, 1.0 - product - elementwise)),
    ]


def _kinds_of_step(evidence: Evidence, found: Anatomy) -> str:
    """Say what the trace tells of the model's phases together, where it tells nothing of each."""
    trace = evidence.trace
    if trace is None:
        return ""
    if found.own_unplaced:
        own = f"{found.own_unplaced * found.step_s * 1e3:.3g} ms of forward, loss and backward"
        return f"; {own} are in no operator, by the trace of two steps"
    if trace.kinds:
        return ""
    products, elementwise = f"{trace.matmul_share:.0%} matrix products", f"{trace.elementwise_share:.0%} element-wise"
    return f"; of the model's operators {products}, {elementwise}, by the trace of two steps"


def _outside_parts(evidence: Evidence, found: Anatomy, node: Any) -> list[Node]:
    share = found.shares["outside"]
    own = min(share, found.batches.get("outside", 0.0))
    stalls = min(share - own, max(0.0, found.stalls - found.shares["evaluation"]))
    parts = [
        node(BATCHES, own, "by sampled lines"),
        node("stalls", stalls, f"every {found.stall_every:.0f} steps" if found.stall_every else ""),
        node("after each step", share - own - stalls),
    ]
    return parts if own or stalls else []


# -- facts -------------------------------------------------------------------------------------------------------------


def row(evidence: Evidence, found: Anatomy) -> RankRow:
    """Return a rank's line."""
    return RankRow(
        rank=evidence.rank,
        host=platform.node(),
        steps=found.steps,
        step_ms=found.step_s * 1e3,
        phases_ms={phase: share * found.step_s * 1e3 for phase, share in found.shares.items()},
        thread=evidence.thread,
    )


def _host(evidence: Evidence) -> HostFacts:
    loader, optimizer = evidence.loader, evidence.optimizer
    workers = f", {loader.workers} workers" if loader.kind == "DataLoader" else ""
    path = "fused" if optimizer.fused else "multi-tensor" if optimizer.multi_tensor else "parameter by parameter"
    return HostFacts(
        cores=evidence.cores,
        threads=evidence.threads,
        device=_device_name(evidence.device),
        platform=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        foreign_cores=evidence.foreign_cores,
        thread=evidence.thread,
        workers=[worker.share for worker in evidence.workers],
        loader=f"{loader.kind}{workers}",
        optimizer=f"{optimizer.name}, {optimizer.tensors} tensors, {path}" if optimizer.name else "",
        model=evidence.model_name,
    )


def _device_name(kind: str) -> str:
    return torch.cuda.get_device_name() if kind == "cuda" and torch.cuda.is_available() else kind


# -- several ranks -----------------------------------------------------------------------------------------------------


def posted(evidence: Evidence, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what a rank tells rank 0, as plain JSON."""
    found = diagnosis.anatomy
    return {
        "row": dataclasses.asdict(row(evidence, found)),
        "wait_s": found.shares.get("communication", 0.0) * found.step_s,
        "crowded": any(finding.cause in CROWDS for finding in diagnosis.findings),
    }


def merge(told: ProfileReport, ranks: Mapping[int, Mapping[str, Any]], found: Anatomy, size: int) -> None:
    """Take the other ranks into rank 0's report: who is slow, and who waits."""
    for missing in sorted(set(range(size)) - set(ranks)):
        told.unseen.append(f"rank {missing}: it posted nothing before the report was made")
    told.ranks = [_row_of(ranks[rank]) for rank in sorted(ranks)]
    crowded = [rank for rank in sorted(ranks) if ranks[rank]["crowded"]]
    if crowded:
        named = ", ".join(map(str, crowded))
        told.unseen.append(f"which rank is slow: other processes crowd the cores of rank {named}")
    too_few = bool(told.refused) and not told.refused.startswith(naming.OVERLAP)
    if len(ranks) < 2 or found.step_s <= 0 or crowded or too_few:
        return
    waits = {rank: float(told_by["wait_s"]) for rank, told_by in ranks.items()}
    own = {r.rank: r.step_ms / 1e3 - waits[r.rank] for r in told.ranks}
    slowest = max(own, key=lambda rank: own[rank])
    others = statistics.median(seconds for rank, seconds in own.items() if rank != slowest)
    behind = (own[slowest] - others) / found.step_s
    _reduce_exchange(told, min(waits.values()) / found.step_s)
    joined = link.told(len(told.ranks), len({r.host for r in told.ranks}))
    for finding in told.findings:
        finding.why += [joined] if finding.cause == "communication.exposed" else []
    # Ranks that fill a host disturb each other: two healthy ones on two cores differed by up to 15 % of the step. And a
    # straggler hardly waits at all.
    limit = 2 * WORTH if told.host.threads * _ranks_on(told, slowest) >= told.host.cores else WORTH
    if behind >= limit and waits[slowest] <= 0.4 * max(waits.values()):
        told.findings.append(_straggler(told, slowest, behind, found))
        told.ranks[sorted(ranks).index(slowest)].straggler = True
        told.findings = naming.ordered(told.findings)
    told.refused = naming.too_close(told.findings)
    conclude(told, found)


def _ranks_on(told: ProfileReport, rank: int) -> int:
    """Return how many ranks share a rank's host."""
    host = next(r.host for r in told.ranks if r.rank == rank)
    return sum(r.host == host for r in told.ranks)


def _reduce_exchange(told: ProfileReport, share: float) -> None:
    """What even the slowest rank waits is the exchange; the rest is waiting for the slowest rank."""
    for finding in list(told.findings):
        if finding.cause != "communication.exposed":
            continue
        if share < WORTH:
            told.findings.remove(finding)
        elif share < 0.8 * finding.share:
            finding.share, finding.measured = share, None
            finding.predicted = Saving(value=share, low=0.7 * share, high=min(1.0, 1.1 * share))
            finding.why = [f"the rank that waits least spends {share:.0%} of the step exchanging gradients"]


def _straggler(told: ProfileReport, slowest: int, behind: float, found: Anatomy) -> Finding:
    slow = next(r for r in told.ranks if r.rank == slowest)
    rest = [r for r in told.ranks if r.rank != slowest]
    differences = {
        # Waiting for gradients is booked to the backward pass of those who wait.
        phase: ms - statistics.median(r.phases_ms.get(phase, 0.0) for r in rest)
        for phase, ms in slow.phases_ms.items()
        if phase not in ("backward", "communication")
    }
    phase = max(differences, key=lambda name: differences[name])
    why = [
        f"rank {slowest} ({slow.host}) computes {behind * found.step_s * 1e3:.3g} ms a step longer than the median of "
        f"the others, which wait for it"
    ]
    if differences[phase] > 0.3 * behind * found.step_s * 1e3:
        why.append(f"{differences[phase]:.3g} ms of that in {phase}: {MEANING[phase]}")
    else:
        why.append("most of that in its backward pass")
    cause = CAUSES["straggler.rank"]
    return Finding(
        cause=cause.name,
        bottleneck=cause.bottleneck.value,
        title=cause.title,
        why=why,
        remedy=cause.remedy,
        share=behind,
        predicted=Saving(value=behind, low=0.8 * behind, high=min(1.0, 1.1 * behind)),
        experiment="a rank's slowness can't be switched off; the figure is from the clocks of all ranks",
    )


def _row_of(held: Mapping[str, Any]) -> RankRow:
    fields = dict(held["row"])
    thread = fields.pop("thread")
    return RankRow(**fields, thread=ThreadShare(**thread) if thread else None)

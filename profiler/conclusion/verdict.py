"""From evidence and findings to the report: the verdict, the tree that adds up, one report from all ranks.

What the experiments say of the findings: confirmed, dropped, or left to the prediction from the clocks.
"""

from __future__ import annotations

import dataclasses
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accel.profiler import naming
from accel.profiler.diagnose import findings
from accel.profiler.diagnose.anatomy import Anatomy
from accel.profiler.diagnose.causes import CAUSES, CROWDS, switched_with
from accel.profiler.diagnose.findings import BATCHES, NEAR, OWN_CODE, SURE, WORTH, PhaseShares, about
from accel.profiler.diagnose.step_times import wait_as_communication
from accel.profiler.evidence import Evidence
from accel.profiler.naming import Diagnosis
from accel.profiler.phases import MEANING
from accel.profiler.report import Experiment, Finding, HostFacts, Node, ProfileReport, RankRow, StepRow

_TIMELINE = 120
_LINES = 12


def build_report(evidence: Evidence, diagnosis: Diagnosis) -> ProfileReport:
    """Return the report of one rank; the findings hold the experiments' results."""
    anatomy = diagnosis.anatomy
    trace = evidence.trace
    last = sorted([*evidence.steps, *evidence.one_offs], key=lambda m: m.step)[-_TIMELINE:]
    report = ProfileReport(
        findings=diagnosis.findings,
        borderline=diagnosis.borderline,
        refused=diagnosis.refused,
        evidence=tree(evidence, anatomy) if anatomy.steps else None,
        steps=anatomy.steps,
        step_ms=anatomy.step_s * 1e3,
        samples_per_s=_samples_per_s(evidence, anatomy),
        ranks=[row(evidence, anatomy)],
        timeline=[
            StepRow(step=m.step, ms=m.seconds * 1e3, phases_ms={k: v * 1e3 for k, v in m.phases.items() if v})
            for m in wait_as_communication(last, evidence.ddp_wait_share)
        ],
        lines=[line for line in evidence.lines if line.file][:_LINES],
        ops=trace.ops if trace else [],
        syncs=trace.syncs if trace else [],
        roofline=evidence.roofline,
        gpus=evidence.gpus,
        host=_host(evidence),
        trace_file=trace.file if trace else "",
        unseen=list(evidence.unseen),
        beside=_beside(evidence, diagnosis),
    )
    conclude(report, anatomy)
    return report


def _samples_per_s(evidence: Evidence, anatomy: Anatomy) -> float | None:
    """Return the samples of a mean step per second; None if no batch has a length."""
    counted = [m.samples for m in evidence.steps if m.samples]  # 0 where batches were not counted
    return statistics.fmean(counted) / anatomy.step_s if counted and anatomy.step_s else None


def _beside(evidence: Evidence, diagnosis: Diagnosis) -> str:
    """Return a sentence on others that keep cores busy, where they are not the finding themselves."""
    crowd, sentences = diagnosis.crowd, []
    if crowd is not None and crowd not in diagnosis.findings:
        sentences += crowd.why
    if evidence.loop_threads is not None:
        fewer = f"{evidence.threads} thread{'s'[: evidence.threads != 1]} in place of {evidence.loop_threads}"
        sentences.append(f"steps were measured with {fewer}, as other processes held cores when they began")
    if not sentences:
        return ""
    return f"{'; '.join(sentences)}: on a quiet machine steps are shorter, and parts of the step have other shares"


def conclude(report: ProfileReport, anatomy: Anatomy) -> None:
    """Write the verdict and the next steps, with findings that fit the phases."""
    if report.evidence is not None:
        report.findings = naming.ordered(findings.within_phases(report.findings, PhaseShares.of_anatomy(anatomy)))
        if not report.refused or report.refused.startswith(naming.OVERLAP):
            report.refused = naming.too_close(report.findings)
    report.bottleneck = "" if report.refused else report.findings[0].bottleneck if report.findings else "none"
    report.verdict = _verdict(report, anatomy)
    report.next = [
        f"{f.remedy} (accel.optimize tries it: {f.strategy})" if f.strategy else f.remedy for f in report.findings
    ] or _nothing_to_do(report)


def _verdict(report: ProfileReport, anatomy: Anatomy) -> str:
    if report.refused:
        return f"no verdict: {report.refused}"
    others = {name: anatomy.shares.get(name, 0.0) for name in ("optimizer", "data", "communication")}
    parts = {"forward and backward": anatomy.computing, **others}
    largest = max(parts, key=lambda part: parts[part])
    if not report.findings:
        none = f"nothing holds the run back: {largest} take {parts[largest]:.0%} of the step, and no cause stands out"
        return none + "".join(f"; borderline: {f.cause}, {f.share:.0%} of the step" for f in report.borderline[:1])
    first = report.findings[0]
    if first.cause in CROWDS:
        return f"{first.cause}: {first.title}; provisionally, {largest} took {parts[largest]:.0%} of the step"
    return f"{first.cause}: {first.title}; {saving_text(first)}"


def saving_text(finding: Finding) -> str:
    """Say what removing a cause saves, and how that is known."""
    estimate = finding.measured or finding.predicted
    if estimate is None:
        return f"it is part of {finding.share:.0%} of the step"
    how = "confirmed by experiment" if finding.confirmed else "not confirmed" if finding.measured else "predicted"
    return f"removing it saves {estimate.value:.0%} [{estimate.low:.0%}, {estimate.high:.0%}] of the step, {how}"


def _nothing_to_do(report: ProfileReport) -> list[str]:
    if report.refused:
        return ["let it train for longer: more epochs, or a larger part of the data"] if report.steps < 20 else []
    return ["accel.optimize(model, loader) tries faster kernels, memory formats and compilation on the real steps"]


# -- the tree ----------------------------------------------------------------------------------------------------------


def tree(evidence: Evidence, anatomy: Anatomy) -> Node:
    """Return the mean step as a tree; the children of each node add up to it."""

    def node(name: str, share: float, note: str = "", children: list[Node] | None = None) -> Node:
        return Node(name=name, ms=share * anatomy.step_s * 1e3, share=share, note=note, children=children or [])

    children = []
    for phase, share in anatomy.shares.items():
        if share <= 0:
            continue
        parts: list[Node] = []
        if phase == "data":
            parts = _data_parts(evidence, anatomy, node)
        elif phase == "outside":
            parts = _outside_parts(anatomy, node)
        else:
            parts = _parts(anatomy, phase, node)
        on_host = evidence.host_ms.get(phase)
        phrase = f"; the host is in it for {on_host:.3g} ms" if on_host else ""
        children.append(node(phase, share, MEANING[phase] + phrase, parts))
    return node("step", 1.0, f"mean of {anatomy.steps} steps{_kinds_of_step(evidence, anatomy)}", children)


def _data_parts(evidence: Evidence, anatomy: Anatomy, node: Any) -> list[Node]:
    ordinary = anatomy.shares["data"] - anatomy.epoch_start
    parts = [node("start of epochs", anatomy.epoch_start)] if anatomy.epoch_start else []
    thread = evidence.data_thread
    if thread is None:
        return [*parts, node("ordinary wait", ordinary)] if parts else []
    return [
        *parts,
        node("on a core", ordinary * thread.run, "computing the batch"),
        node("waiting for a core", ordinary * thread.wait, "the machine is crowded"),
        node("asleep", ordinary * thread.blocked, "storage, network or worker processes"),
    ]


def _parts(anatomy: Anatomy, phase: str, node: Any) -> list[Node]:
    """Return the parts of a phase of the model, the loop's own code included."""
    batches, own = anatomy.batches.get(phase, 0.0), anatomy.own_code.get(phase, 0.0)
    parts = [node(BATCHES, batches, "by sampled lines")] if batches else []
    parts += [node(OWN_CODE, own, "in no operator, by the trace of two steps")] if own else []
    return [*parts, node("the rest", anatomy.works(phase))] if parts else []


def _kinds_of_step(evidence: Evidence, anatomy: Anatomy) -> str:
    """Describe the model's phases together, by the trace."""
    trace = evidence.trace
    if trace is None:
        return ""
    if anatomy.own_unplaced:
        own = f"{anatomy.own_unplaced * anatomy.step_s * 1e3:.3g} ms of forward, loss and backward"
        return f"; {own} are in no operator, by the trace of two steps"
    products, elementwise = f"{trace.matmul_share:.0%} matrix products", f"{trace.elementwise_share:.0%} element-wise"
    return f"; of the model's operators {products}, {elementwise}, by the trace of two steps"


def _outside_parts(anatomy: Anatomy, node: Any) -> list[Node]:
    share = anatomy.shares["outside"]
    own = anatomy.batches.get("outside", 0.0)
    stalls = min(share - own, max(0.0, anatomy.stalls - anatomy.shares["evaluation"]))
    parts = [
        node(BATCHES, own, "by sampled lines"),
        node("stalls", stalls, f"every {anatomy.stall_every:.0f} steps" if anatomy.stall_every else ""),
        node("after each step", share - own - stalls),
    ]
    return parts if own or stalls else []


# -- facts -------------------------------------------------------------------------------------------------------------


def row(evidence: Evidence, anatomy: Anatomy) -> RankRow:
    """Return a rank's line."""
    return RankRow(
        rank=evidence.rank,
        host=platform.node(),
        steps=anatomy.steps,
        step_ms=anatomy.step_s * 1e3,
        phases_ms={phase: share * anatomy.step_s * 1e3 for phase, share in anatomy.shares.items()},
        thread=evidence.thread,
    )


def _host(evidence: Evidence) -> HostFacts:
    loader, optimizer = evidence.loader, evidence.optimizer
    workers = f", {loader.workers} workers" if loader.kind == "DataLoader" else ""
    is_gpu = evidence.device == "cuda" and torch.cuda.is_available()
    path = "fused" if optimizer.fused else "multi-tensor" if optimizer.multi_tensor else "parameter by parameter"
    return HostFacts(
        cores=evidence.cores,
        threads=evidence.loop_threads or evidence.threads,
        device=torch.cuda.get_device_name() if is_gpu else evidence.device,
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


# -- several ranks -----------------------------------------------------------------------------------------------------


def rank_summary(evidence: Evidence, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what a rank sends to rank 0."""
    anatomy = diagnosis.anatomy
    return {
        "row": row(evidence, anatomy),
        "wait_s": anatomy.shares.get("communication", 0.0) * anatomy.step_s,
        "crowded": diagnosis.crowd is not None,
    }


def merge(report: ProfileReport, ranks: Mapping[int, Mapping[str, Any]], anatomy: Anatomy, size: int) -> None:
    """Merge the other ranks into rank 0's report: who is slow, and who waits."""
    for missing in sorted(set(range(size)) - set(ranks)):
        report.unseen.append(f"rank {missing}: it posted nothing before the report was made")
    report.ranks = [ranks[rank]["row"] for rank in sorted(ranks)]
    crowded = [rank for rank in sorted(ranks) if ranks[rank]["crowded"]]
    if crowded:
        numbers = ", ".join(map(str, crowded))
        report.unseen.append(f"which rank is slow: other processes crowd the cores of rank {numbers}")
    too_few = bool(report.refused) and not report.refused.startswith(naming.OVERLAP)
    if len(ranks) < 2 or anatomy.step_s <= 0 or crowded or too_few:
        return
    waits = {rank: float(summary["wait_s"]) for rank, summary in ranks.items()}
    own = {r.rank: r.step_ms / 1e3 - waits[r.rank] for r in report.ranks}
    slowest = max(own, key=lambda rank: own[rank])
    others = statistics.median(seconds for rank, seconds in own.items() if rank != slowest)
    lag_share = (own[slowest] - others) / anatomy.step_s
    _reduce_exchange(report, min(waits.values()) / anatomy.step_s)
    hosts = {r.rank: r.host for r in report.ranks}
    places = len(set(hosts.values()))
    topology = f"the {len(hosts)} ranks are on {'one host' if places == 1 else f'{places} hosts'}"
    for finding in report.findings:
        finding.why += [topology] if finding.cause.startswith("communication.") else []
    # Ranks that occupy a whole host disturb each other: two healthy ones on two cores differed by up to 15 % of the
    # step. And a straggler hardly waits at all.
    beside = sum(host == hosts[slowest] for host in hosts.values())
    limit = 2 * WORTH if report.host.threads * beside >= report.host.cores else WORTH
    if lag_share >= limit and waits[slowest] <= 0.4 * max(waits.values()):
        straggler = _straggler(report, slowest, lag_share, anatomy)
        same = "outside.evaluation" if straggler.cause == "straggler.evaluation" else ""
        report.findings = [straggler, *(each for each in report.findings if each.cause != same)]
        report.ranks[sorted(ranks).index(slowest)].straggler = True
        report.findings = naming.ordered(report.findings)
    report.refused = naming.too_close(report.findings)
    conclude(report, anatomy)


def _reduce_exchange(report: ProfileReport, share: float) -> None:
    """Reduce the exchange to what the rank that waits least waits; the rest is waiting for the slowest rank."""
    for finding in [*report.findings, *report.borderline]:
        if not finding.cause.startswith("communication.") or finding.cause == "communication.unused_search":
            continue
        if share < SURE:
            report.findings = [each for each in report.findings if each is not finding]
            report.borderline = [each for each in report.borderline if each is not finding]
            report.borderline += [finding] if share >= NEAR else []
        if share < 0.8 * finding.share:
            if finding.measured is not None:
                also = "the waiting for the slowest rank too; this part is from the clocks of all ranks"
                finding.experiment = f"tried, but that removed {also}"
            finding.share, finding.measured, finding.confirmed = share, None, False
            finding.predicted = about(share, 0.7, 1.1)
            finding.why = [f"the rank that waits least spends {share:.0%} of the step exchanging gradients"]


def _straggler(report: ProfileReport, slowest: int, lag_share: float, anatomy: Anatomy) -> Finding:
    slow = next(r for r in report.ranks if r.rank == slowest)
    rest = [r for r in report.ranks if r.rank != slowest]
    differences = {
        # Waiting for gradients is booked to the backward pass of the ranks that wait.
        phase: ms - statistics.median(r.phases_ms.get(phase, 0.0) for r in rest)
        for phase, ms in slow.phases_ms.items()
        if phase not in ("backward", "communication")
    }
    phase = max(differences, key=lambda name: differences[name])
    why = [
        f"rank {slowest} ({slow.host}) computes {lag_share * anatomy.step_s * 1e3:.3g} ms a step longer than the "
        f"median of the others, which wait for it"
    ]
    if differences[phase] > 0.3 * lag_share * anatomy.step_s * 1e3:
        why.append(f"{differences[phase]:.3g} ms of that in {phase}: {MEANING[phase]}")
    else:
        phase = "backward"
        why.append("most of that in its backward pass")
    saves = about(lag_share, 0.8, 1.1)
    straggler = findings.finding(
        "straggler.evaluation" if phase == "evaluation" else "straggler.rank", lag_share, why, saves
    )
    straggler.experiment = "a rank's slowness can't be switched off; the figure is from the clocks of all ranks"
    return straggler


# -- what experiments say of findings ----------------------------------------------------------------------------------


_INCONCLUSIVE = {
    "void": "could not be tried, the switch had no effect in this loop; intended: ",
    "inconclusive": "tried, inconclusive: ",
}
"""Verdicts that measure nothing: the prediction from the clocks stands."""


def judge(
    diagnosis: Diagnosis,
    experiments: Mapping[str, Experiment],
    suspected: Sequence[Finding],
    why_untried: Callable[[Finding], str],
    shares: Mapping[str, float] | None = None,
) -> list[str]:
    """Add the results of the experiments to a diagnosis, in place, and return a sentence for each finding dropped.

    Args:
        diagnosis: from the evidence of the whole run.
        experiments: by the cause they tested.
        suspected: findings from before the experiments; one that an experiment has confirmed is kept.
        why_untried: says why there was no experiment for a finding.
        shares: cause → its share of the whole run, for causes that have no phases.
    """
    earlier, dropped = _confirmed_earlier(diagnosis, experiments, suspected, shares or {})
    kept = []
    for finding in [*diagnosis.findings, *earlier]:
        experiment = _experiment_of(finding.cause, experiments)
        if experiment is None:
            why = "" if finding.cause in CROWDS else why_untried(finding)
            kept.append(dataclasses.replace(finding, experiment=why))
        elif experiment.verdict == "drop" and experiment.saving.high < WORTH:
            dropped.append(_not_a_cause(finding, experiment))
            kept += _otherwise(finding)
        else:
            kept.append(_with_experiment(finding, experiment))
    diagnosis.findings = naming.ordered(kept)
    named = {name for finding in kept for name in switched_with(finding.cause)}
    borderline, diagnosis.borderline = diagnosis.borderline, []
    for finding in borderline:
        experiment = _experiment_of(finding.cause, experiments)
        if experiment is not None and experiment.verdict == "drop" and experiment.saving.high < WORTH:
            dropped.append(_not_a_cause(finding, experiment))
        elif finding.cause not in named:
            diagnosis.borderline.append(finding)
    if not diagnosis.refused or diagnosis.refused.startswith(naming.OVERLAP):
        diagnosis.refused = naming.too_close(diagnosis.findings)
    return dropped


def _not_a_cause(finding: Finding, experiment: Experiment) -> str:
    return (
        f"{finding.cause} looked like a cause ({finding.share:.0%} of the step); the experiment shows that removing it "
        f"saves {experiment.saving.value:.1%}"
    )


def _otherwise(finding: Finding) -> list[Finding]:
    """Return what takes the time of a finding that an experiment has cleared, if something else must."""
    name = CAUSES[finding.cause].otherwise
    if not name:
        return []
    share = finding.share
    predicted = about(share, 0.7, 1.1)
    untried = "not tried: it showed only once another cause was cleared"
    return [dataclasses.replace(findings.finding(name, share, finding.why[:1], predicted), experiment=untried)]


def _experiment_of(cause: str, experiments: Mapping[str, Experiment]) -> Experiment | None:
    """Return the experiment that switched a cause off, under whatever name it was suspected.

    Files that the page cache did not hold yet made `input.storage` of a loader, and `input.cpu` once it held them.
    """
    return next((experiments[name] for name in switched_with(cause) if name in experiments), None)


def _confirmed_earlier(
    diagnosis: Diagnosis,
    experiments: Mapping[str, Experiment],
    suspected: Sequence[Finding],
    shares: Mapping[str, float],
) -> tuple[list[Finding], list[str]]:
    """Look for findings that an experiment has confirmed and the evidence of the whole run no longer shows.

    Returns:
        Those that still may be what they were, no larger than the whole run allows, and a sentence for each other one.
    """
    current = {name for finding in diagnosis.findings for name in switched_with(finding.cause)}
    if current & set(CROWDS):  # no other figure is trusted then
        return [], []
    phases, kept, gone = PhaseShares.of_anatomy(diagnosis.anatomy), [], []
    for finding in suspected:
        experiment = experiments.get(finding.cause)
        if experiment is None or experiment.verdict != "keep" or finding.cause in current:
            continue
        room = shares.get(finding.cause, phases.room(finding.cause))
        if room >= WORTH:
            kept.append(findings.within(finding, room))
        else:
            gone.append(
                f"{finding.cause} held up the steps of the experiment (removing it saved "
                f"{experiment.saving.value:.0%} of them), and not the run: it can take {room:.0%} of the mean step"
            )
    return kept, gone


def _with_experiment(finding: Finding, experiment: Experiment) -> Finding:
    if experiment.verdict in _INCONCLUSIVE:
        return dataclasses.replace(finding, experiment=_INCONCLUSIVE[experiment.verdict] + experiment.what)
    confirmed = experiment.verdict == "keep" and experiment.saving.low > 0
    return dataclasses.replace(finding, measured=experiment.saving, confirmed=confirmed, experiment=experiment.what)

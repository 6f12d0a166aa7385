"""The texts of a profile report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from accel.profiler.evidence import GpuShare, OpTime, Roofline, ThreadShare
from accel.profiler.phases import PHASES
from accel.profiler.report import Experiment, Finding, HostFacts, Node, ProfileReport, Saving
from accel.report.words import count_text, finite, ms_text, number_text, percent_text, seconds_text

OUTCOMES = {"keep": "helps", "drop": "does not help", "refused": "too noisy to tell", "void": "could not be tried"}
"""Verdict of an experiment → its text."""

_AT_ROOF = 1.05
"""Share of a roof up to which an operator counts as at it: both are measured."""
_ROOF_NOTES = {
    "cached": "cached: faster than a large copy, so its data lay in a cache, whose roof was not measured",
    "above": "above: faster than the large matrix product that was measured; it ran while the device was slower, or in "
    "another precision",
}
_ADDS_UP = 0.005
"""By how much, as a share of the step, parts may miss their parent and still count as adding up."""


def saving_text(saving: Saving | None) -> str:
    """Format a saving with its interval, e.g. `67 % [64, 70]`; `-` when there is none."""
    if saving is None or finite(saving.value) is None:
        return "-"
    return f"{percent_text(saving.value)} [{number_text(saving.low)}, {number_text(saving.high)}]"


# --- verdict ---------------------------------------------------------------------------------------------------------


def verdict_text(report: ProfileReport) -> str:
    """Return the outcome in one line; where it was refused, why, and what was seen instead."""
    if not report.refused:
        return report.verdict or f"no verdict: {count_text(report.steps, 'step')} seen"
    instead = "" if report.verdict.startswith("no verdict") else report.verdict
    # Findings follow, each with its share; without them, only the largest part can be named.
    instead = instead or ("" if report.findings else _largest_part(report.evidence))
    return f"no verdict: {report.refused}" + (f"; {instead}" if instead else "")


def _largest_part(root: Node | None) -> str:
    parts = [] if root is None else [node for node in root.children if finite(node.share) is not None]
    if not parts:
        return ""
    largest = max(parts, key=lambda node: node.share)
    return f"the largest part of the step is {largest.name} ({percent_text(largest.share)})"


def ended_text(report: ProfileReport) -> str:
    """Return how the script ended; empty if it ran to its end."""
    if report.ended == "completed":
        return ""
    how = f"was {report.ended}" if report.ended == "interrupted" else report.ended or "ended in an unknown way"
    return f"the script {how}; this is what was observed before"


def run_text(report: ProfileReport) -> str:
    """Return how much was observed, e.g. `412 steps of 212 ms, 151 samples/s, 88.1 s in all`."""
    of = f" of {ms_text(report.step_ms)} ms" if report.steps else ""
    rate = finite(report.samples_per_s)
    words = [f"{count_text(report.steps, 'step')}{of}", "" if rate is None else f"{ms_text(rate)} samples/s"]
    if report.wall_s:
        words.append(f"{seconds_text(report.wall_s)} in all")
    if len(report.ranks) > 1:
        words.append(count_text(len(report.ranks), "rank"))
    return ", ".join(word for word in words if word)


def unattributed_text(report: ProfileReport) -> str:
    """Return how much of the wall time no phase accounts for."""
    share = "less than 0.1 %" if 0 <= report.unattributed < 0.001 else percent_text(report.unattributed)
    return f"{share} of the wall time belongs to no phase"


# --- findings and experiments ----------------------------------------------------------------------------------------


def effect_text(finding: Finding) -> str:
    """Return what the remedy saves and how that is known."""
    if finding.measured is not None:
        saving = saving_text(finding.measured)
        predicted = f" (predicted {percent_text(finding.predicted.value)})" if finding.predicted else ""
        if finding.confirmed:
            return f"saves {saving} of the step, confirmed by experiment{predicted}"
        return f"not confirmed: in the experiment it saved {saving} of the step{predicted}"
    if finding.predicted is not None:
        return f"predicted, {_why_predicted(finding.experiment)}: saves {saving_text(finding.predicted)} of the step"
    return "the saving can't be estimated from what was observed"


def _why_predicted(experiment: str) -> str:
    """Say why a saving is not measured, in brief."""
    if experiment.startswith("tried, too noisy"):
        return "too noisy to measure"
    return "tried only with another cause" if experiment.startswith("tried") else "not tried"


def cause_text(finding: Finding) -> str:
    """Format the cause's name and its share, e.g. `input.storage, 71 % of the step`."""
    share = f"{percent_text(finding.share)} of the step" if finding.share else ""
    return ", ".join(word for word in (finding.cause, share) if word)


def borderline_text(finding: Finding) -> str:
    """Say of what is no cause for sure what it would be, e.g. `borderline: input.cpu, 9 % of the step, …`."""
    saved = finding.predicted
    part = f", {percent_text(saved.value)} could be saved" if saved is not None and saved.value < finding.share else ""
    return f"borderline: {cause_text(finding)}{part}, too little to call it a cause for sure: {finding.title}"


def experiment_text(finding: Finding) -> str:
    """Return what the experiment did, or why there was none; empty if the report does not know."""
    if not finding.experiment or finding.experiment.startswith(("not tried", "could not be tried", "tried")):
        return finding.experiment
    return f"{'experiment' if finding.measured else 'no experiment'}: {finding.experiment}"


def outcome_text(experiment: Experiment) -> str:
    """Format an experiment's verdict, e.g. `helps`."""
    return OUTCOMES.get(experiment.verdict, experiment.verdict)


def gave_text(experiment: Experiment) -> str:
    """Return what an experiment saved, `-` where it switched nothing off."""
    return saving_text(None if experiment.verdict == "void" else experiment.saving)


def what_text(experiment: Experiment) -> str:
    """Return what an experiment changed, and that its steps were undone if they did not train as usual."""
    restored = "these steps did not train as usual; the state from before them was restored"
    return "; ".join(word for word in (experiment.what, restored if experiment.changes_learning else "") if word)


# --- evidence --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TreeRow:
    """One part of a step."""

    depth: int
    name: str
    ms: str
    share: float
    """Of the step, within 0…1."""
    percent: str
    """The share in words, rounded so that the parts of a node add up to what the node shows."""
    note: str


def tree(root: Node | None) -> list[TreeRow]:
    """List the evidence from the root down.

    Returns:
        Rows whose percentages add up as shown: the parts of a node to the node, the whole to 100.0 %. Where the
        shares themselves don't add up to within half a percent, they are shown as they are.
    """
    rows: list[TreeRow] = []
    stack: list[tuple[Node, int, int | None]] = []
    if root is not None:
        stack = [(root, 0, 1000 if abs(root.share - 1) <= _ADDS_UP else None)]
    while stack:
        node, depth, tenths = stack.pop()
        share = finite(node.share) or 0.0
        percent = percent_text(node.share) if tenths is None else f"{tenths / 10:.1f} %"
        rows.append(
            TreeRow(
                depth=depth,
                name=node.name,
                ms=ms_text(node.ms),
                share=min(max(share, 0.0), 1.0),
                percent=percent,
                note=node.note,
            )
        )
        parts = _split(tenths, node)
        stack += [(child, depth + 1, part) for child, part in zip(node.children, parts, strict=True)][::-1]
    return rows


def _split(tenths: int | None, node: Node) -> Sequence[int | None]:
    """Share a node's tenths of a percent out to its children, the rest of the rounding to the largest remainders."""
    shares = [child.share for child in node.children]
    total = finite(sum(shares)) or 0.0
    if tenths is None or total <= 0 or min(shares) < 0 or abs(total - node.share) > _ADDS_UP:
        return [None] * len(shares)
    exact = [tenths * share / total for share in shares]
    parts = [int(value) for value in exact]
    order = sorted(range(len(parts)), key=lambda n: parts[n] - exact[n])
    for n in order[: tenths - sum(parts)]:
        parts[n] += 1
    return parts


def phase_names(rows: Iterable[dict[str, float]]) -> list[str]:
    """List the phases that took any time, in the order of a step, unknown ones last."""
    names = dict.fromkeys(name for phases in rows for name, ms in phases.items() if (finite(ms) or 0.0) > 0)
    return [name for name in PHASES if name in names] + [name for name in names if name not in PHASES]


# --- operators, devices, host ----------------------------------------------------------------------------------------


def roof_share(op: OpTime, roofline: Roofline | None) -> float | None:
    """Return what an operator reached of what the device can give it; None if that is not known.

    With its intensity known, the roof is the lower of the highest matrix product and what the copied bytes allow;
    without it, GB/s are held against the copy. What is above that has another roof, which was not measured.
    """
    if roofline is None:
        return None
    if op.gflops is not None and op.intensity is not None:
        roof = min(_peak(roofline), op.intensity * roofline.gb_per_s)
        return finite(op.gflops / roof) if roof > 0 else None
    if op.gb_per_s is not None and roofline.gb_per_s > 0:
        return finite(op.gb_per_s / roofline.gb_per_s)
    return None


def _peak(roofline: Roofline) -> float:
    return max(roofline.gflops.values(), default=float("inf"))


def roof_share_text(op: OpTime, roofline: Roofline | None) -> str:
    """Format the same, e.g. `23 %`; `cached` or `above` where a roof that was measured is not the operator's."""
    share = roof_share(op, roofline)
    if share is None or roofline is None:
        return "-"
    if share > _AT_ROOF:
        return "above" if op.gflops is not None and op.gflops > _AT_ROOF * _peak(roofline) else "cached"
    # Times of tiny calls say no more than that, and a cell has seven columns.
    return "<0.1 %" if 0 < share < 0.001 else percent_text(min(share, 1.0))


def roof_notes(ops: Sequence[OpTime], roofline: Roofline | None) -> list[str]:
    """Explain the words in the column of roofs, if there are any."""
    texts = {roof_share_text(op, roofline) for op in ops}
    return [note for word, note in _ROOF_NOTES.items() if word in texts]


def roof_text(roofline: Roofline | None) -> str:
    """Format the measured limits of the device; empty if they were not measured."""
    if roofline is None:
        return ""
    products = ", ".join(f"{dtype} {ms_text(peak)} GFLOP/s" for dtype, peak in roofline.gflops.items())
    products = f"large matrix products reach {products}; " if products else ""
    return f"measured on this device: {products}a large copy {ms_text(roofline.gb_per_s)} GB/s"


def thread_text(share: ThreadShare | None) -> str:
    """Return how a thread spent its time; `-` if that is not known."""
    if share is None:
        return "-"
    parts = ((share.run, "on a core"), (share.wait, "waiting for a core"), (share.blocked, "asleep"))
    return ", ".join(f"{percent_text(value)} {word}" for value, word in parts)


def short_thread_text(share: ThreadShare | None) -> str:
    """Format the same in a few characters: run/wait/asleep in percent, e.g. `31/2/67`."""
    return "-" if share is None else "/".join(map(number_text, (share.run, share.wait, share.blocked)))


def gpu_text(gpu: GpuShare) -> list[tuple[str, str]]:
    """List what was seen of a GPU as (quantity, value)."""
    return [
        ("busy", percent_text(gpu.utilisation)),
        ("memory", f"{ms_text(gpu.memory_used_gib)} of {ms_text(gpu.memory_total_gib)} GiB"),
        ("power", _of(gpu.power_w, gpu.power_limit_w, "W")),
        ("clock", _of(gpu.clock_mhz, gpu.clock_max_mhz, "MHz")),
        ("PCIe in/out", _in_out(gpu)),
        ("throttled", ", ".join(gpu.throttled) or "no"),
    ]


def _of(value: float | None, limit: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{ms_text(value)} of {ms_text(limit)} {unit}" if limit is not None else f"{ms_text(value)} {unit}"


def _in_out(gpu: GpuShare) -> str:
    if gpu.pcie_rx_mb_per_s is None and gpu.pcie_tx_mb_per_s is None:
        return "-"
    return f"{ms_text(gpu.pcie_rx_mb_per_s)}/{ms_text(gpu.pcie_tx_mb_per_s)} MB/s"


def host_texts(host: HostFacts) -> list[tuple[str, str]]:
    """List how the run used its machine as (what, value), leaving out what is not known."""
    facts = [
        ("loader", host.loader),
        ("optimizer", host.optimizer),
        ("training thread", "" if host.thread is None else thread_text(host.thread)),
        *((f"worker {n}", thread_text(share)) for n, share in enumerate(host.workers, start=1)),
        ("other processes", "" if host.foreign_cores is None else f"kept {ms_text(host.foreign_cores)} cores busy"),
    ]
    return [(name, text) for name, text in facts if text]

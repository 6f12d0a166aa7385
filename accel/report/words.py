"""The words of every report: numbers with their units, texts made safe to show, and what a run or a profile says."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from accel.profiler.evidence import GpuShare, OpTime, Roofline, ThreadShare
from accel.profiler.phases import PHASES
from accel.profiler.report import Finding, HostFacts, MachineFacts, Node, ProfileReport, Saving
from accel.report.report import Report, StrategyRow

_AT_ROOF = 1.05
"""Share of a roof up to which an operator counts as at it: both are measured."""
_ROOF_NOTES = {
    "cached": "cached: faster than a large copy, so its data lay in a cache, whose roof was not measured",
    "above": "above: faster than the large matrix product that was measured; it ran while the device was slower, or in "
    "another precision",
}


def clean(text: object, keep: str = "") -> str:
    """Return `text` without characters that would move the cursor, break a line or turn the writing direction.

    Args:
        text: anything; it is turned into a string.
        keep: characters to leave alone, e.g. a newline.

    Returns:
        The text on one line (but for `keep`): white space becomes a space; control, format and surrogate characters go.
    """
    return "".join(char if char in keep else _harmless(char) for char in str(text))


def _harmless(char: str) -> str:
    if char.isspace():
        return " "
    return "" if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} else char


def finite(value: float | None) -> float | None:
    """Return `value`, or None if it is missing, infinite or not a number."""
    return None if value is None or not math.isfinite(value) else value


def ms_text(value: float | None) -> str:
    """Format a number, such as ms, with three digits, without an exponent where none is expected; `-` when missing."""
    value = finite(value)
    if value is None:
        return "-"
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def seconds_text(value: float) -> str:
    """Format a cost in seconds, e.g. `0.8 s`."""
    return f"{value:.1f} s" if 0.05 <= abs(value) < 1e5 else f"{value:.2g} s"


def count_text(number: int, noun: str) -> str:
    """Format a number of things, e.g. `2 cores`."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    return noun + ("es" if noun.endswith("s") else "s")


def number_text(share: float | None) -> str:
    """Format a share as a number of percent, e.g. `67`; with two digits below one percent; `-` when missing."""
    value = finite(None if share is None else 100 * share)
    if value is None:
        return "-"
    return f"{value:.2g}" if 0 < abs(value) < 0.95 else str(round(value)) if abs(value) < 1e4 else f"{value:.3g}"


def percent_text(share: float | None) -> str:
    """Format a share in percent, e.g. `67 %`; `-` when missing."""
    text = number_text(share)
    return text if text == "-" else f"{text} %"


def ratio_text(value: float) -> str:
    """Format a ratio with two decimals, e.g. `1.31`."""
    return f"{value:.2f}" if abs(value) < 1e4 else f"{value:.3g}"


def gain_text(gain: float | None, low: float | None, high: float | None) -> str:
    """Format a speed-up with its confidence interval, e.g. `1.31x [1.27, 1.35]`; `-` when there is none."""
    gain, low, high = finite(gain), finite(low), finite(high)
    if gain is None:
        return "-"
    return f"{ratio_text(gain)}x" + ("" if low is None or high is None else f" [{ratio_text(low)}, {ratio_text(high)}]")


def machine_text(machine: MachineFacts, processes: int = 0) -> str:
    """Format where the numbers were measured: device, cores, threads, processes and versions."""
    counts = [(machine.cores, "core"), (machine.threads, "thread"), (processes, "process")]
    versions = [("Python", machine.python), ("torch", machine.torch), ("accel", machine.accel)]
    words = [machine.device or "device not known", *(count_text(n, noun) for n, noun in counts if n), machine.platform]
    return ", ".join([word for word in words if word] + [f"{name} {version}" for name, version in versions if version])


# --- the run under accel.optimize ------------------------------------------------------------------------------------


def run_verdict_text(report: Report) -> str:
    """Return the outcome in one line, speed first."""
    if report.state == "replayed" and report.speedup is None:
        return f"replayed without a trial: {', '.join(report.plan) or 'nothing of the plan applies here'}"
    if report.speedup is None or report.plain_ms is None or report.accel_ms is None:
        return _without_speedup_text(report)
    if not report.plan:
        if any(row.status in ("undone", "inconclusive") for row in report.rows):
            why = "nothing tried made the step faster"
        else:
            why = "no trial came to a verdict" if any(row.steps for row in report.rows) else "nothing was tried"
        return f"left as it was: {why} ({ms_text(report.plain_ms)} ms)"
    same = f", {report.training_same}" if report.training_same else ""
    whole = gain_text(report.speedup, report.speedup_low, report.speedup_high)
    if not report.is_settled:
        alone = kept_text(report)
        return f"at least {report.speedup_low:.2f}x, not settled: {whole} as a whole; each alone: {alone}"
    return f"{whole}: {throughput_text(report)}{same}"


def _without_speedup_text(report: Report) -> str:
    """Say why the whole has not been compared with the plain loop, and what was kept in trials of its own."""
    kept = kept_text(report)
    so_far = f"; kept in trials of their own, not yet compared as a whole: {kept}" if kept else ""
    if report.state == "searching":
        return f"no verdict yet: {report.steps} steps seen, the search has not ended{so_far}"
    if report.state == "interrupted":
        return f"no verdict: the run ended after {report.steps} steps, before the search did{so_far}"
    if report.state == "undone":
        return f"no verdict: accel was undone after {report.steps} steps{so_far}"
    if not kept:
        return "left as it was: nothing is kept"
    alone = f"what is kept now was not compared with the plain loop again; each alone: {kept}"
    return f"no speed-up of the whole: {alone}"


def kept_text(report: Report) -> str:
    """Return what was kept in trials of its own, with its gains, in one line."""
    rows = (row for row in report.rows if row.status == "kept")
    gains = (f"{row.name} {gain_text(row.gain, row.gain_low, row.gain_high)}" for row in rows)
    return ", ".join(gain.removesuffix(" -") for gain in gains)


def throughput_text(report: Report) -> str:
    """Return samples a second, or else ms per step, without and with the plan; both must be known."""
    assert report.plain_ms is not None and report.accel_ms is not None
    if report.samples_per_step and report.plain_ms > 0 and report.accel_ms > 0:
        before, after = (1e3 * report.samples_per_step / ms for ms in (report.plain_ms, report.accel_ms))
        return f"{ms_text(before)} → {ms_text(after)} samples/s"
    return f"{ms_text(report.plain_ms)} → {ms_text(report.accel_ms)} ms per step"


def step_text(row: StrategyRow) -> str:
    """Format the step before and after a strategy in ms, e.g. `26.6 → 18.4 ± 0.3`; `-` when it was not measured."""
    if finite(row.before_ms) is None and finite(row.after_ms) is None:
        return "-"
    spread = finite(row.spread_ms)
    tail = "" if spread is None else f" ± {spread:.2g}" if abs(spread) < 100 else f" ± {ms_text(spread)}"
    return f"{ms_text(row.before_ms)} → {ms_text(row.after_ms)}{tail}"


def numerics_text(row: StrategyRow) -> str:
    """Return how far outputs and gradients are from plain, e.g. `3e-07/2e-06`; `same bits` for no difference."""
    output, gradient = _error_text(row.output_error), _error_text(row.gradient_error)
    return output if output == gradient else f"{output}/{gradient}"


def _error_text(value: float | None) -> str:
    value = finite(value)
    return "-" if value is None else "same bits" if value == 0 else f"{value:.1g}"


def interval_text(report: Report) -> str:
    """Format the confidence interval of the speed-up as ratios and as percentages of more steps a second."""
    low, high = finite(report.speedup_low), finite(report.speedup_high)
    if low is None or high is None:
        return "confidence interval not known"
    more = " to ".join(f"{100 * (end - 1):+.3g} %" for end in (low, high))
    return f"confidence interval [{ratio_text(low)}x, {ratio_text(high)}x], that is {more} steps a second"


def pay_back_text(report: Report) -> str:
    """Return when the search has paid, or will have paid, for itself."""
    if report.break_even_step is not None:
        return f"{'paid' if report.steps >= report.break_even_step else 'pays'} back at step {report.break_even_step}"
    if report.search_s <= 0:
        return "nothing to pay back"
    if report.state == "searching":
        return "not known yet when it pays back"
    if report.speedup is None:
        return "not known when it pays back"
    return "does not pay back"


def search_text(report: Report) -> str:
    """Return what the search took and when it pays back, in one sentence."""
    trials = f"{report.search_steps} of {report.steps} steps were trial steps"
    return f"{trials}, cost {seconds_text(report.search_s)}; {pay_back_text(report)}"


def offers_text(report: Report) -> str:
    """Return what a wider `allow` would give; '' if nothing is known."""
    if not report.offers:
        return ""
    (first, gain), *others = report.offers.items()
    more = "".join(f", {gain:.1f}x ({name})" for name, gain in others)
    return f"allow='reduced' would make a step about {gain:.1f}x as fast ({first}){more}"


def limit_text(report: Report, *, remedy: bool = True) -> str:
    """Return what limits the run now, its share of the step and, with `remedy`, what would treat it."""
    if not report.bottleneck:
        return "not known"
    share = finite(report.bottleneck_share)
    part = "" if share is None else f", {100 * share:.0f} % of the step"
    advice = report.bottleneck_advice if remedy else report.bottleneck_advice.partition(": ")[0]
    return f"{report.bottleneck}{part}" + (f"; {advice}" if advice else "")


def model_text(report: Report) -> str:
    """Return which model ran and what accel was allowed to do."""
    words = [report.model or "model not known", f"{report.parameters:,} parameters" if report.parameters else ""]
    words += [f"{name} {value}" for name, value in (("allow", report.allow), ("budget", report.budget)) if value]
    return ", ".join(word for word in words if word)


def name_text(row: StrategyRow) -> str:
    """Return a strategy's name and its setting."""
    return f"{row.name} {row.setting}".strip()


def batch_text(report: Report) -> str:
    """Return how the batch size has changed and what that is worth, in one sentence; '' if it stays."""
    if report.max_batch_size is None or not report.batch_rows:
        return report.batch_note
    first, last = report.batch_rows[0], report.batch_rows[-1]
    if report.batch_note:
        return f"{last.batch} samples; {report.batch_note}"
    if first.batch == last.batch:
        return f"{last.batch} samples, as the loop has it: no larger one was shown to be better"
    gain = ""
    if first.measured and last.measured:
        gain = f", {ratio_text(last.measured / first.measured)}x the estimated goodput"
    return f"{first.batch} → {last.batch} samples{gain}"


# --- a profile --------------------------------------------------------------------------------------------------------


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
    parts = [f"{count_text(report.steps, 'step')}{of}", "" if rate is None else f"{ms_text(rate)} samples/s"]
    if report.wall_s:
        parts.append(f"{seconds_text(report.wall_s)} in all")
    if len(report.ranks) > 1:
        parts.append(count_text(len(report.ranks), "rank"))
    return ", ".join(part for part in parts if part)


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
    if experiment.startswith("tried, inconclusive"):
        return "inconclusive"
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


# --- evidence --------------------------------------------------------------------------------------------------------


def tree(node: Node, depth: int = 0) -> Iterator[tuple[int, Node]]:
    """Yield the evidence from a node down, each part with its depth."""
    yield depth, node
    for child in node.children:
        yield from tree(child, depth + 1)


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


def gpu_text(gpu: GpuShare) -> list[tuple[str, str]]:
    """List what was seen of a GPU as (quantity, value)."""
    rates = (gpu.pcie_rx_mb_per_s, gpu.pcie_tx_mb_per_s)
    return [
        ("busy", percent_text(gpu.utilisation)),
        ("memory", f"{ms_text(gpu.memory_used_gib)} of {ms_text(gpu.memory_total_gib)} GiB"),
        ("power", _of(gpu.power_w, gpu.power_limit_w, "W")),
        ("clock", _of(gpu.clock_mhz, gpu.clock_max_mhz, "MHz")),
        ("PCIe in/out", "-" if rates == (None, None) else f"{'/'.join(map(ms_text, rates))} MB/s"),
        ("throttled", ", ".join(gpu.throttled) or "no"),
    ]


def _of(value: float | None, limit: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{ms_text(value)} of {ms_text(limit)} {unit}" if limit is not None else f"{ms_text(value)} {unit}"


def host_texts(host: HostFacts) -> list[tuple[str, str]]:
    """List how the run used its machine as (what, value), leaving out what is not known."""
    facts = [
        ("loader", host.loader),
        ("optimizer", host.optimizer),
        ("training thread", "" if host.thread is None else thread_text(host.thread)),
        *((f"worker {n}", thread_text(share)) for n, share in enumerate(host.workers, start=1)),
        (
            "other processes",
            "" if host.foreign_cores is None else f"kept {ms_text(round(host.foreign_cores, 2))} cores busy",
        ),
    ]
    return [(name, text) for name, text in facts if text]

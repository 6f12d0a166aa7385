"""Do the numbers of a report agree: with one another, as they are, as they are shown, and in all its three forms?"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from accel.profiler import report as schema
from accel.profiler.diagnose.findings import BATCHES, OWN_CODE, PhaseShares
from accel.profiler.report import Node, ProfileReport
from accel.report import Report, words
from accel.report.rendering import as_page, as_text
from accel.report.words import limit_text, step_text
from tests.accel.pages import Page

_NUMBER = r"(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)"
_ARROW = re.compile(rf"{_NUMBER} → {_NUMBER}")
_GAIN = re.compile(rf"{_NUMBER}x")
_PERCENT = re.compile(rf"{_NUMBER} %")


def _on_page(page: str) -> str:
    return Page(page).text()


def _squeezed(text: str) -> str:
    """Without white space and capitals: where a line breaks, or a page begins a sentence, says nothing."""
    return "".join(text.split()).casefold()


def shown_ratio(before: str, after: str) -> tuple[float, float]:
    """Return the least and the greatest ratio of two numbers that are shown like this."""
    (a, half_a), (b, half_b) = (_read(text) for text in (before, after))
    low, high = max(0.0, a - half_a) / (b + half_b), (a + half_a) / max(b - half_b, 1e-12)
    return low, high


def _read(text: str) -> tuple[float, float]:
    """Return a number and half of its last digit."""
    plain = text.replace(",", "")
    digits, _, power = plain.partition("e")
    decimals = len(digits.partition(".")[2])
    return float(plain), 0.5 * 10.0 ** (int(power or 0) - decimals) * 1.001


def _fits(gain: str, before: str, after: str, *, rate: bool = False) -> bool:
    value, half = _read(gain)
    low, high = shown_ratio(after, before) if rate else shown_ratio(before, after)
    return low <= value + half and value - half <= high


# -- a run under accel.optimize ----------------------------------------------------------------------------------------


def of_report(report: Report, *, forms: bool = True) -> list[str]:
    """Return the contradictions in a report of `accel.optimize`.

    Args:
        report: the report.
        forms: also hold its texts against one another; that renders it twice.
    """
    found = [*_one_estimate(report), *_anatomies(report), *_limit(report), *_plan(report), *_told(report)]
    return found + (list(_shown(report)) if forms else [])


def _one_estimate(report: Report) -> Iterator[str]:
    trials = [("the run", report.plain_ms, report.accel_ms, report.speedup, report.speedup_low, report.speedup_high)]
    trials += [(r.name, r.before_ms, r.after_ms, r.gain, r.gain_low, r.gain_high) for r in report.rows]
    for name, before, after, gain, low, high in trials:
        if before is not None and after is not None and gain is not None:
            texts = words.gain_text(gain, None, None), words.ms_text(before), words.ms_text(after)
            if not _fits(texts[0].rstrip("x"), *texts[1:]):
                yield f"{name}: {texts[0]} beside {texts[1]} → {texts[2]} ms"
        if low is not None and high is not None and gain is not None and not low <= gain <= high:
            yield f"{name}: {gain} outside [{low}, {high}]"


def _anatomies(report: Report) -> Iterator[str]:
    for name, part, step in (
        ("before", report.anatomy_before, report.plain_ms),
        ("after", report.anatomy_after, report.accel_ms),
    ):
        total = sum(part.values())
        if step is not None and part and not math.isclose(total, step, rel_tol=0.01):
            yield f"the anatomy {name} adds up to {total:.3g} ms, the step takes {step:.3g}"


def _limit(report: Report) -> Iterator[str]:
    total = sum(report.anatomy_after.values())
    if report.bottleneck in report.anatomy_after and report.bottleneck_share is not None and total > 0:
        share = report.anatomy_after[report.bottleneck] / total
        if abs(share - report.bottleneck_share) > 0.01:
            yield f"{report.bottleneck} limits by {report.bottleneck_share:.0%}, its phase takes {share:.0%}"
    if report.bottleneck_share is not None and not 0 <= report.bottleneck_share <= 1:
        yield f"{report.bottleneck} is {report.bottleneck_share:.0%} of the step"


def _plan(report: Report) -> Iterator[str]:
    kept = {row.name for row in report.rows if row.status == "kept"}
    if report.state in ("done", "replayed") and kept != set(report.plan):
        yield f"{sorted(kept)} were kept, the plan holds {sorted(report.plan)}"
    # What is left of a plan is compared with the plain loop at the next boundary.
    if report.state == "done" and report.speedup is None and not any(" undone: " in e.text for e in report.events):
        yield f"the search is done and there is {report.verdict()}"
    if report.break_even_step is not None and (report.speedup or 0.0) <= 1.0:
        yield f"it pays back at step {report.break_even_step} with a speed-up of {report.speedup}"


def _told(report: Report) -> Iterator[str]:
    verdict = report.verdict()
    found, arrow = _GAIN.search(verdict), _ARROW.search(verdict)
    if found and arrow and not _fits(found[1], arrow[1], arrow[2], rate="samples/s" in verdict):
        yield f"the verdict contradicts itself: {verdict}"


def _shown(report: Report) -> Iterator[str]:
    text, page = as_text(report, width=100, color=False), _on_page(as_page(report))
    if json.loads(report.to_json())["plain_ms"] != report.plain_ms:
        yield "the JSON has another plain step"
    cells = [step_text(row) for row in report.rows]
    cells += [words.gain_text(row.gain, row.gain_low, row.gain_high) for row in report.rows]
    parts = [report.verdict(), limit_text(report)]
    parts += [word for cell in cells for word in cell.split()]  # a cell may take two lines, beside other cells
    for part in parts:
        for where, whole in (("terminal", text), ("page", page)):
            if _squeezed(words.clean(part)) not in _squeezed(whole):
                yield f"the {where} lacks {part!r}"


# -- a profiled run ----------------------------------------------------------------------------------------------------


def of_profile(report: ProfileReport) -> list[str]:
    """Return the contradictions in a profile report."""
    return [*_sums(report), *_claims(report), *_trials(report), *roofs(report), *_forms(report)]


def _sums(report: ProfileReport) -> Iterator[str]:
    if report.evidence is not None:
        yield from _tree(report.evidence)
        if not math.isclose(report.evidence.ms, report.step_ms, rel_tol=1e-6):
            yield f"the tree is of a step of {report.evidence.ms} ms, the report of one of {report.step_ms}"
    for row in report.ranks:
        total = sum(row.phases_ms.values())
        if not math.isclose(total, row.step_ms, rel_tol=1e-3):
            yield f"the phases of rank {row.rank} add up to {total:.4g} ms of {row.step_ms:.4g}"
    for step in report.timeline:
        if sum(step.phases_ms.values()) > step.ms * 1.001:
            yield f"the phases of step {step.step} add up to more than it"
    for what, shares in (("operators", [op.share for op in report.ops]), *_by_phase(report)):
        if sum(shares) > 1.001:
            yield f"the shares of {what} add up to {sum(shares):.0%}"


def _by_phase(report: ProfileReport) -> list[tuple[str, list[float]]]:
    phases = {row.phase for row in report.lines}
    return [(f"lines in {phase}", [row.share for row in report.lines if row.phase == phase]) for phase in phases]


def _tree(node: Node) -> Iterator[str]:
    if node.children and not math.isclose(sum(c.ms for c in node.children), node.ms, rel_tol=0.005, abs_tol=1e-9):
        yield f"the parts of {node.name} add up to {sum(c.ms for c in node.children):.4g} ms of {node.ms:.4g}"
    for child in node.children:
        yield from _tree(child)


def shown_shares(root: Node) -> PhaseShares:
    """Return the shares that the evidence tree of a report shows."""
    parts = {
        name: {phase.name: part.share for phase in root.children for part in phase.children if part.name == name}
        for name in (BATCHES, OWN_CODE)
    }
    return PhaseShares(shares={phase.name: phase.share for phase in root.children}, parts=parts)


def _claims(report: ProfileReport) -> Iterator[str]:
    held = None if report.evidence is None else shown_shares(report.evidence)
    for finding in report.findings:
        room = 1.0 if held is None else held.room(finding.cause)
        if finding.share > room + 1e-6:
            yield f"{finding.cause} takes {finding.share:.0%}, its phases hold {room:.0%}"
        for saving in (finding.predicted, finding.measured):
            if saving is not None and not saving.low <= saving.value <= saving.high:
                yield f"{finding.cause} saves {saving}"
            if saving is not None and saving.value > room + 1e-6:
                yield f"{finding.cause} saves {saving.value:.0%}, its phases hold {room:.0%}"
    if report.refused:
        return
    if report.findings and report.findings[0].cause not in report.verdict:
        yield f"the verdict is not about {report.findings[0].cause}: {report.verdict}"
    if report.findings and report.findings[0].bottleneck != report.bottleneck:
        yield f"{report.findings[0].cause} is of {report.findings[0].bottleneck}, the report says {report.bottleneck}"


def _trials(report: ProfileReport) -> Iterator[str]:
    for tried in report.experiments:
        saved = 1 - tried.after_ms / tried.before_ms if tried.before_ms else 0.0
        if abs(saved - tried.saving.value) > 0.005:
            yield f"{tried.name}: {tried.before_ms} → {tried.after_ms} ms, and it saves {tried.saving.value:.1%}"


def roofs(report: ProfileReport) -> Iterator[str]:
    """Yield the operators above their roof, and those of whom a word is not explained."""
    for op in report.ops:
        said = words.roof_share_text(op, report.roofline)
        found = _PERCENT.search(said)
        if found and float(found[1]) > 100:
            yield f"{op.name} is at {said} of its roof"
        if not found and said != "-" and not words.roof_notes([op], report.roofline):
            yield f"{op.name}: {said} is explained nowhere"


def _forms(report: ProfileReport) -> Iterator[str]:
    if schema.from_json(report.to_json()) != report:
        yield "the JSON is another report"
    text, page = as_text(report, width=100, color=False), _on_page(as_page(report))
    parts = [words.verdict_text(report), words.unattributed_text(report)]
    for finding in report.findings:
        parts += [finding.title, words.effect_text(finding), *finding.why]
    if report.evidence is not None:
        parts += [f"{100 * node.share:.1f} %" for _, node in words.tree(report.evidence)]
    cells = [words.roof_share_text(op, report.roofline) for op in report.ops]
    parts += [word for cell in cells for word in cell.split()]
    parts += words.roof_notes(report.ops, report.roofline)
    for part in parts:
        for where, whole in (("terminal", text), ("page", page)):
            if _squeezed(words.clean(part)) not in _squeezed(whole):
                yield f"the {where} lacks {part!r}"

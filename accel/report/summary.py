"""What a run prints when its search ends: a handful of lines. The whole report is there on request."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from accel.report.model import NOTHING_REMEMBERED, RunReport
from accel.report.terminal import Page
from accel.report.words import (
    batch_text,
    gain_text,
    limit_text,
    name_text,
    offers_text,
    run_verdict_text,
    search_text,
    throughput_text,
)


def summary(report: RunReport, whole: str) -> str:
    """Return the outcome of a search in at most six sentences, the speed-up first, for stderr.

    Args:
        report: of a search that has ended.
        whole: how to see the whole report.
    """
    page = Page(stream=sys.stderr)
    page.paragraph(f"accel: {report.model} {_headline(report)}", "bold green" if report.plan else "bold")
    for sentence in _sentences(report):
        page.paragraph(sentence, indent=2)
    page.paragraph(f"all strategies: {whole}", indent=2)
    return page.text()


def _headline(report: RunReport) -> str:
    if not report.plan or report.speedup is None or not report.is_settled:
        return run_verdict_text(report)
    return f"{gain_text(report.speedup, report.speedup_low, report.speedup_high)}: {throughput_text(report)}"


def _sentences(report: RunReport) -> Iterator[str]:
    if report.plan:
        yield f"training the same: {report.training_same or 'not known'}"
        if report.state != "replayed":  # its verdict names them
            yield f"kept: {', '.join(name_text(row) for row in report.rows if row.status == 'kept')}"
    else:
        yield _tried_text(report)
    if text := batch_text(report):
        yield f"batch size: {text}"
    yield f"limits the run now: {limit_text(report, remedy=False)}"
    yield f"search: {search_text(report)}"
    if text := offers_text(report):
        yield text
    if report.cache.startswith(NOTHING_REMEMBERED):
        yield report.cache


def _tried_text(report: RunReport) -> str:
    off = [row for row in report.rows if row.status in ("undone", "inconclusive")]
    tried = ", ".join(f"{name_text(row)} ({row.why})" for row in off)
    untried = ", ".join(row.name for row in report.rows if row.status == "not tried")
    if not untried:
        return f"tried: {tried or 'nothing, no strategy fits this run'}"
    return f"tried: {tried or 'nothing'}; not tried: {untried}"

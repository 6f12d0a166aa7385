"""What a run prints when its search ends: a handful of lines. The whole report is there on request."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from accel.report.batch_section import batch_text
from accel.report.model import NOTHING_REMEMBERED, Report
from accel.report.optimize_document import limit_text, name_text, search_text
from accel.report.terminal import Page
from accel.report.words import gain_text


def summary(report: Report, whole: str) -> str:
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


def _headline(report: Report) -> str:
    if not report.plan or report.speedup is None or not report.is_settled:
        return report.verdict()
    return f"{gain_text(report.speedup, report.speedup_low, report.speedup_high)}: {report.throughput()}"


def _sentences(report: Report) -> Iterator[str]:
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
    if report.cache.startswith(NOTHING_REMEMBERED):
        yield report.cache


def _tried_text(report: Report) -> str:
    tried = ", ".join(f"{name_text(row)} ({row.why})" for row in report.rows if row.status in ("undone", "refused"))
    untried = ", ".join(row.name for row in report.rows if row.status == "not tried")
    if not untried:
        return f"tried: {tried or 'nothing, no strategy fits this run'}"
    return f"tried: {tried or 'nothing'}; not tried: {untried}"

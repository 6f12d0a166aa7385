"""A report of either kind as text or as a web page."""

from __future__ import annotations

from dataclasses import replace
from typing import TextIO

from accel.profiler.report import ProfileReport
from accel.report import optimize_document, profile_document, terminal
from accel.report.blocks import Document
from accel.report.model import RunReport


def document(report: RunReport | ProfileReport) -> Document:
    """Return what a report shows, ready to be laid out."""
    return (
        profile_document.document(report) if isinstance(report, ProfileReport) else optimize_document.document(report)
    )


def as_text(
    report: RunReport | ProfileReport, width: int | None = None, color: bool | None = None, stream: TextIO | None = None
) -> str:
    """Render a report for a terminal or a log; see `terminal.render`."""
    return terminal.render(document(report), width, color, stream)


def as_verdict(report: RunReport | ProfileReport, stream: TextIO | None = None) -> str:
    """Render the first line of a report alone."""
    return terminal.render(replace(document(report), lead=(), sections=()), stream=stream)


def as_page(report: RunReport | ProfileReport) -> str:
    """Render a report as one self-contained web page."""
    # Imported here: a report on a terminal needs no jinja2.
    from accel.report.page import render

    return render(document(report))

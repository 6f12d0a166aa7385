"""A report of either kind as text or as a web page."""

from __future__ import annotations

from dataclasses import replace
from typing import TextIO

from accel.profiler.report import ProfileReport
from accel.report import optimize_document, profile_document, terminal
from accel.report.blocks import Card, Document, Section, Table
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


def as_brief(report: ProfileReport, stream: TextIO | None = None) -> str:
    """Render what a profiled run prints: the verdict, the first cause, what to do next and the phases of a step."""
    whole = document(report)
    sections = [_brief(section) for section in whole.sections if section.name in ("why", "next", "anatomy")]
    return terminal.render(replace(whole, sections=sections), stream=stream)


def _brief(section: Section) -> Section:
    """Return a section with its first card alone, and without the parts of phases."""
    cards = [block for block in section.blocks if isinstance(block, Card)]
    shown = [block for block in section.blocks if block not in cards[1:]]
    return replace(section, blocks=[_phases_alone(block) if isinstance(block, Table) else block for block in shown])


def _phases_alone(table: Table) -> Table:
    return replace(table, rows=[row for row in table.rows if row.depth < 2])


def as_page(report: RunReport | ProfileReport) -> str:
    """Render a report as one self-contained web page."""
    # Imported here: a report on a terminal needs no jinja2.
    from accel.report.page import render

    return render(document(report))

"""A report of either kind as text or as a web page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from accel.profiler.report import ProfileReport
from accel.report import optimize_document, profile_document, terminal
from accel.report.blocks import SIGNS, Card, Document, Section, Table
from accel.report.pictures import shade
from accel.report.report import Report
from accel.report.words import clean, percent_text

if TYPE_CHECKING:
    from jinja2 import Environment

_SMALL = 0.01
"""Share of the step below which a phase has no line of its own where the report is brief."""


def document(report: Report | ProfileReport) -> Document:
    """Return what a report shows, ready to be laid out."""
    return (
        profile_document.document(report) if isinstance(report, ProfileReport) else optimize_document.document(report)
    )


def as_text(
    report: Report | ProfileReport, width: int | None = None, color: bool | None = None, stream: TextIO | None = None
) -> str:
    """Render a report for a terminal or a log; see `terminal.render`."""
    return terminal.render(document(report), width, color, stream)


def as_brief(report: ProfileReport, stream: TextIO | None = None) -> str:
    """Render what a profiled run prints in 25 to 30 lines: verdict, first cause, what to do, main phases."""
    whole = document(report)
    cards = [block for section in whole.sections for block in section.blocks if isinstance(block, Card)]
    remedies = {remedy for _, remedy in cards[0].remedies} if cards else set()
    names = ("why", "anatomy") if remedies.issuperset(report.next) else ("why", "next", "anatomy")
    sections = [_brief(section, cards[1:], report) for section in whole.sections if section.name in names]
    return terminal.render(replace(whole, sections=sections), stream=stream)


def _brief(section: Section, left_out: Sequence[Card], report: ProfileReport) -> Section:
    shown = [block for block in section.blocks if block not in left_out]
    return replace(
        section, blocks=[_main_phases(block, report) if isinstance(block, Table) else block for block in shown]
    )


def _main_phases(table: Table, report: ProfileReport) -> Table:
    """Return the rows of phases, without their parts; those of less than 1 % of the step are only named."""
    small = [node.name for node in report.evidence.children if node.share < _SMALL] if report.evidence else []
    rows = [row for row in table.rows if row.depth < 2 and (row.depth == 0 or row.cells[0].text not in small)]
    more = f"less than {percent_text(_SMALL)} each: {', '.join(small)}" if small else ""
    return replace(table, rows=rows, more=more)


def as_page(report: Report | ProfileReport) -> str:
    """Render a report as one self-contained web page, light and dark: no network, no scripts, any text literally.

    `page.html.j2` lays the blocks of its document out.
    """
    return _environment().get_template("page.html.j2").render(document=document(report), signs=SIGNS)


@cache
def _environment() -> Environment:
    """Return the templates, which show any text literally and `-` for a missing value."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # a report on a terminal needs none

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters |= {"shade": shade, "sentence": _sentence}
    environment.tests["block"] = lambda block, kind: type(block).__name__ == kind
    return environment


def _sentence(text: str) -> str:
    """Begin a text with a capital letter, unless it begins with a unit."""
    return text if text.startswith("ms") else text[:1].upper() + text[1:]


def _finalize(value: Any) -> Any:
    """Make a value safe to be escaped and shown; output of macros is safe already."""
    if value is None:
        return "-"
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return clean(value, keep="\n")
    return value

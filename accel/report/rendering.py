"""A report of either kind as text or as a web page."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from accel.profiler.report import ProfileReport
from accel.report import optimize_document, profile_document, terminal
from accel.report.blocks import SIGNS, Card, Document, Section, Table
from accel.report.pictures import shade
from accel.report.report import Report
from accel.report.words import clean

if TYPE_CHECKING:
    from jinja2 import Environment


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


def as_page(report: Report | ProfileReport) -> str:
    """Render a report as one self-contained web page, light and dark: no network, no scripts, any text literally.

    `page.html.j2` lays the blocks of its document out, `pictures.html.j2` draws its pictures.
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

"""The contents of a report as data: sections of texts, lists, facts, tables and pictures.

The reports of `accel.optimize` and of `accel profile` are made into a `Document` each; `terminal.py` and `page.html.j2`
lay any document out, and know nothing of reports.

Tones are `good`, `bad`, `warn`, `idle` and `strong`: styles of a terminal, classes of a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from accel.profiler.report import ReportHead
from accel.report.words import plural

SIGNS = {"good": "✓", "bad": "✗", "warn": "?", "idle": "○"}
"""Tone → sign with the same meaning, for output without colour."""


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """One sentence or clause, without a full stop."""

    text: str
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Texts below one another."""

    items: Sequence[str]
    mark: str = "- "
    """Prefix of each item on a terminal; `1. ` numbers them everywhere."""
    latest: int = 0
    """How many of the last items a terminal shows, 0 for all."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Names with their values; those without a value are left out."""

    pairs: Sequence[tuple[str, str]]
    verbatim: bool = False
    """To be copied, like a command."""


class Shape(NamedTuple):
    """An element of a picture, as in SVG."""

    tag: str
    attributes: Mapping[str, object]
    """None leaves one out."""
    text: str = ""
    tooltip: str = ""
    inside: Sequence[Shape] = ()


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing on a page."""

    name: str
    """Unique in the document."""
    title: str
    text: str = ""
    """What it shows, in words."""
    height: float
    """Pixels."""
    framed: bool = False
    """Labels of its axes are outside of it."""
    shapes: Sequence[Shape]
    legend: Sequence[tuple[str, str]] = ()
    """(fill class, meaning)."""


class TableColumn(NamedTuple):
    """A column of a table."""

    title: str
    left: bool
    """Contains words, not numbers: aligned left."""
    only: Literal["", "terminal", "page"] = ""
    """Where it is shown; '' is on both."""


def columns(*specs: str, only: Literal["", "terminal", "page"] = "") -> list[TableColumn]:
    """Return columns from their title and `<` for words or `>` for numbers, e.g. `phase<`."""
    return [TableColumn(spec[:-1], spec[-1] == "<", only) for spec in specs]


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """One cell of a table."""

    text: str
    short: str | None = None
    """What a terminal shows instead of `text`."""
    tone: str = ""
    sign: str = ""
    """On a page, a sign before the text, so that it needs no colour."""
    key: int = 0
    """On a page, the number and colour of a phase stand before the text; 0 is none."""
    small: Sequence[str] = ()
    """On a page, more in small letters below the text."""
    bar: Sequence[Shape] = ()
    """On a page, drawn in place of the text."""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row of a table, with a cell for each column."""

    cells: Sequence[TableCell]
    depth: int = 0
    """How far the first cell is moved to the right."""
    page_only: bool = False
    """A terminal has no room for it."""


def row(*parts: str | TableCell, tone: str = "", depth: int = 0) -> TableRow:
    """Return a row; a text becomes a cell with a tone."""
    cells = [part if isinstance(part, TableCell) else TableCell(text=part, tone=tone) for part in parts]
    return TableRow(cells=cells, depth=depth)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns with titles, and rows."""

    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]
    more: str = ""
    """A note on a terminal that rows are left out."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One cause: its title, the saving of removing it, the evidence and the remedy."""

    number: int
    title: str
    cause: str
    effect: str
    tone: str
    evidence: Sequence[str]
    remedies: Sequence[tuple[str, str]]
    """(who or what, what to do)."""


Block = Paragraph | Listing | Facts | Table | Card | Picture


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report under a heading."""

    name: str
    """Unique in the document; one word."""
    title: str
    blocks: Sequence[Block] = ()


@dataclass(frozen=True, kw_only=True)
class Document:
    """A report, ready to be laid out."""

    kind: str
    """First words, e.g. `accel`."""
    verdict: str
    tone: str
    lead: Sequence[Paragraph]
    """Lines below the verdict."""
    model: str = ""
    started: str = ""
    mark: str = ""
    """The state of a run that has not finished."""
    sections: Sequence[Section] = ()


def tabled(name: str, title: str, table: Table, *more: Block) -> Iterator[Section]:
    """Yield a section with a table and what follows it, unless it has no rows."""
    if table.rows:
        yield Section(name=name, title=title, blocks=[table, *more])


def listed(name: str, title: str, listing: Listing) -> Iterator[Section]:
    """Yield a section with a list, unless it is empty."""
    if listing.items:
        yield Section(name=name, title=title, blocks=[listing])


def ending(report: ReportHead, machine: str, model: str, *more: Block) -> Iterator[Section]:
    """Yield what could not be observed, and where and how the run was made.

    Args:
        report: of either kind.
        machine: where it was measured, in words.
        model: what was trained, in words.
        more: what follows the command.
    """
    yield from listed("unseen", "what could not be seen", Listing(items=report.unseen))
    facts = Facts(pairs=[("machine", machine), ("model", model), ("started", report.started)])
    command = Facts(pairs=[("command", report.command)], verbatim=True)
    yield Section(name="origin", title="where and how", blocks=[facts, command, *more])


def hidden_text(hidden: int, kind: str, noun: str) -> str:
    """Return what a terminal leaves out, e.g. `… 3 more lines are in the JSON report`; empty for nothing."""
    nouns = f"{noun} is" if hidden == 1 else f"{plural(noun)} are"
    return f"… {hidden} {kind} {nouns} in the JSON report" if hidden > 0 else ""

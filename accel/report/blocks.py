"""The contents of a report as data: sections of texts, lists, facts, tables and pictures.

The reports of `accel.optimize` and of `accel profile` are made into a `Document` each; `terminal.py` and `page.py` lay
any document out, and know nothing of reports.

Tones are `good`, `bad`, `warn`, `idle` and `strong`: styles of a terminal, classes of a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accel.profiler.report import ReportHead
from accel.report.pictures import BarSegment
from accel.report.words import plural

Only = Literal["", "terminal", "page"]
"""Where a block is shown; '' is on both."""

SIGNS = {"good": "✓", "bad": "✗", "warn": "?", "idle": "○"}
"""Tone → sign with the same meaning, for output without colour."""


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """One sentence or clause, without a full stop."""

    text: str
    tone: str = ""
    only: Only = ""


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
    only: Only = ""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing on a page."""

    name: str
    """Unique in the document."""
    macro: str
    """The macro in `pictures.html.j2` that draws it."""
    drawn: Mapping[str, Any]
    """The macro's data."""
    title: str
    text: str
    """A description in words."""
    height: float
    """Pixels."""
    framed: bool = False
    """Its axis labels are outside of it."""
    legend: Sequence[tuple[str, str]] = ()
    """(fill class, meaning)."""


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column of a table; on a narrow terminal it moves to a line below its row."""

    title: str
    width: int = 0
    """Minimum width, in columns of a terminal."""
    left: bool = False
    """Contains words, not numbers: aligned left."""
    whole: bool = False
    """Words that must not be broken."""
    prose: bool = False
    """The last column, of sentences: it takes the room that is left."""
    only: Only = ""


def columns(*specs: str, whole: bool = False, only: Only = "") -> list[TableColumn]:
    """Return columns from their title, `<` for words or `>` for numbers, and their width, e.g. `phase<13`."""
    return [
        TableColumn(title=title, width=int(width), left=side == "<", whole=whole, only=only)
        for title, side, width in (re.split("([<>])", spec) for spec in specs)
    ]


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
    code: str = ""
    """Source code, below the text too."""
    bar: Sequence[BarSegment] | None = None
    """On a page, drawn in place of the text."""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row of a table, with a cell for each column."""

    cells: Sequence[TableCell]
    below: str = ""
    """A text below the row of a terminal."""
    below_tone: str = "idle"
    """The tone of that text."""
    indent: int = 2
    """Columns by which it is moved to the right."""
    depth: int = 0
    """How far the first cell of a page is moved to the right, and on a narrow terminal what moved below the row."""
    only: Only = ""


def cells(*parts: str | TableCell, tone: str = "") -> list[TableCell]:
    """Return cells; a text becomes one with a tone."""
    return [part if isinstance(part, TableCell) else TableCell(text=part, tone=tone) for part in parts]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns with titles, and rows."""

    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]
    caption: str = ""
    """On a page."""
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
    gauge: Picture | None = None


Block = Paragraph | Listing | Facts | Table | Card | Picture


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report under a heading."""

    name: str
    """Unique in the document; one word."""
    title: str
    scope: str = ""
    """Follows the title on a terminal, where tables have no caption."""
    blocks: Sequence[Block] = ()


def tabled(name: str, title: str, scope: str, table: Table) -> Iterator[Section]:
    """Yield a section with a table, unless it has no rows."""
    if table.rows:
        yield Section(name=name, title=title, scope=scope, blocks=[table])


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


@dataclass(frozen=True, kw_only=True)
class Document:
    """A report, ready to be laid out."""

    kind: str
    """First words, e.g. `accel`."""
    model: str
    started: str
    verdict: str
    tone: str
    lead: Sequence[Paragraph]
    """Lines below the verdict."""
    mark: str = ""
    """The state of a run that has not finished."""
    sections: Sequence[Section] = ()

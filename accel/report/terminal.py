"""Lines for a terminal or a log: wrapped to its width, with or without colour.

`Page` writes lines; `render` lays a whole document out on one.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO, TypeVar

from accel.report import blocks
from accel.report.quiet_rich import Console, Table, Text, cell_len
from accel.report.words import clean

T = TypeVar("T")

MAX_WIDTH = 100
MIN_WIDTH = 20
MAX_DEPTH = 8
"""Depth from which nested rows are indented no further."""

TONES = {
    "": "",
    "good": "bold green",
    "bad": "red",
    "worse": "bold red",
    "warn": "yellow",
    "idle": "dim",
    "strong": "bold",
}

_ASCII = str.maketrans(
    {"→": "->", "±": "+-", "÷": "/", "×": "x", "…": "...", "–": "-", "—": "-", "≈": "~", "µ": "u", "█": "#", "▏": "|"}
)


class Page:
    """Lines of text, wrapped to a width, with or without colour.

    Args:
        width: columns; None asks the terminal. Never more than `MAX_WIDTH`.
        color: whether to write ANSI codes; None writes them only to a terminal, and never under `NO_COLOR`.
        stream: where the text goes; None means stdout.
    """

    def __init__(self, width: int | None = None, color: bool | None = None, stream: TextIO | None = None) -> None:
        stream = sys.stdout if stream is None else stream
        columns = shutil.get_terminal_size((MAX_WIDTH, 24)).columns if width is None else width
        self.width = max(MIN_WIDTH, min(columns, MAX_WIDTH))
        self._ascii = not _is_unicode(stream)
        self._out = io.StringIO()
        color = _has_color(stream) if color is None else color
        self._console = Console(
            file=self._out,
            width=self.width,
            color_system="standard" if color else None,
            no_color=not color,
            force_jupyter=False,
            legacy_windows=False,
        )

    def paragraph(self, text: str, style: str = "", indent: int = 0) -> None:
        """Write one paragraph; lines after its first are indented by two more columns."""
        room = self.width - indent - 2
        for number, line in enumerate(Text(self._safe(text), style).wrap(self._console, room, overflow="fold")):
            self._console.print(Text(" " * (indent + 2 * (number > 0))).append_text(line), crop=False, no_wrap=True)

    def heading(self, text: str) -> None:
        """Write an empty line and a heading."""
        self._console.print()
        self.paragraph(text, "bold underline")

    def length(self, text: str, *, whole: bool) -> int:
        """Return how many columns a text, or else its longest word, takes on this page."""
        safe = self._safe(text)
        return cell_len(safe) if whole else max((cell_len(word) for word in safe.split()), default=0)

    def table(self, table: blocks.Table) -> None:
        """Write a table; columns that don't fit go to a line below each row, with their titles."""
        rows = [(row, _shown(table, row.cells)) for row in table.rows if row.only != "page"]
        columns = _shown(table, table.columns)
        titles = blocks.cells(*(column.title for column in columns), tone="idle")
        widths = [
            max([column.width, *(self._least(column, cells[n]) for cells in (titles, *(cells for _, cells in rows)))])
            for n, column in enumerate(columns)
        ]
        fitting = _fitting(widths, self.width)
        if columns[-1].prose and fitting == len(columns):
            widths[-1] = max(widths[-1], self.width - sum(widths[:-1]) - 2 * len(widths[:-1]))
        if rows and fitting:
            self._row(columns[:fitting], titles, widths)
        for row, cells in rows:
            if fitting:
                self._row(columns[:fitting], cells, widths)
            else:
                self.paragraph(_short(cells[0]), TONES["strong"])
            left = zip(columns[max(fitting, 1) :], cells[max(fitting, 1) :], strict=True)
            texts = [
                f"{column.title} {_short(cell)}".strip()
                for column, cell in left
                if cell.bar is None and _short(cell) not in {"", "-"}
            ]
            self.items(texts, ", ", 2 + 2 * min(row.depth, MAX_DEPTH))
            if row.below:
                self.paragraph(row.below, TONES[row.below_tone], row.indent)
        if table.more:
            self.paragraph(table.more, TONES["idle"])

    def _least(self, column: blocks.TableColumn, cell: blocks.TableCell) -> int:
        """Return how many columns a cell takes at the least."""
        return 0 if column.prose else self.length(_short(cell), whole=column.whole or not column.left)

    def _row(
        self, columns: Sequence[blocks.TableColumn], cells: Sequence[blocks.TableCell], widths: Sequence[int]
    ) -> None:
        """Write cells side by side, two columns apart."""
        grid = Table.grid(padding=(0, 2), pad_edge=False)
        texts = []
        for column, cell, width in zip(columns, cells, widths, strict=False):
            grid.add_column(width=width, overflow="fold", justify="left" if column.left else "right")
            texts.append(Text(self._safe(_short(cell)), TONES[cell.tone]))
        grid.add_row(*texts)
        self._console.print(grid)

    def items(self, texts: Sequence[str], separator: str = "  ", indent: int = 0) -> None:
        """Write texts one after another, and none over the end of a line that it fits on."""
        line = ""
        for number, text in enumerate(texts):
            more = separator if number + 1 < len(texts) else ""
            if line and indent + 2 + self.length(line + text + more.rstrip(), whole=True) > self.width:
                self.paragraph(line.rstrip(), indent=indent)
                line = ""
            line += text + more
        if line:
            self.paragraph(line.rstrip(), indent=indent)

    def text(self) -> str:
        """Return the page so far, without spaces at line ends and without a newline at its own end."""
        return "\n".join(line.rstrip() for line in self._out.getvalue().splitlines())

    def _safe(self, text: str) -> str:
        text = clean(text)
        return text.translate(_ASCII).encode("ascii", "replace").decode() if self._ascii else text


def _is_unicode(stream: TextIO | None) -> bool:
    encoding = getattr(stream, "encoding", None)
    # No encoding means a StringIO or no stream at all: both take any text.
    return encoding is None or encoding.lower().replace("-", "").startswith("utf")


def _has_color(stream: TextIO | None) -> bool:
    if stream is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    with contextlib.suppress(AttributeError, ValueError):  # a script has left one of its own, or a closed one
        return stream.isatty()
    return False


def clip(text: str, width: int) -> str:
    """Return `text` cut to `width` terminal columns, with an ellipsis where something was cut."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[:-1]
    return text.rstrip() + "…"


def _shown(table: blocks.Table, values: Sequence[T]) -> list[T]:
    """Return those of the values, one for each column, that a terminal shows."""
    return [value for column, value in zip(table.columns, values, strict=True) if column.only != "page"]


def _short(cell: blocks.TableCell) -> str:
    return cell.text if cell.short is None else cell.short


def _fitting(widths: Sequence[int], width: int) -> int:
    """Return how many leading columns fit, two apart."""
    for number, columns in enumerate(widths):
        width -= columns + 2 * bool(number)
        if width < 0:
            return number
    return len(widths)


# --- documents -------------------------------------------------------------------------------------------------------


def render(
    document: blocks.Document, width: int | None = None, color: bool | None = None, stream: TextIO | None = None
) -> str:
    """Lay a document out, verdict first.

    Args:
        document: what to show.
        width: columns; None asks the terminal. The text is never wider than `min(width, 100)`, readable down to 60;
            below 20 it is laid out as for 20.
        color: whether to write ANSI codes; None writes them only to a terminal, and never when `NO_COLOR` is set.
        stream: where the text goes; None means stdout.

    Returns:
        Lines without a final newline; plain ASCII if the stream can't take Unicode.
    """
    page = Page(width, color, stream)
    mark = f"[{document.mark}] " if document.mark else ""
    page.paragraph(f"{document.kind}: {mark}{document.verdict}", TONES[document.tone])
    for sentence in document.lead:
        _block(page, sentence)
    for section in document.sections:
        _section(page, section)
    return page.text()


def _section(page: Page, section: blocks.Section) -> None:
    own = [block for block in section.blocks if getattr(block, "only", "") != "page"]
    if any(not isinstance(block, blocks.Picture) for block in own):
        page.heading(section.title + section.scope)
        for block in own:
            _block(page, block)


def _block(page: Page, block: blocks.Block) -> None:
    if isinstance(block, blocks.Paragraph):
        page.paragraph(block.text, TONES[block.tone])
    elif isinstance(block, blocks.Listing):
        _listing(page, block)
    elif isinstance(block, blocks.Facts):
        for name, text in block.pairs:
            if text:
                page.paragraph(f"{name}: {text}")
    elif isinstance(block, blocks.Table):
        page.table(block)
    elif isinstance(block, blocks.Card):
        _card(page, block)


def _listing(page: Page, block: blocks.Listing) -> None:
    hidden = max(len(block.items) - block.latest, 0) if block.latest else 0
    if hidden:
        page.paragraph(blocks.hidden_text(hidden, "earlier", "event"), TONES["idle"])
    for number, text in enumerate(block.items[hidden:], start=1):
        page.paragraph(f"{f'{number}. ' if block.mark == '1. ' else block.mark}{text}")


def _card(page: Page, card: blocks.Card) -> None:
    page.paragraph(f"{card.number}. {card.title}", TONES["strong"])
    if card.cause:
        page.paragraph(card.cause, TONES["idle"], indent=3)
    page.paragraph(card.effect, TONES[card.tone] if card.tone == "good" else "", indent=3)
    for text in [*(f"- {sentence}" for sentence in card.evidence), *(f"{who}: {what}" for who, what in card.remedies)]:
        page.paragraph(text, indent=3)

"""Lines for a terminal or a log: wrapped to its width, with or without colour.

`Page` writes lines; `render` lays a whole document out on one.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from itertools import compress
from typing import TextIO

from accel.report import blocks
from accel.report.quiet_rich import Console, Table, Text, cell_len
from accel.report.words import clean

MAX_WIDTH = 100
MIN_WIDTH = 20
_MAX_DEPTH = 8
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
        width: columns; None asks the terminal. Never fewer than `MIN_WIDTH` or more than `MAX_WIDTH`.
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

    def table(self, table: blocks.Table) -> None:
        """Write a table, with what does not fit into a column below one another."""
        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=TONES["idle"])
        is_shown = [column.only != "page" for column in table.columns]
        for title, left, _ in compress(table.columns, is_shown):
            grid.add_column(Text(self._safe(title)), justify="left" if left else "right", overflow="fold")
        for row in table.rows:
            if not row.page_only:
                texts = [self._cell(cell) for cell in compress(row.cells, is_shown)]
                texts[0].pad_left(2 * min(row.depth, _MAX_DEPTH))
                grid.add_row(*texts)
        if grid.row_count:
            self._console.print(grid)
        if table.more:
            self.paragraph(table.more, TONES["idle"])

    def _cell(self, cell: blocks.TableCell) -> Text:
        return Text(self._safe(cell.text if cell.short is None else cell.short), TONES[cell.tone])

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


# --- documents -------------------------------------------------------------------------------------------------------


def render(
    document: blocks.Document, width: int | None = None, color: bool | None = None, stream: TextIO | None = None
) -> str:
    """Lay a document out, verdict first.

    Args:
        document: what to show.
        width: columns; None asks the terminal. The text is never wider than `min(width, 100)`, readable down to 60;
            below that tables lose columns, and below 20 it is laid out as for 20.
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
        if any(not isinstance(block, blocks.Picture) for block in section.blocks):
            page.heading(section.title)
        for block in section.blocks:
            _block(page, block)
    return page.text()


def _block(page: Page, block: blocks.Block) -> None:
    if isinstance(block, blocks.Paragraph):
        page.paragraph(block.text, TONES[block.tone])
    elif isinstance(block, blocks.Listing):
        hidden = max(len(block.items) - block.latest, 0) if block.latest else 0
        if hidden:
            page.paragraph(blocks.hidden_text(hidden, "earlier", "event"), TONES["idle"])
        for number, text in enumerate(block.items[hidden:], start=1):
            page.paragraph(f"{f'{number}. ' if block.mark == '1. ' else block.mark}{text}")
    elif isinstance(block, blocks.Facts):
        for name, text in block.pairs:
            if text:
                page.paragraph(f"{name}: {text}")
    elif isinstance(block, blocks.Table):
        page.table(block)
    elif isinstance(block, blocks.Card):
        _card(page, block)


def _card(page: Page, card: blocks.Card) -> None:
    page.paragraph(f"{card.number}. {card.title}", TONES["strong"])
    if card.cause:
        page.paragraph(card.cause, TONES["idle"], indent=3)
    page.paragraph(card.effect, TONES[card.tone] if card.tone == "good" else "", indent=3)
    for text in [*(f"- {sentence}" for sentence in card.evidence), *(f"{who}: {what}" for who, what in card.remedies)]:
        page.paragraph(text, indent=3)

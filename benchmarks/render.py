"""Markdown from records: a table is its columns, each a heading and how a row's cell is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Row = dict[str, Any]
Cell = str | Callable[[Row], str | None]
"""A format string over a row's columns, or a function of the row; None where there is no such figure."""

SOURCE = "`{command}`, {date}, {machine}, torch {torch}"
"""What stands over a table: how, when and on what it was measured."""


def table(columns: Mapping[str, Cell], rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table."""
    return [_line(heading or None for heading in columns), "|---" * len(columns) + "|", *lines(columns, rows)]


def lines(columns: Mapping[str, Cell], rows: Iterable[Row]) -> Iterator[str]:
    """Yield the line of each row."""
    for row in rows:
        yield _line(cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values())


def _line(cells: Iterable[str | None]) -> str:
    return "|" + "".join(" |" if cell is None else f" {cell} |" for cell in cells)


def sections(columns: Mapping[str, Cell], rows: list[Row], title: Callable[[Row], str]) -> Iterator[str]:
    """Yield a table for each title, in the order in which they come."""
    for name in dict.fromkeys(map(title, rows)):
        yield from ("", f"**{name}**", "", *table(columns, (row for row in rows if title(row) == name)))


def times(name: str, low: str = "", high: str = "", digits: int = 2) -> str:
    """Return the format of a ratio and its spread: by default of the columns NAME, NAME_low and NAME_high."""
    low, high = low or f"{name}_low", high or f"{name}_high"
    return f"{{{name}:.{digits}f}}x [{{{low}:.{digits}f}}, {{{high}:.{digits}f}}]"


def block(head: str, columns: Mapping[str, Cell], rows: Iterable[Row]) -> str:
    """Return a table under what it says of itself."""
    return "\n".join([head, "", *table(columns, rows)])

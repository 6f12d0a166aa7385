"""A benchmark's figures: one file a day in benchmarks/results/, with what they are, how they were made, and on what."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from accel.files import write_atomic
from accel.profiler.host import usable_cores
from benchmarks.render import Cell, Row, block, sections

ROOT = Path(__file__).resolve().parent.parent
_NAMED = re.compile(r"-[a-z0-9]+-\d{4}-\d\d-\d\d\.json")
"""What follows a name: device and date."""
FOLDER = ROOT / "benchmarks" / "results"
DATA = ROOT / ".data"
"""Where data sets are kept that were fetched or made once."""


class Column(NamedTuple):
    """A figure of each row, and how tables show it."""

    meaning: str
    """With its unit."""
    heading: str | None = None
    """In tables; None if the figure stands in none, or in another one's cell."""
    cell: Cell = ""
    """A format string over the row, a function of it, or of the figure itself: ":.3f", or '' for it as it is."""

    def shown(self, name: str) -> Cell:
        """Return how a table shows the column of that name."""
        return f"{{{name}{self.cell}}}" if self.cell == "" or str(self.cell).startswith(":") else self.cell


@dataclass(frozen=True)
class Record:
    """What a benchmark records: rows of named columns.

    Args:
        name: of the file, before device and date.
        what: the figures are.
        columns: by their names in a row.
        head: what stands over the table, a format string over the result or a function of it.
        title: of the table in which a row stands, where there are several.
        key: columns that say what a row is about. A row replaces the older ones with the same key and leaves the
            others, and each row has its own command. () if all rows are written anew.
        rows_name: of the list of rows in the file.
    """

    name: str
    what: str
    columns: Mapping[str, Column] = field(default_factory=dict)
    head: str | Callable[[Row], str] = ""
    title: Callable[[Row], str] | None = None
    key: tuple[str, ...] = ()
    rows_name: str = "rows"

    def rows(self) -> list[Row]:
        """Return the rows that were recorded last; those of another day or machine say so.

        Rows without a column of the key are of an earlier version, and left out: nothing would ever replace them.
        """
        result = newest(self.name)
        if result is None:
            return []
        own: list[Row] = [row for row in result[self.rows_name] if all(name in row for name in self.key)]
        now = header(self.what, "")
        other = {name: result[name] for name in ("date", "machine") if result.get(name, now[name]) != now[name]}
        return [{**other, **row} for row in own]

    def write(self, rows: Sequence[Row], command: str = "", **figures: Any) -> None:
        """Write rows, and other figures beside them.

        Args:
            rows: each with known columns only.
            command: that made them; by default the one that runs.
            figures: whatever else the file holds.

        Raises:
            ValueError: if a row has a column that is not declared.
        """
        unknown = {name for row in rows for name in row} - self.columns.keys() - {"date", "command"}
        if unknown:
            raise ValueError(f"columns of {self.name} must be declared. Found: {', '.join(sorted(unknown))}")
        command = command or command_line()
        if self.key:
            rows = replaced(self.rows(), [{**row, "command": command} for row in rows], self.key)
            command = " ".join(command.partition(" --")[0].split()[:3])  # each row has its own, with what it names
        save(self.name, {**header(self.what, command), **figures, **({self.rows_name: rows} if rows else {})})

    def block(self, result: Row) -> str:
        """Return the rows of a result as Markdown."""
        head = self.head.format_map(result) if isinstance(self.head, str) else self.head(result)
        columns = {c.heading: c.shown(name) for name, c in self.columns.items() if c.heading is not None}
        if not columns:
            return head
        rows = result[self.rows_name]
        if self.title is None:
            return block(head, columns, rows)
        return "\n".join([head, *sections(columns, rows, self.title)])


def replaced(old: Iterable[Row], new: Sequence[Row], key: Sequence[str]) -> list[Row]:
    """Return the old rows whose key no new row has, then the new ones."""
    keys = {_key(row, key) for row in new}
    return [*(row for row in old if _key(row, key) not in keys), *new]


def _key(row: Row, key: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in key)


def header(what: str, command: str) -> Row:
    """Return what every result says of itself."""
    from accel.profiler.host import machine_name

    return {
        "what": what,
        "command": command,
        "date": _today(),
        "machine": machine_name(torch.device("cpu")),
        "cores": usable_cores(),
        "torch": torch.__version__,
    }


def command_line() -> str:
    """Return the command that runs, with the values of its options, but without --record and paths of this machine."""
    context = click.get_current_context()
    parts = [str(context.info_name)]
    for option in context.command.params:
        value = context.params[str(option.name)]
        if not value or option.name == "record" or getattr(option, "hidden", False):
            continue
        values = value if isinstance(value, tuple) else (value,)
        if isinstance(option.type, click.Path):
            values = () if value == option.default else (Path(value).name,)
        words = [shlex.quote(str(each)) for each in values]
        flag = max(option.opts, key=len)
        if isinstance(option, click.Argument):
            parts += words
        elif getattr(option, "is_flag", False):
            parts.append(flag)
        else:
            parts += [f"{flag} {word}" for word in words]
    return " ".join(parts)


def save(name: str, figures: Row) -> Path:
    """Write the file of the figures' date, in place of an earlier one, and return it."""
    path = FOLDER / f"{name}-cpu-{figures['date']}.json"
    write_atomic(path, json.dumps(figures, indent=1) + "\n")
    for earlier in _files(name):
        if f"{name}-cpu-" <= earlier.name < path.name and not figures.get("partial"):
            earlier.unlink()
    return path


def newest(name: str, part: str = "") -> Row | None:
    """Return the newest result of a name, from any device, that is whole; or, where a part is named, that has it."""
    results: list[Row] = [json.loads(path.read_text(encoding="utf-8")) for path in _files(name)]
    usable = [result for result in results if (part in result if part else not result.get("partial"))]
    return max(usable, key=lambda result: str(result["date"]), default=None)


def _files(name: str) -> list[Path]:
    return [path for path in FOLDER.glob(f"{name}-*.json") if _NAMED.fullmatch(path.name[len(name) :])]


def _today() -> str:
    return date.today().isoformat()

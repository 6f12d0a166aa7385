"""The table that `accel bench comm` prints and writes: rows as they are measured, then a line fitted to each series."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from accel import __version__
from accel.errors import InvalidArgument
from accel.files import write_atomic
from accel.report.terminal import Cell, Page
from accel.report.words import clean

if TYPE_CHECKING:
    from accel.comm.bandwidth import Bandwidth, Fit, Row

SCHEMA = 1
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[str, ...]
    dtype: str
    redop: str
    backend: str
    iters: int
    warmup: int
    row_s: float
    timeout_s: float
    target: str
    command: str


# Title → columns. Together 79 with a space between them.
_COLUMNS = {
    "size": 5,
    "count": 9,
    "type": 4,
    "redop": 5,
    "to": 3,
    "time us": 8,
    "spread": 9,
    "algbw": 7,
    "busbw": 7,
    "#wrong": 6,
    "sent/S": 6,
}
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}


class BandwidthTable:
    """Prints rows as they are measured, so that an interrupted run has printed what it measured."""

    def __init__(self, request: Request, backend: str, ranks: int) -> None:
        self._request, self._backend, self._ranks = request, backend, ranks
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._section: tuple[str, str] | None = None
        page = Page()
        page.paragraph(f"accel bench comm: {_count(ranks, 'rank')}, {backend}", "bold")
        page.paragraph(_LEGEND)
        click.echo(page.text())

    def row(self, row: Row) -> None:
        """Print one row, under a heading where the operation or the link changes."""
        page = Page()
        if self._section != (row.link, row.operation):
            self._section = row.link, row.operation
            page.heading(f"{row.operation}, {row.link}: {_count(row.ranks, 'rank')}")
            click.echo(page.text())
            click.echo(click.style(_joined_cells(list(_COLUMNS)), dim=True))
        if row.problem:
            page = Page()
            page.paragraph(f"{size_text(row.size_bytes)}: {row.problem}", "yellow")
            click.echo(page.text())
        else:
            click.echo(click.style(_joined_cells(_cells(row)), fg="red" if row.wrong else None))

    def end(self, rows: list[Row], result: Bandwidth | None, problem: str) -> None:
        """Print the fitted lines and write the file."""
        fits = _fits(rows)
        lines = [line for line in fits if line[2].error <= _NO_LINE]
        page = Page()
        if fits:
            page.heading("lines t(S) = alpha + beta * S")
        if lines:
            page.row(_fit_cells("operation", "link", "alpha us", "beta s/byte", "1/beta GB/s", "worst error"))
        for operation, link, fit in lines:
            beta = fit.beta_s_per_byte
            speed = _gb(1 / beta) if beta else "-"
            page.row(
                _fit_cells(operation, link, _us(fit.alpha_s), f"{beta:.3g}", speed, f"{100 * fit.error:.0f} %"),
            )
        if without := [f"{operation} {link}" for operation, link, fit in fits if fit.error > _NO_LINE]:
            worst = max(fit.error for _, _, fit in fits)
            page.paragraph(
                f"no line: {', '.join(without)}; times are up to {100 * worst:.0f} % off the nearest one: they follow "
                "none, or the machine was busy",
                "yellow",
            )
        if result is not None:
            page.paragraph("")
            page.paragraph(f"{_count(len(rows), 'row')} in {result.seconds:.1f} s; {_wrong_text(rows)}", "bold")
        click.echo(page.text())
        if problem:
            click.echo(f"error: {clean(problem)}", err=True)
        if self._request.target:
            _write(self._request.target, self._document(rows, fits, result, problem))

    def _document(
        self, rows: list[Row], fits: list[tuple[str, str, Fit]], result: Bandwidth | None, problem: str
    ) -> dict[str, Any]:
        import torch

        return {
            "kind": "comm",
            "schema": SCHEMA,
            "started": self._started,
            "command": self._request.command,
            "accel": __version__,
            "torch": torch.__version__,
            "backend": self._backend,
            "ranks": self._ranks,
            "nodes": [list(node) for node in result.nodes] if result else None,
            "problem": problem,
            "seconds": result.seconds if result else None,
            "rows": [{**asdict(row), "algbw": row.algbw, "busbw": row.busbw} for row in rows],
            "fits": [{"operation": operation, "link": link, **fit._asdict()} for operation, link, fit in fits],
        }


_NO_LINE = 0.5
"""Worst relative error above which no line is printed: it would predict times unlike any that were measured."""

_LEGEND = (
    "Sizes in bytes (K = 1024), bandwidths in GB/s as nccl-tests defines them. to: in place or out of place; spread: "
    "p20 and p80 beside the median; sent/S: what the network interfaces counted."
)


def _fit_cells(*texts: str) -> list[Cell]:
    widths = (14, 5, 9, 11, 11, 11)
    return [
        Cell(text=text, width=width, right=number > 1)
        for number, (text, width) in enumerate(zip(texts, widths, strict=True))
    ]


def _joined_cells(texts: list[str]) -> str:
    return " ".join(text.rjust(width) for text, width in zip(texts, _COLUMNS.values(), strict=True))


def _cells(row: Row) -> list[str]:
    assert row.time_s and row.time_p20_s is not None and row.time_p80_s is not None
    below, above = (100 * (edge / row.time_s - 1) for edge in (row.time_p20_s, row.time_p80_s))
    return [
        size_text(row.size_bytes),
        str(row.count),
        re.sub(r"[a-z]+", lambda match: _SHORT[match[0]], row.dtype),
        row.redop or "-",
        "in" if row.in_place else "out",
        _us(row.time_s),
        f"{below:+.0f}/{above:+.0f}%",
        _gb(row.algbw),
        _gb(row.busbw),
        "-" if row.wrong is None else str(row.wrong),
        "-" if row.sent_bytes is None else f"{row.sent_bytes / row.size_bytes:.2f}",
    ]


def size_text(size: int) -> str:
    """Format a number of bytes, in K, M or G where it is a whole number of them.

    Example:
        >>> size_text(65536)
        '64K'
    """
    for unit, factor in reversed(UNITS.items()):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}" if seconds < 1e-3 else f"{1e6 * seconds:.0f}"


def _gb(rate: float | None) -> str:
    if rate is None:
        return "-"
    value = rate / 1e9
    return f"{value:.3g}" if 1e-3 <= value < 1e4 else f"{value:.1e}" if value else "0"


def _fits(rows: list[Row]) -> list[tuple[str, str, Fit]]:
    from accel.comm.bandwidth import fit_line

    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        # One line per operation: the in-place form only where there is no other.
        if row.time_s and (not row.in_place or not any(_outside(row, other) for other in rows)):
            series.setdefault((row.operation, row.link), []).append((row.size_bytes, row.time_s))
    return [(*key, fit_line(points)) for key, points in series.items() if len({size for size, _ in points}) > 1]


def _outside(row: Row, other: Row) -> bool:
    return other.operation == row.operation and other.link == row.link and not other.in_place


def _wrong_text(rows: list[Row]) -> str:
    measured = [row for row in rows if row.wrong is not None]
    wrong = sum(row.wrong or 0 for row in measured)
    without = len(rows) - len(measured)
    text = f"{wrong} wrong elements" if wrong else "every result exact" if measured else "nothing measured"
    return text + (f"; {_count(without, 'operation')} without a time" if without else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _write(target: str, document: dict[str, Any]) -> None:
    try:
        write_atomic(target, json.dumps(document, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise InvalidArgument(
            f"--json {target} can't be written: {error.strerror or error}; name another place"
        ) from None
    click.echo(f"wrote {target}", err=True)

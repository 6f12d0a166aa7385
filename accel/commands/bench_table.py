"""The table that `accel bench comm` prints and writes: rows as they are measured, then a line fitted to each series."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from accel import __version__
from accel.files import save
from accel.report.terminal import Page
from accel.report.words import clean, count_text

if TYPE_CHECKING:
    from accel.comm.bandwidth import Bandwidth, Fit, Row

SCHEMA = 2
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_NO_LINE = 0.5
"""Worst relative error above which no line is printed: it would predict times unlike any that were measured."""
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}
_LEGEND = (
    "Sizes in bytes (K = 1024), bandwidths in GB/s as nccl-tests defines them. spread: "
    "p20 and p80 beside the median; sent/S: what the network interfaces counted."
)


@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[str, ...]
    dtype: str
    backend: str
    iters: int
    warmup: int
    row_s: float
    timeout_s: float
    target: str
    command: str


class Column(NamedTuple):
    """A column of one of the two tables."""

    title: str
    width: int
    text: Callable[[Any], str]


# At most 79 columns of the terminal, with a space between them.
_ROW_COLUMNS = (
    Column("size", 5, lambda row: size_text(row.size_bytes)),
    Column("count", 9, lambda row: str(row.count)),
    Column("type", 4, lambda row: re.sub(r"[a-z]+", lambda match: _SHORT[match[0]], row.dtype)),
    Column("time us", 8, lambda row: _us(row.time_s)),
    Column("spread", 9, lambda row: f"{_percent(row.time_p20_s, row)}/{_percent(row.time_p80_s, row)}%"),
    Column("algbw", 7, lambda row: _gb(row.algbw)),
    Column("busbw", 7, lambda row: _gb(row.busbw)),
    Column("#wrong", 6, lambda row: "-" if row.wrong is None else str(row.wrong)),
    Column("sent/S", 6, lambda row: "-" if row.sent_bytes is None else f"{row.sent_bytes / row.size_bytes:.2f}"),
)


class _SeriesFit(NamedTuple):
    """The line through what was measured of an operation over a link."""

    operation: str
    link: str
    line: Fit


_FIT_COLUMNS = (
    Column("operation", -14, lambda fit: fit.operation),
    Column("link", -5, lambda fit: fit.link),
    Column("alpha us", 10, lambda fit: _us(fit.line.alpha_s)),
    Column("beta s/byte", 12, lambda fit: f"{fit.line.beta_s_per_byte:.3g}"),
    Column("1/beta GB/s", 12, lambda fit: _gb(1 / beta) if (beta := fit.line.beta_s_per_byte) else "-"),
    Column("worst error", 12, lambda fit: f"{100 * fit.line.error:.0f} %"),
)


def _row_text(columns: Sequence[Column], of: Any = None) -> str:
    """Return a row of a table, or its titles; columns of a negative width are flush left."""
    texts = [(column.title if of is None else column.text(of), column.width) for column in columns]
    return " ".join(text.rjust(width) if width > 0 else text.ljust(-width) for text, width in texts)


class BandwidthTable:
    """Prints rows as they are measured, so that an interrupted run has printed what it measured."""

    def __init__(self, request: Request, backend: str, ranks: int) -> None:
        self._request, self._backend, self._ranks = request, backend, ranks
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._section: tuple[str, str] | None = None
        page = Page()
        page.paragraph(f"accel bench comm: {count_text(ranks, 'rank')}, {backend}", "bold")
        page.paragraph(_LEGEND)
        click.echo(page.text())

    def row(self, row: Row) -> None:
        """Print one row, under a heading where the operation or the link changes."""
        if self._section != (row.link, row.operation):
            self._section = row.link, row.operation
            page = Page()
            page.heading(f"{row.operation}, {row.link}: {count_text(row.ranks, 'rank')}")
            click.echo(page.text())
            click.echo(click.style(_row_text(_ROW_COLUMNS), dim=True))
        if row.problem:
            page = Page()
            page.paragraph(f"{size_text(row.size_bytes)}: {row.problem}", "yellow")
            click.echo(page.text())
        else:
            click.echo(click.style(_row_text(_ROW_COLUMNS, row), fg="red" if row.wrong else None))

    def end(self, rows: list[Row], result: Bandwidth | None, problem: str) -> None:
        """Print the fitted lines and write the file."""
        fits = _fits(rows)
        page = Page()
        if fits:
            page.heading("lines t(S) = alpha + beta * S")
        lines = [fit for fit in fits if fit.line.error <= _NO_LINE]
        for line in (None, *lines) if lines else ():
            page.paragraph(_row_text(_FIT_COLUMNS, line))
        if without := [fit for fit in fits if fit not in lines]:
            worst = max(fit.line.error for fit in without)
            page.paragraph(
                f"no line: {', '.join(f'{fit.operation} {fit.link}' for fit in without)}; times are up to "
                f"{100 * worst:.0f} % off the nearest one: they follow none, or the machine was busy",
                "yellow",
            )
        if result is not None:
            page.paragraph("")
            page.paragraph(f"{count_text(len(rows), 'row')} in {result.seconds:.1f} s; {_wrong_text(rows)}", "bold")
        click.echo(page.text())
        if problem:
            click.echo(f"error: {clean(problem)}", err=True)
        if target := self._request.target:
            document = self._document(rows, fits, result, problem)
            save("--report", target, json.dumps(document, indent=1, allow_nan=False) + "\n")
            click.echo(f"wrote {target}", err=True)

    def _document(
        self, rows: list[Row], fits: list[_SeriesFit], result: Bandwidth | None, problem: str
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
            "fits": [{"operation": fit.operation, "link": fit.link, **fit.line._asdict()} for fit in fits],
        }


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


def _percent(edge_s: float, row: Row) -> str:
    assert row.time_s
    return f"{100 * (edge_s / row.time_s - 1):+.0f}"


def _gb(rate: float | None) -> str:
    if rate is None:
        return "-"
    value = rate / 1e9
    return f"{value:.3g}" if 1e-3 <= value < 1e4 else f"{value:.1e}" if value else "0"


def _fits(rows: list[Row]) -> list[_SeriesFit]:
    from accel.comm.bandwidth import fit_line

    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row.time_s:
            series.setdefault((row.operation, row.link), []).append((row.size_bytes, row.time_s))
    fitting = {key: points for key, points in series.items() if len({size for size, _ in points}) > 1}
    return [_SeriesFit(*key, fit_line(points)) for key, points in fitting.items()]


def _wrong_text(rows: list[Row]) -> str:
    measured = [row for row in rows if row.wrong is not None]
    wrong = sum(row.wrong or 0 for row in measured)
    without = len(rows) - len(measured)
    text = f"{wrong} wrong elements" if wrong else "every result exact" if measured else "nothing measured"
    return text + (f"; {count_text(without, 'operation')} without a time" if without else "")

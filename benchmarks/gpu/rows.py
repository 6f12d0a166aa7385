"""What the sections of the GPU suite share: rows that may fail, figures as they come, a command of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

from accel.files import write_atomic
from benchmarks.render import Row

Figures = Iterator[tuple[str, Any]]
"""Of a section: names and what was measured, all so far wherever there are several rows."""


def tried(row: Row, measure: Callable[[], Row]) -> Row:
    """Return a row with what was measured, or with why not: one that fails is a result, the others are measured."""
    try:
        return row | measure()
    except Exception as failed:
        return row | {"failed": f"{type(failed).__name__}: {str(failed)[:200]}"}


def growing(name: str, rows: Iterable[Row]) -> Figures:
    """Print each row as it comes, and yield all so far."""
    measured: list[Row] = []
    for row in rows:
        measured.append(row)
        print(json.dumps(row), flush=True)
        yield name, measured


def bytes_per_s() -> float:
    """Return the device's measured copy bandwidth."""
    from accel.profiler.trace import roofline

    return roofline.measure(torch.device("cuda"), []).gb_per_s * 1e9


def command(
    section: Callable[[], Figures], words: str, show: Callable[[Row], None] = lambda figures: None
) -> click.Command:
    """Return the command that runs a section alone.

    Args:
        section: yields the figures.
        words: what `--help` says.
        show: prints all figures at the end.
    """

    @click.command(help=words)
    @click.option("--out", type=click.Path(path_type=Path), help="Write the figures there as JSON.")
    def main(out: Path | None) -> None:
        if not torch.cuda.is_available():
            print("no CUDA device: nothing was run")
            sys.exit(2)
        figures = dict(section())
        show(figures)
        if out is not None:
            write_atomic(out, json.dumps(figures, indent=1) + "\n")

    return main

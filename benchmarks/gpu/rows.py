"""What the sections of the GPU suite share: rows that may fail, figures as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

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

"""Where reports go: each model of a run has a place of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from pathlib import Path


def numbered(report: Path, model: int) -> Path:
    """Return where the report of the n-th model goes: a file or a folder beside that of the first."""
    if model == 1:
        return report
    if report.suffix in (".json", ".html"):
        return report.with_name(f"{report.stem}-{model}{report.suffix}")
    return report.with_name(f"{report.name}-{model}")  # a folder, such as lr0.001


def own_place(report: str | None, taken: Container[Path | None], model: str, say: Callable[[str], None]) -> Path | None:
    """Return where the report of a model goes: beside those of others that were to go to the same place.

    Args:
        report: the place that was asked for, None for the terminal alone.
        taken: where the reports of other models go.
        model: the name of its class.
        say: prints one line for the user.
    """
    if report is None:
        return None
    places = (numbered(Path(report), number) for number in itertools.count(1))
    place = next(place for place in places if place not in taken)
    if place != Path(report):
        say(f"{report} has the report of another model; that of {model} goes to {place}")
    return place

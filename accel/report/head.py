"""The sections that reports of both kinds share: lists, and the head of a report."""

from __future__ import annotations

from collections.abc import Iterator

from accel.profiler.report import ReportHead
from accel.report.blocks import Block, Facts, Listing, Section


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

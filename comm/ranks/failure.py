"""Why communication failed: the rank that notices a fault rarely has it, it sees a closed connection or a timeout.

So the ranks of a state meet once more when a collective fails: each brings what it was doing and why it stopped. One
that does not come within a few seconds has ended or hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from accel.profiler.errors import AccelError
from accel.profiler.rendezvous import RanksDiverged, Rendezvous, named

PATIENCE_S = 5.0
_STORE_S = 3.0
"""What the store may take beside that: over a link that was cut it does not answer."""
_OTHERS = 4
"""Ranks of which a message says where they were."""


class CommError(AccelError, RuntimeError):
    """Communication failed; the message names the rank and the cause."""


class RankReport(NamedTuple):
    """What a rank reports when it stops."""

    place: str
    """What it was doing: step, bucket, stage."""
    cause: str
    primary: bool
    """The fault is its own; False where it only saw a connection break."""


class Findings(NamedTuple):
    """What all reports come to."""

    failed: dict[int, RankReport]
    """The first rank whose fault is its own, if there is one."""
    missing: list[int]
    """Ranks that reported nothing."""
    places: dict[int, str]
    """Some ranks with what each was doing, one for each place."""


def findings(reports: Sequence[RankReport | None]) -> Findings:
    """Return what the reports by rank come to."""
    came = {rank: report for rank, report in enumerate(reports) if report is not None}
    failed = {rank: report for rank, report in came.items() if report.primary}
    places = {report.place: rank for rank, report in reversed(came.items())}
    return Findings(
        dict(list(failed.items())[:1]),
        [rank for rank, report in enumerate(reports) if report is None],
        {rank: place for place, rank in sorted(places.items(), key=lambda item: item[1])[:_OTHERS]},
    )


def explained(rendezvous: Rendezvous, own: RankReport) -> str:
    """Return one sentence on who failed and why, after at most a few seconds."""
    results: list[Findings | str] = []

    def meet() -> None:
        try:
            results.append(rendezvous.meet(own, findings, "", all_must_come=False))
        except (RanksDiverged, RuntimeError) as error:
            results.append(str(error))

    thread = threading.Thread(target=meet, name="accel-comm-failure", daemon=True)
    thread.start()
    thread.join(rendezvous.patience_s + _STORE_S)
    known = results[0] if results else "the store of the process group does not answer: its host is cut off"
    return verdict(rendezvous.rank, own, known)


def verdict(rank: int, own: RankReport, known: Findings | str) -> str:
    """Return one sentence on who failed and why, as far as the reports say."""
    here = f"rank {rank} stopped at {own.place}"
    if own.primary:
        return f"{here}: {own.cause}"
    if isinstance(known, str):
        return f"{here}: {own.cause}; {known}"
    for other, report in known.failed.items():
        return f"{here} because rank {other} failed at {report.place}: {report.cause}"
    if known.missing:
        return (
            f"{here} because {named(known.missing)} has ended, hangs outside of communication, or is cut off: it gave "
            f"no reason within {PATIENCE_S:g} s; look at its own log; what this rank saw: {own.cause}"
        )
    elsewhere = [f"rank {other} was at {place}" for other, place in known.places.items() if place != own.place]
    return f"{here}: {own.cause}" + ("; " + ", ".join(elsewhere) if elsewhere else "")

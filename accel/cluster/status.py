"""What is printed of a cluster's jobs: state, size and why, speed, and where their time went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from accel.cluster.job_table import JobRow
from accel.report.quiet_rich import Table


@dataclass(frozen=True)
class JobStatus:
    """A line of the table, as text."""

    job: str
    state: str
    replicas: str
    done: str
    speedup: str
    """Over one replica, and what one more would give."""
    ran_h: str
    """GPU-hours."""
    waited_h: str
    resizes: str
    """Their number, and the time that they and the start took."""
    note: str


HEADS = ("job", "state", "replicas", "done", "speed-up", "ran h", "wait h", "resizes", "note")


def job_status(row: JobRow) -> JobStatus:
    """Return the line of one job."""
    progress, spec = row.progress(), row.spec
    return JobStatus(
        row.name,
        row.state,
        f"{len(row.nodes)}/{spec.max_replicas}",
        "" if progress is None else f"{progress:.0%}",
        _speedup(row),
        f"{row.service_s / 3600:.2f}",
        f"{row.waited_s / 3600:.2f}",
        f"{row.changes}, {row.changing_s:.0f} s",
        row.note or (f"exit status {row.exit_status}" if row.exit_status else ""),
    )


def _speedup(row: JobRow) -> str:
    """Return a job's speed-up over one replica, and with one more, as it has measured itself."""
    profile, replicas, hosts = row.profile(), len(row.nodes), len(set(row.nodes))
    if profile is None or not replicas:
        return ""
    now, more = profile.speedup([hosts, hosts], [replicas, replicas + 1])
    return f"{now:.2f}x ({more:.2f}x)" if replicas < row.spec.max_replicas else f"{now:.2f}x"


def table(rows: Sequence[JobRow]) -> Table:
    """Return the jobs as a table for the terminal."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for head in HEADS:
        drawn.add_column(head, justify="left" if head in ("job", "state", "note") else "right", no_wrap=head != "note")
    for row in rows:
        drawn.add_row(*cells(job_status(row)))
    return drawn


def cells(status: JobStatus) -> list[str]:
    """Return a line's texts in the order of `HEADS`."""
    return [getattr(status, field.name) for field in fields(status)]


def to_json(rows: Sequence[JobRow]) -> str:
    """Return all that is known of the jobs."""
    jobs: list[dict[str, Any]] = [{**vars(row), "spec": vars(row.spec), "progress": row.progress()} for row in rows]
    return json.dumps(jobs, indent=1)


def to_html(rows: Sequence[JobRow], when: str) -> str:
    """Return a page that needs nothing else: the table, and a bar for each job's time.

    Args:
        rows: of the job table.
        when: date and time of the rows.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    shares = {row.name: _shares(row) for row in rows}
    lines = [(cells(status := job_status(row)), status.state, shares[row.name]) for row in rows]
    return environment.get_template("status.html.j2").render(heads=HEADS, lines=lines, when=when)


def _shares(row: JobRow) -> dict[str, float]:
    """Return the percentages of a job's time in which it trained, waited and was changed."""
    trained_s = row.service_s / max(len(row.nodes), 1)
    total = trained_s + row.waited_s + row.changing_s
    parts = {"training": trained_s, "waiting": row.waited_s, "changing": row.changing_s}
    return {name: 100 * seconds / total if total else 0.0 for name, seconds in parts.items()}

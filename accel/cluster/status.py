"""What is told of a cluster's jobs: state, size, speed, and where their time went, as text, JSON, a page or metrics."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from accel.cluster.job_table import JobRow, JobTable
from accel.errors import InvalidArgument
from accel.files import write_atomic
from accel.report.quiet_rich import Console, Table


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
    resizes: str
    lost: str
    """Percentages of its life in which it did not train, by cause."""
    note: str


STATES = ("waiting", "running", "done", "failed", "cancelled")
HEADS = ("job", "state", "replicas", "done", "speed-up", "ran h", "resizes", "time lost", "note")
CAUSES = ("training", "start", "compile", "input", "checkpoint", "restart", "waiting")
"""Of a job's time, in the order in which they are shown."""


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
        str(row.changes),
        _lost(row),
        row.note or (f"exit status {row.exit_status}" if row.exit_status else ""),
    )


def _lost(row: JobRow) -> str:
    shares = shares_of(row)
    causes = sorted(shares.keys() - {"training"}, key=lambda cause: (-shares[cause], cause))
    return ", ".join(f"{cause} {shares[cause]:.0f}%" for cause in causes if shares[cause] >= 0.5)


def _speedup(row: JobRow) -> str:
    """Return a job's speed-up over one replica, and with one more, as it has measured itself."""
    profile, replicas, hosts = row.profile(), len(row.nodes), len(set(row.nodes))
    if profile is None or not replicas:
        return ""
    now, more = profile.speedup([hosts, hosts], [replicas, replicas + 1])
    return f"{now:.2f}x ({more:.2f}x)" if replicas < row.spec.max_replicas else f"{now:.2f}x"


def show(rows: Sequence[JobRow]) -> None:
    """Print the jobs as a table."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for head in HEADS:
        is_text = head in ("time lost", "note")
        drawn.add_column(head, justify="left" if is_text or head in ("job", "state") else "right", no_wrap=not is_text)
    for row in rows:
        drawn.add_row(*cells(job_status(row)))
    Console().print(drawn)


def cells(status: JobStatus) -> list[str]:
    """Return a line's texts in the order of `HEADS`."""
    return [getattr(status, field.name) for field in fields(status)]


def to_json(rows: Sequence[JobRow]) -> str:
    """Return all that is known of the jobs."""
    jobs: list[dict[str, Any]] = [
        {**vars(row), "spec": vars(row.spec), "progress": row.progress(), "booked_s": row.booked()} for row in rows
    ]
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
    lines = [(cells(job_status(row)), row.state, shares_of(row)) for row in rows]
    return environment.get_template("status.html.j2").render(heads=HEADS, lines=lines, when=when, causes=CAUSES)


def write_page(rows: Sequence[JobRow], path: Path) -> None:
    """Write the page of now into a file.

    Raises:
        InvalidArgument: if the file can't be written.
    """
    try:
        write_atomic(path, to_html(rows, time.strftime("%Y-%m-%d %H:%M:%S")))
    except OSError as error:
        raise InvalidArgument(f"--html must be a file that can be written. Found: {path}: {error}") from None


def shares_of(row: JobRow) -> dict[str, float]:
    """Return the percentages of a job's life by what it did in them."""
    booked = row.booked()
    total = sum(booked.values())
    return {cause: 100 * booked[cause] / total if total else 0.0 for cause in CAUSES}


# --- metrics ----------------------------------------------------------------------------------------------------------


class JobCollector:
    """Read a job table whenever Prometheus asks.

    Args:
        table: of the jobs.
    """

    def __init__(self, table: JobTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Any]:
        """Yield the metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        rows = self._table.jobs()
        states = GaugeMetricFamily("accel_cluster_jobs", "Jobs by state.", labels=["state"])
        counted = Counter(row.state for row in rows)
        for state in STATES:
            states.add_metric([state], counted[state])
        yield states
        of_a_job: tuple[tuple[Any, str, str, Callable[[JobRow], float | None]], ...] = (
            (GaugeMetricFamily, "replicas", "Replicas of a job.", lambda row: len(row.nodes)),
            (GaugeMetricFamily, "progress_ratio", "Done part of a job, by its declared epochs.", JobRow.progress),
            (CounterMetricFamily, "service_seconds", "GPU-seconds that a job has had.", lambda row: row.service_s),
            (CounterMetricFamily, "resizes", "Resizes of a job.", lambda row: row.changes),
        )
        for kind, name, text, value in of_a_job:
            family = kind(f"accel_cluster_job_{name}", text, labels=["job"])
            for row in rows:
                if (now := value(row)) is not None:
                    family.add_metric([row.name], now)
            yield family
        spent = CounterMetricFamily("accel_cluster_job_seconds", "Seconds of a job by cause.", labels=["job", "cause"])
        for row in rows:
            for cause, seconds in row.booked().items():
                spent.add_metric([row.name, cause], seconds)
        yield spent


def serve(table: JobTable, port: int) -> None:
    """Serve the metrics of a cluster on a port, in a thread.

    Raises:
        InvalidArgument: if prometheus_client is not installed, or the port is taken.
    """
    try:
        from prometheus_client import REGISTRY, start_http_server
    except ImportError:
        raise InvalidArgument("prometheus_client must be installed for --metrics-port") from None
    REGISTRY.register(JobCollector(table))
    try:
        start_http_server(port)
    except OSError as error:
        raise InvalidArgument(f"--metrics-port must be free. Found: {port}: {error}") from None

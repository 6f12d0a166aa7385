"""Prometheus metrics of a cluster, read from its job table at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from accel.cluster.job_table import JobRow, JobTable
from accel.errors import InvalidArgument

STATES = ("waiting", "running", "done", "failed", "cancelled")


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
        gauges: dict[str, tuple[str, Callable[[JobRow], float | None]]] = {
            "replicas": ("Replicas of a job.", lambda row: len(row.nodes)),
            "progress_ratio": (
                "Part of a job's training that is done, by the epochs that it declares.",
                JobRow.progress,
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"accel_cluster_job_{name}", text, labels=["job"])
            for row in rows:
                if (now := value(row)) is not None:
                    gauge.add_metric([row.name], now)
            yield gauge
        counters: dict[str, tuple[str, Callable[[JobRow], float]]] = {
            "service_seconds": ("GPU-seconds that a job has had.", lambda row: row.service_s),
            "resizes": ("Resizes of a job.", lambda row: row.changes),
        }
        for name, (text, count) in counters.items():
            counter = CounterMetricFamily(f"accel_cluster_job_{name}", text, labels=["job"])
            for row in rows:
                counter.add_metric([row.name], count(row))
            yield counter
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

"""Jobs, nodes and measured tables for the tests of the cluster."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from accel.cluster.jobs import ClusterNode, JobView
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.goodput import BatchLimits
from accel.goodput.job import JobProfile
from accel.goodput.throughput import ThroughputModel


def hosts(count: int, gpus: int = 4, **options: Any) -> list[ClusterNode]:
    """Return equal nodes."""
    return [ClusterNode(f"{options.get('kind', 'node')}-{number:02}", gpus, **options) for number in range(count)]


def profile(
    phi: float = 2000.0, sync_s: float = 0.02, most: int = 64, progress: float = 100.0, left: float | None = None
) -> JobProfile:
    """Return what a job's controller may have fitted."""
    return JobProfile(
        model=ThroughputModel(
            compute_fixed_s=0.01, compute_sample_s=0.001, local_ring_s=sync_s / 4, ring_s=sync_s, latency_s=sync_s / 10
        ),
        noise=NoiseInterval(phi, phi, phi),
        base_batch=64,
        limits=BatchLimits(max_batch_size=4096, local_max=256, max_accumulation=8),
        most_replicas=most,
        restart_s=30.0,
        progress=progress,
        total=None if left is None else progress + left,
    )


def job(name: str, steps_left: float | None = 10_000.0, **options: Any) -> JobView:
    """Return a job that has run on "node" GPUs."""
    options.setdefault("profiles", {"gpu": profile(left=steps_left)})
    options.setdefault("submitted_s", 0.0)
    return JobView(name=name, **options)


def write_application(folder: Path, *, step_s: float = 0.1, epochs: int = 3) -> None:
    """Write the tables of an application whose step time and noise have simple forms."""
    folder.mkdir(parents=True)
    batches = (8, 32, 128)
    rows = ["placement,local_bsz,step_time,sync_time"]
    for nodes in range(1, 4):
        for counts in itertools.combinations_with_replacement(range(1, 5), nodes):
            for batch in batches:
                sync = 0.0 if sum(counts) == 1 else 0.01 * nodes
                rows.append(f"{''.join(map(str, counts))},{batch},{step_s * (1 + batch / 32) + sync},{sync}")
    (folder / "placements.csv").write_text("\n".join(rows) + "\n")
    rows = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
    for nodes, replicas in ((1, 1), (1, 4), (16, 16), (16, 64)):
        for batch in batches:
            rows.append(f"{nodes},{replicas},{batch},{step_s * (1 + batch / 32) + 0.02},0.02")
    (folder / "scalability.csv").write_text("\n".join(rows) + "\n")
    for batch in (32, 128, 512):
        rows = ["progress,iteration,metric,grad_sqr,grad_var"]
        rows += [
            f"{200.0 * epoch},{200 * epoch * 32 // batch},{epoch},1.0,{10.0 * epoch}" for epoch in range(1, epochs + 1)
        ]
        (folder / f"validation-{batch}.csv").write_text("\n".join(rows) + "\n")


def write_workload(path: Path, jobs: int = 6) -> None:
    """Write a workload of two applications, "small" and "large"."""
    rows = ["name,time,application,num_replicas,batch_size"]
    for number in range(jobs):
        kind = "large" if number % 3 == 0 else "small"
        rows.append(f"{kind}-{number},{30 * number},{kind},{2 + 2 * (number % 2)},128")
    path.write_text("\n".join(rows) + "\n")

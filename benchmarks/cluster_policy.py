"""What a decision of the cluster's policy costs, by jobs and GPUs.

    python -m benchmarks.cluster_policy [--record]

Jobs that run, with models of their own, on one kind of GPU or on three; the time of a round is processor time.
"""

from __future__ import annotations

import time

import click
import numpy as np

from accel.cluster import policy
from accel.cluster.jobs import Allocation, ClusterNode, JobView
from accel.cluster.policy import allocate
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.goodput import BatchLimits
from accel.goodput.job import JobProfile
from accel.goodput.throughput import ThroughputModel
from benchmarks.record import Column, Record
from benchmarks.render import Row
from benchmarks.spread import fifths

SIZES = ((16, 64, 1), (160, 64, 1), (160, 512, 1), (1000, 2048, 1), (1000, 2048, 3))
"""Jobs, GPUs and kinds of GPU."""

RECORD = Record(
    "cluster-policy",
    "time of a decision of the cluster's policy",
    {
        "jobs": Column("that run", "jobs"),
        "gpus": Column("of the cluster", "GPUs"),
        "kinds": Column("of GPU", "kinds"),
        "round_ms": Column(
            "processor time of a round, ms, median", "a round", "{round_ms:.0f} ms [{round_p20:.0f}, {round_p80:.0f}]"
        ),
        "round_p20": Column("20th percentile of the rounds"),
        "round_p80": Column("80th percentile of the rounds"),
        "first_ms": Column("of the first round, in which all models are new, ms", "the first", "{first_ms:.0f} ms"),
    },
    head="`python -m benchmarks.cluster_policy`, {date}, {machine}. Processor time of one thread.",
    key=("jobs", "gpus", "kinds"),
)


def cluster(gpus: int, kinds: int) -> list[ClusterNode]:
    """Return nodes of eight GPUs, of each kind as many."""
    return [ClusterNode(f"node-{at:03}", 8, f"kind-{at % kinds}", 1.0 + at % kinds) for at in range(gpus // 8)]


def jobs_of(count: int, kinds: int, seed: int) -> list[JobView]:
    """Return jobs that have run on one kind of GPU each."""
    draw = np.random.default_rng(seed)
    return [
        JobView(
            name=f"job-{number}",
            submitted_s=0.0,
            profiles={f"kind-{number % kinds}": _profile(draw)},
        )
        for number in range(count)
    ]


def _profile(draw: np.random.Generator) -> JobProfile:
    phi = float(draw.lognormal(7.0, 1.5))
    model = ThroughputModel(
        compute_fixed_s=float(draw.uniform(0.01, 0.1)),
        compute_sample_s=float(draw.uniform(1e-4, 1e-3)),
        local_ring_s=float(draw.uniform(0.001, 0.01)),
        ring_s=float(draw.uniform(0.01, 0.1)),
    )
    limits = BatchLimits(max_batch_size=8192, local_max=256, max_accumulation=15, min_gradients=2)
    return JobProfile(
        model=model,
        noise=NoiseInterval(phi, phi, phi),
        base_batch=128,
        limits=limits,
        most_replicas=int(draw.integers(1, 33)),
        restart_s=30.0,
        progress=1000.0,
        total=1000.0 + float(draw.lognormal(9.0, 1.5)),
    )


def measure(jobs: int, gpus: int, kinds: int, rounds: int) -> Row:
    """Return the row of a cluster: each round, some jobs have other noise and others have ended."""
    policy._tabulated.cache_clear()
    nodes, times = cluster(gpus, kinds), list[float]()
    current: Allocation = {}
    asked = jobs_of(jobs, kinds, seed=0)
    for number in range(rounds + 1):
        began = time.process_time()
        current = allocate(asked, nodes, current, 60.0 * number)
        times.append((time.process_time() - began) * 1e3)
        fresh = jobs_of(jobs, kinds, seed=number + 1)
        asked = [new if at % 20 == number % 20 else old for at, (old, new) in enumerate(zip(asked, fresh, strict=True))]
    return {
        "jobs": jobs,
        "gpus": gpus,
        "kinds": kinds,
        "first_ms": times[0],
        **fifths(times[1:]).named("round_ms", "round_p20", "round_p80"),
    }


@click.command()
@click.option("--rounds", default=15, show_default=True, help="Rounds timed of each cluster.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, record: bool) -> None:
    """Measure."""
    rows = []
    for jobs, gpus, kinds in SIZES:
        rows.append(measure(jobs, gpus, kinds, rounds))
        print(LINE.format_map(rows[-1]))
    if record:
        RECORD.write(rows)


LINE = (
    "{jobs:5} jobs on {gpus:5} GPUs of {kinds} kinds: {round_ms:.1f} ms [{round_p20:.1f}, {round_p80:.1f}], "
    "the first {first_ms:.0f} ms"
)

if __name__ == "__main__":
    main()

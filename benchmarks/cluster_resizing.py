"""How soon a job on a Ray cluster starts, grows onto a new node and outlives a lost one: accel beside Ray Train.

    python -m benchmarks.cluster_resizing [--rounds 3] [--record]

The job trains on a node of one slot in steps of some 25 ms and saves every 20 steps. A second node is added, and later
lost without notice. Counted are the seconds from the submission to the first step, and from each event until a step of
all ranks that are to be has ended. accel's scheduler decides as it always does, but gives the job all that is there.
Ray Train looks for nodes as often as its `elastic_resize_monitor_interval_s` says, by default every 60 s; it needs
`pip install pandas pyarrow`, and is left out without them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from accel.cluster.job_table import JobSpec, JobTable
from accel.cluster.jobs import Allocation, ClusterNode, JobView
from accel.cluster.local_actuator import processes_of
from accel.cluster.scheduler import Scheduler
from benchmarks.record import ROOT, Column, Record
from benchmarks.recovery import Workers
from benchmarks.render import SOURCE, Row

RECORD = Record(
    "cluster-resizing",
    "how soon a job on a Ray cluster starts, grows onto a new node, and outlives a lost one",
    {
        "way": Column("who starts it", "by"),
        "event": Column("what has happened", "event"),
        "rounds": Column("how often", "times"),
        "whole_s": Column("until all ranks step, median", "all ranks step after, s", "{whole_s:.1f} {whole}"),
        "whole": Column("least and most"),
    },
    key=("way", "event"),
    head=f"{SOURCE}. Median, least and most.",
)
_ORPHANED_S = 2.0
_STEPS = 40
"""Of all ranks between two events."""


def everything(jobs: Sequence[JobView], nodes: Sequence[ClusterNode], *_: object) -> Allocation:
    """Give the one job all nodes: what is measured is the mechanism, not the policy."""
    return {job.name: tuple(node.name for node in nodes) for job in jobs}


@contextmanager
def by_accel(folder: Path, address: str) -> Iterator[None]:
    """Submit the job to accel's scheduler."""
    from accel.cluster.ray_actuator import RayActuator

    table = JobTable(folder / "cluster")
    running = Scheduler(table, RayActuator(address), policy=everything)
    thread = threading.Thread(target=running.run)
    thread.start()
    arguments = ("-m", "benchmarks.recovery_worker", "accel", str(folder))
    spec = JobSpec(arguments=arguments, folder=str(ROOT), checkpoint=str(folder / "checkpoints"), max_replicas=2)
    table.submit("job", spec, time.time())
    try:
        yield
    finally:
        running.stop()
        thread.join()


def by_ray_train(interval_s: float) -> Callable[[Path, str], Any]:
    """Return what submits the job to Ray Train, which looks for nodes so often."""

    @contextmanager
    def submitted(folder: Path, address: str) -> Iterator[None]:
        command = [sys.executable, "-m", "benchmarks.cluster_resizing", "fit", str(folder), address, str(interval_s)]
        with (folder / "output").open("wb") as output:
            running = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            yield
        finally:
            running.kill()
            running.wait()

    return submitted


WAYS: dict[str, Callable[[Path, str], Any]] = {
    "accel": by_accel,
    "Ray Train, a look every 60 s": by_ray_train(60.0),
    "Ray Train, a look every 1 s": by_ray_train(1.0),
}


def lose(cluster: Any, node: Any, checkpoints: Iterable[str]) -> None:
    """Remove a node of a Ray cluster on this machine without notice, and what it ran of jobs, as when its power fails.

    Args:
        cluster: of `ray.cluster_utils`.
        node: of it.
        checkpoints: of the jobs, by which their processes are known.
    """
    cluster.remove_node(node, allow_graceful=False)
    deadline = time.monotonic() + _ORPHANED_S
    while time.monotonic() < deadline:  # launchers become orphans once the node's actor has ended
        alive = {each: parent for folder in checkpoints for each, parent in processes_of(folder).items()}
        lost = {each for each, parent in alive.items() if parent == 1}
        for each in lost | {each for each, parent in alive.items() if parent in lost}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        if lost:
            return
        time.sleep(0.05)


def events(submitted: Callable[[Path, str], Any]) -> dict[str, float]:
    """Let a job start, gain a node and lose it; return the seconds that each took."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    took = {}
    try:
        cluster.add_node(num_cpus=1)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            workers, began = Workers(Path(name)), time.time()
            with submitted(Path(name), cluster.address):
                took["submitted"] = workers.wait_for(1, 1, began) - began
                workers.wait_for(1, _STEPS, began)
                began = time.time()
                added = cluster.add_node(num_cpus=1)
                took["a node is added"] = workers.wait_for(2, 1, began) - began
                workers.wait_for(2, _STEPS, began)
                began = time.time()
                lose(cluster, added, [str(Path(name) / "checkpoints")])
                took["it is lost"] = workers.wait_for(1, 1, began) - began
    finally:
        ray.shutdown()
        cluster.shutdown()
    return took


def rows(rounds: int) -> Iterator[Row]:
    """Yield the rows of each way; ways take turns."""
    known = all(importlib.util.find_spec(package) for package in ("pandas", "pyarrow"))
    ways = {way: each for way, each in WAYS.items() if known or way == "accel"}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, submitted in ways.items():
            found[way].append(events(submitted))
    for way, took in found.items():
        for event in took[0]:
            whole = sorted(each[event] for each in took)
            spread = f"[{whole[0]:.1f}, {whole[-1]:.1f}]"
            median = statistics.median(whole)
            yield {"way": way, "event": event, "rounds": rounds, "whole_s": median, "whole": spread}


@click.group(invoke_without_command=True)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
@click.pass_context
def main(context: click.Context, rounds: int, record: bool) -> None:
    """Start, enlarge and shrink jobs on a Ray cluster."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=str(ROOT))
    if context.invoked_subcommand:
        return
    console, found = Console(highlight=False, soft_wrap=True), list[Row]()
    for row in rows(rounds):
        found.append(row)
        console.print("{way}, {event}: {whole_s:.1f} s {whole}".format_map(row))
    if record:
        RECORD.write(found)


@main.command(hidden=True)
@click.argument("folder")
@click.argument("address")
@click.argument("interval_s", type=float)
def fit(folder: str, address: str, interval_s: float) -> None:
    """Train under Ray Train."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from benchmarks.recovery_worker import ray_train

    ray.init(address, log_to_driver=True)
    TorchTrainer(
        ray_train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=interval_s),
        run_config=RunConfig(storage_path=str(Path(folder) / "storage"), failure_config=FailureConfig(max_failures=-1)),
    ).fit()


if __name__ == "__main__":
    main()

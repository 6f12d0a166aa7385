"""`accel tune`: a script's parameters, tuned by jobs of a cluster."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click

from accel.cluster.job_table import JobSpec, JobTable, claimed, scheduler_of
from accel.cluster.local_actuator import on_this_machine
from accel.cluster.scheduler import Scheduler
from accel.cluster.tuning import ParameterTuner, read_space
from accel.commands.jobs import FOLDER
from accel.errors import InvalidArgument


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@FOLDER
@click.option("--name", help="Name of the study; one that is there goes on.  [default: that of the script]")
@click.option("--parallel", type=click.IntRange(1), help="Trials at once.  [default: slots]")
@click.option("--max", "most", default=1, show_default=True, type=click.IntRange(1), help="Most replicas of a trial.")
@click.option("--slots", type=click.IntRange(1), help="Where no scheduler runs: replicas at once on this machine.")
@click.option("--seed", type=int, help="Of the sampler.")
@click.argument("space", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(
    folder: Path,
    name: str | None,
    parallel: int | None,
    most: int,
    slots: int | None,
    seed: int | None,
    space: Path,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Tune the parameters in SPACE, a TOML file, of a training script.

    A trial is a job of the cluster: the script gets `--NAME=VALUE` for each parameter after its ARGUMENTS, and calls
    accel.report_score(value, step). Without a scheduler on the cluster's folder, one runs here meanwhile.
    """
    table = JobTable(folder)
    spec = JobSpec(
        arguments=(str(script.resolve()), *arguments),
        folder=str(Path.cwd()),
        checkpoint=str((folder / "jobs").resolve()),
        max_replicas=most,
    )
    with contextlib.nullcontext() if scheduler_of(folder) else _scheduled(folder, table, slots):
        room = parallel or slots or sum(node.gpus for node in on_this_machine(slots).nodes())
        tuner = ParameterTuner(
            table, folder, read_space(space), spec, name or script.stem, parallel=room, seed=seed, say=click.echo
        )
        tuner.run()
    if tuner.best is None:
        raise InvalidArgument(f"no trial had a score: {script.name} must call accel.report_score(value, step)")
    parameters, score = tuner.best
    click.echo(f"best: {score:.6g}  {' '.join(f'--{key}={value}' for key, value in parameters.items())}")


@contextlib.contextmanager
def _scheduled(folder: Path, table: JobTable, slots: int | None) -> Iterator[None]:
    """Run a scheduler in a thread; in the end it stops all jobs, each after a checkpoint."""
    with claimed(folder):
        scheduler = Scheduler(table, on_this_machine(slots), _INTERVAL_S)
        thread = threading.Thread(target=scheduler.run, name="accel-cluster")
        thread.start()
        try:
            yield
        finally:
            scheduler.stop()
            while thread.is_alive():
                time.sleep(0.05)


_INTERVAL_S = 10.0
"""Between two decisions: trials are short."""

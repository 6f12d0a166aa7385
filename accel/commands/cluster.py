"""`accel cluster`: many elastic jobs on one cluster."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import click

from accel.cluster.job_table import scheduler_of
from accel.cluster.status import table, to_html, to_json
from accel.commands.cluster_folder import FOLDER, opened_table
from accel.commands.cluster_up import up
from accel.commands.manifest import manifest
from accel.commands.simulate import simulate
from accel.errors import InvalidArgument
from accel.files import write_atomic
from accel.report.quiet_rich import Console


@click.group()
def cluster() -> None:
    """Run many elastic jobs on one cluster, or simulate it."""


for each in (simulate, manifest, up):
    cluster.add_command(each)


@cluster.command()
@FOLDER
def down(folder: Path) -> None:
    """End the scheduler of a cluster from another terminal: each job is saved and stopped, and can go on later."""
    opened_table(folder)
    process = scheduler_of(folder)
    if process is None:
        raise InvalidArgument(f"{folder} must have a scheduler that runs. Found: none")
    os.kill(process, signal.SIGTERM)
    while scheduler_of(folder) == process:
        time.sleep(0.1)


@cluster.command()
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page that needs nothing else.")
def status(folder: Path, as_json: bool, html: Path | None) -> None:
    """Show the jobs of a cluster: state, replicas, speed, and where their time went."""
    rows = opened_table(folder).jobs()
    if html is not None:
        try:
            write_atomic(html, to_html(rows, time.strftime("%Y-%m-%d %H:%M:%S")))
        except OSError as error:
            raise InvalidArgument(f"--html must be a file that can be written. Found: {html}: {error}") from None
    if as_json:
        click.echo(to_json(rows))
    elif html is None:
        Console().print(table(rows))

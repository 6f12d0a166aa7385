"""The folder of a cluster, as all its commands take it."""

from __future__ import annotations

from pathlib import Path

import click

from accel.cluster.job_table import FILE, JobTable
from accel.errors import InvalidArgument

FOLDER = click.option(
    "--cluster",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".accel-cluster"),
    show_default=True,
    envvar="ACCEL_CLUSTER",
    help="Folder of the cluster, with its table of jobs.",
)


def opened_table(folder: Path) -> JobTable:
    """Return the job table of a cluster that is there.

    Raises:
        InvalidArgument: if there is none.
    """
    if not (folder / FILE).exists():
        raise InvalidArgument(
            f"{folder} must hold a cluster's jobs. Found: no {FILE}; submit a job first, or name --cluster"
        )
    return JobTable(folder)

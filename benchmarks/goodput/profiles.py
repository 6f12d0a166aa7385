"""The profiles that Pollux's authors measured: step times by placement, training runs at several batch sizes.

DIR/traces/<application>/ holds placements*.csv and scalability*.csv (one table for each kind of GPU) and
validation-<batch>.csv. Origin: github.com/petuum/adaptdl, branch osdi21-artifact, simulator/; Apache-2.0.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from accel.goodput.observations import Configuration, StepTimes
from accel.goodput.throughput import Floats
from benchmarks.record import DATA

data_option = click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=DATA / "pollux_osdi21",
    show_default=".data/pollux_osdi21",
    help="Folder with traces/ and workloads/.",
)


class Table(NamedTuple):
    """Step times of an application on one kind of GPU."""

    application: str
    gpu: str
    configurations: list[Configuration]
    seconds: Floats

    def up_to(self, replicas: int) -> StepTimes:
        """Return the rows with at most so many replicas."""
        return self._rows([c.replicas <= replicas for c in self.configurations])

    def above(self, replicas: int) -> StepTimes:
        """Return the rows with more."""
        return self._rows([c.replicas > replicas for c in self.configurations])

    def all(self) -> StepTimes:
        """Return all rows."""
        return StepTimes.of(self.configurations, self.seconds)

    def drawn(self, count: int, seed: int) -> StepTimes:
        """Return some rows at random."""
        chosen = np.random.default_rng(seed).permutation(len(self.configurations)) < count
        return self._rows(chosen.tolist())

    def _rows(self, chosen: list[bool]) -> StepTimes:
        rows = np.flatnonzero(chosen)
        return StepTimes.of([self.configurations[row] for row in rows], self.seconds[rows])


class Run(NamedTuple):
    """A training run at one batch size, by epochs; each (epochs,)."""

    batch: int
    progress: Floats
    """Steps of the least batch that the steps so far were worth, by the run's own reckoning."""
    steps: Floats
    """Steps so far."""
    noise: Floats
    """Gradient noise scale, samples."""


def tables(folder: Path) -> Iterator[Table]:
    """Yield every table.

    Raises:
        FileNotFoundError: if there is none.
    """
    paths = sorted((folder / "traces").glob("*/placements*.csv"))
    if not paths:
        raise FileNotFoundError(f"{folder} must hold traces/<application>/placements.csv. Found: none")
    for path in paths:
        rows = list(_placed(path))
        scalability = path.with_name(path.name.replace("placements", "scalability"))
        if scalability.exists():
            rows += _counted(scalability)
        gpu = path.stem.removeprefix("placements").strip("-_") or "T4"
        yield Table(path.parent.name, gpu, [configuration for configuration, _ in rows], np.array([s for _, s in rows]))


def runs(folder: Path, application: str) -> list[Run]:
    """Return the runs of an application, by batch size; the noise of a step without signal is infinite."""
    paths = (folder / "traces" / application).glob("validation-*.csv")
    return [_run(path) for path in sorted(paths, key=_batch)]


def _batch(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _run(path: Path) -> Run:
    columns = {name: np.array(values, float) for name, values in _columns(path).items()}
    least = min(_batch(other) for other in path.parent.glob("validation-*.csv"))
    square, variance = columns["grad_sqr"], columns["grad_var"]
    noise = np.divide(least * variance, square, where=square > 0, out=np.full(len(square), np.inf))
    return Run(_batch(path), columns["progress"], columns["iteration"], noise)


def _columns(path: Path) -> dict[str, list[str]]:
    rows = _read(path)
    return {name: [row[name] for row in rows] for name in rows[0]}


def _placed(path: Path) -> Iterator[tuple[Configuration, float]]:
    """Yield the rows of a table whose placements are digits, each the GPUs of a node."""
    for row in _read(path):
        gpus = [int(digit) for digit in row["placement"]]
        yield Configuration(len(gpus), sum(gpus), int(row["local_bsz"])), float(row["step_time"])


def _counted(path: Path) -> Iterator[tuple[Configuration, float]]:
    for row in _read(path):
        configuration = Configuration(int(row["num_nodes"]), int(row["num_replicas"]), int(row["local_bsz"]))
        yield configuration, float(row["step_time"])


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))

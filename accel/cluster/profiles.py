"""Measured profiles of applications, as Pollux's authors published them: what a simulated job really does.

    FOLDER/traces/<application>/placements.csv      placement, local_bsz, step_time, sync_time
                                scalability.csv     num_nodes, num_replicas, local_bsz, step_time, sync_time
                                validation-<B>.csv  a training run at batch B, a row for each epoch

Between measured rows everything is linear: step times in the batch where the placement was measured, else in nodes,
replicas and batch (Delaunay triangles); noise and progress in the batch. The rules are those of the simulator of Qiao
et al., OSDI 2021 (https://www.usenix.org/conference/osdi21/presentation/qiao), so that its figures come out.

A scheduler must not look here: it sees what a job has measured of itself (`accel.cluster.jobs.JobView`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel.errors import InvalidArgument

Floats = NDArray[np.float64]

_MOST_NODES = 16
"""The scalability tables end there; what is larger is taken as that."""
LOCAL_MOST = {"yolov3": 8}
"""Samples per replica above which an application did not fit into memory, where the tables do not end there."""


class StepTime(NamedTuple):
    """Seconds of an optimizer step without accumulation."""

    step_s: float
    sync_s: float
    """Part of `step_s` after the last local gradient."""

    @property
    def compute_s(self) -> float:
        """Seconds of a micro-step without synchronisation."""
        return self.step_s - self.sync_s


class Noise(NamedTuple):
    """Gradient statistics: squared norm, and variance of the gradient of one base batch."""

    square: float
    variance: float

    def gain(self, scale: float) -> float:
        """Return the base steps that a step of `scale` base batches is worth (AdaScale)."""
        return (self.variance + self.square) / (self.variance / scale + self.square)


@dataclass(frozen=True)
class _Runs:
    """Training runs at several batch sizes; all arrays but `batches` are (runs, epochs)."""

    batches: list[int]
    progress: list[Floats]
    square: list[Floats]
    variance: list[Floats]
    iterations: list[Floats]


@dataclass
class Application:
    """A training job as it was measured.

    Args:
        folder: with the tables of the application; its name is the application's.

    Raises:
        InvalidArgument: if a table is missing, or lacks a column.
    """

    folder: Path
    _step_times: dict[tuple[tuple[int, ...], int], StepTime] = field(default_factory=dict, repr=False)
    _noise: dict[tuple[int, int], Noise] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Name of the application."""
        return self.folder.name

    @cached_property
    def _runs(self) -> _Runs:
        paths = sorted(self.folder.glob("validation-*.csv"), key=_batch_of)
        if not paths:
            raise InvalidArgument(f"{self.folder} must hold validation-<batch>.csv. Found: none")
        tables = [_columns(path, "progress", "grad_sqr", "grad_var", "iteration") for path in paths]
        return _Runs(
            list(map(_batch_of, paths)),
            [table["progress"] for table in tables],
            [table["grad_sqr"] for table in tables],
            [table["grad_var"] for table in tables],
            [table["iteration"] for table in tables],
        )

    @cached_property
    def _placements(self) -> dict[str, list[tuple[int, float, float]]]:
        """Rows by placement: batch, step and sync time."""
        by_placement: dict[str, list[tuple[int, float, float]]] = {}
        with (self.folder / "placements.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                times = float(row["step_time"]), float(row["sync_time"])
                by_placement.setdefault(row["placement"], []).append((int(row["local_bsz"]), *times))
        return {placement: sorted(rows) for placement, rows in by_placement.items()}

    @cached_property
    def _interpolated(self) -> Any:
        from scipy.interpolate import LinearNDInterpolator

        groups: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        for placement, rows in self._placements.items():
            for batch, step, sync in rows:
                key = len(placement), sum(map(int, placement)), batch
                groups.setdefault(key, []).append((step, sync))
        points = [key for key in sorted(groups)]
        values = [tuple(np.mean(groups[key], axis=0)) for key in points]
        names = "num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"
        table = _columns(self.folder / "scalability.csv", *names)
        counted = np.column_stack([table[name] for name in names])
        return LinearNDInterpolator(
            np.concatenate([np.array(points, float), counted[:, :3]]),
            np.concatenate([np.array(values), counted[:, 3:]]),
        )

    @property
    def base_batch(self) -> int:
        """Samples of a step as the user wrote it."""
        return self._runs.batches[0]

    @property
    def max_batch(self) -> int:
        """Largest batch that was tried."""
        return self._runs.batches[-1]

    @cached_property
    def local_bounds(self) -> tuple[int, int]:
        """Fewest and most samples per replica that were measured."""
        batches = [batch for rows in self._placements.values() for batch, *_ in rows]
        return min(batches), LOCAL_MOST.get(self.name, max(batches))

    @cached_property
    def epochs(self) -> int:
        """Epochs that a training takes."""
        return min(map(len, self._runs.progress))

    def progress(self, epoch: int) -> float:
        """Return the base steps that the first epochs are worth.

        Args:
            epoch: number of epochs, up to `epochs`.
        """
        return min(float(run[epoch - 1]) for run in self._runs.progress) if epoch else 0.0

    def iterations(self, batch: int, epoch: int) -> float:
        """Return the steps that a run at a batch size had taken at the end of an epoch, counted from 0."""
        return self._between(self._runs.iterations, batch, epoch)

    def noise(self, batch: int, epoch: int) -> Noise:
        """Return the gradient statistics of a batch size in an epoch, counted from 0."""
        if (batch, epoch) not in self._noise:
            square = self._between(self._runs.square, batch, epoch)
            variance = self._between(self._runs.variance, batch, epoch)
            self._noise[batch, epoch] = Noise(square, variance)
        return self._noise[batch, epoch]

    def _between(self, runs: Sequence[Floats], batch: int, epoch: int) -> float:
        batches = self._runs.batches
        if not batches[0] <= batch <= batches[-1]:
            raise InvalidArgument(f"a batch of {self.name} must be in [{batches[0]}, {batches[-1]}]. Found: {batch}")
        upper = int(np.searchsorted(batches, batch))
        high = float(runs[upper][epoch])
        if batches[upper] == batch:
            return high
        low, below, above = float(runs[upper - 1][epoch]), batches[upper - 1], batches[upper]
        return ((batch - below) * high + (above - batch) * low) / (above - below)

    def step_time(self, placement: Sequence[int], local_batch: int) -> StepTime:
        """Return the seconds of a step.

        Args:
            placement: replicas on each node, each ≥ 1.
            local_batch: samples per replica, within `local_bounds`.

        Raises:
            InvalidArgument: if nothing was measured near such a step.
        """
        rotations = [(*placement[at:], *placement[:at]) for at in range(len(placement))]
        key = min(rotations), local_batch
        if key not in self._step_times:
            self._step_times[key] = self._measured(*key)
        return self._step_times[key]

    def _measured(self, placement: tuple[int, ...], local_batch: int) -> StepTime:
        rows = self._placements.get("".join(map(str, placement)))
        if rows is not None:
            batches, steps, syncs = zip(*rows, strict=True)
            if batches[0] <= local_batch <= batches[-1]:
                times = np.interp(local_batch, batches, steps), np.interp(local_batch, batches, syncs)
                return StepTime(float(times[0]), float(times[1]))
        else:
            nodes = min(len(placement), _MOST_NODES)
            step, sync = self._interpolated([nodes, sum(placement), local_batch])[0]
            if step == step:
                return StepTime(float(step), float(sync))
        raise InvalidArgument(f"{self.name} was not measured near {local_batch} samples per replica on {placement}")


def _batch_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _columns(path: Path, *names: str) -> dict[str, Floats]:
    rows = read_table(path, dict.fromkeys(names, float))
    return {name: np.array([row[name] for row in rows]) for name in names}


def read_table(path: Path, columns: Mapping[str, Callable[[str], Any]]) -> list[dict[str, Any]]:
    """Return the rows of a CSV file.

    Args:
        path: of the file.
        columns: name → what makes a value of a text.

    Raises:
        InvalidArgument: if it can't be read or lacks a column.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [{name: of(row[name]) for name, of in columns.items()} for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{path} must be a table with the columns {', '.join(columns)}. Found: {error!r}"
        ) from None

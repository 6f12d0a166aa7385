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
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np

from accel.errors import InvalidArgument

Row = TypeVar("Row", bound="tuple[Any, ...]")

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


class _Epoch(NamedTuple):
    """A row of a training run."""

    progress: float
    iteration: float
    grad_sqr: float
    grad_var: float


class _Placed(NamedTuple):
    """A measured step on a placement, which has a digit for the replicas of each node."""

    placement: str
    local_bsz: int
    step_time: float
    sync_time: float


class _Scaled(NamedTuple):
    """A measured step on so many nodes."""

    num_nodes: float
    num_replicas: float
    local_bsz: float
    step_time: float
    sync_time: float


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
    _epochs: dict[tuple[int, int], _Epoch] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Name of the application."""
        return self.folder.name

    @cached_property
    def _runs(self) -> dict[int, list[_Epoch]]:
        """The training run at each batch size."""
        paths = {int(path.stem.partition("-")[2]): path for path in self.folder.glob("validation-*.csv")}
        if not paths:
            raise InvalidArgument(f"{self.folder} must hold validation-<batch>.csv. Found: none")
        return {batch: read_rows(paths[batch], _Epoch) for batch in sorted(paths)}

    @cached_property
    def _placements(self) -> dict[str, list[tuple[int, float, float]]]:
        """Rows by placement: batch, step and sync time."""
        by_placement: dict[str, list[tuple[int, float, float]]] = {}
        for placement, batch, step, sync in read_rows(self.folder / "placements.csv", _Placed):
            by_placement.setdefault(placement, []).append((batch, step, sync))
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
        counted = np.array(read_rows(self.folder / "scalability.csv", _Scaled))
        return LinearNDInterpolator(
            np.concatenate([np.array(points, float), counted[:, :3]]),
            np.concatenate([np.array(values), counted[:, 3:]]),
        )

    @property
    def base_batch(self) -> int:
        """Samples of a step as the user wrote it."""
        return min(self._runs)

    @property
    def max_batch(self) -> int:
        """Largest batch that was tried."""
        return max(self._runs)

    @cached_property
    def local_bounds(self) -> tuple[int, int]:
        """Fewest and most samples per replica that were measured."""
        batches = [batch for rows in self._placements.values() for batch, *_ in rows]
        return min(batches), LOCAL_MOST.get(self.name, max(batches))

    @cached_property
    def epochs(self) -> int:
        """Epochs that a training takes."""
        return min(map(len, self._runs.values()))

    def progress(self, epoch: int) -> float:
        """Return the base steps that the first epochs are worth.

        Args:
            epoch: number of epochs, up to `epochs`.
        """
        return min(run[epoch - 1].progress for run in self._runs.values()) if epoch else 0.0

    def iterations(self, batch: int, epoch: int) -> float:
        """Return the steps that a run at a batch size had taken at the end of an epoch, counted from 0."""
        return self._between(batch, epoch).iteration

    def noise(self, batch: int, epoch: int) -> Noise:
        """Return the gradient statistics of a batch size in an epoch, counted from 0."""
        run = self._between(batch, epoch)
        return Noise(run.grad_sqr, run.grad_var)

    def _between(self, batch: int, epoch: int) -> _Epoch:
        """Return an epoch of a run at a batch size, linear between those that were measured."""
        if (batch, epoch) not in self._epochs:
            if not self.base_batch <= batch <= self.max_batch:
                bounds = f"[{self.base_batch}, {self.max_batch}]"
                raise InvalidArgument(f"a batch of {self.name} must be in {bounds}. Found: {batch}")
            below = max(each for each in self._runs if each <= batch)
            above = min(each for each in self._runs if each >= batch)
            epochs = self._runs[below][epoch], self._runs[above][epoch]
            if below == above:
                between = epochs[0]
            else:
                ends = zip(*epochs, strict=True)
                between = _Epoch(*(((batch - below) * to + (above - batch) * at) / (above - below) for at, to in ends))
            self._epochs[batch, epoch] = between
        return self._epochs[batch, epoch]

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


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Read a CSV file that has a column for each field of a named tuple, and perhaps others.

    Raises:
        InvalidArgument: if it can't be read, or lacks a column.
    """
    types = get_type_hints(kind)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [kind(**{name: of(row[name]) for name, of in types.items()}) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        columns = ", ".join(types)
        raise InvalidArgument(f"{path} must be a table with the columns {columns}. Found: {error!r}") from None

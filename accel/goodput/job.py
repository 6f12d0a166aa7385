"""What a cluster scheduler needs to know of a job: one small JSON, and the speed-up that each placement promises.

    speed-up(nodes, K) = best goodput on `nodes` hosts and K replicas ÷ best goodput on one replica

The job writes it whenever its model or its noise has changed; the scheduler reads it and needs nothing else. Pollux,
https://www.usenix.org/conference/osdi21/presentation/qiao, section 4.2.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from accel.errors import InvalidArgument
from accel.files import write_atomic
from accel.goodput.efficiency import Bound, NoiseInterval
from accel.goodput.goodput import BatchLimits, SpeedTable
from accel.goodput.throughput import ThroughputModel
from accel.profiler.typed_json import UnreadableJson, decode, read

SCHEMA = 3

EXPLORED = 2
"""Up to how many times the replicas used so far a speed-up is believed; beyond, nothing is known of the exchange."""


@dataclass(frozen=True, kw_only=True)
class LostTime:
    """Seconds of a training's whole life, over all its processes one after another, in which it did not get on.

    Raises:
        InvalidArgument: if one is negative or infinite.
    """

    start: float = 0.0
    """From the first start of a process to the end of its first step."""
    restart: float = 0.0
    """The same of later starts, and changes of its ranks in place."""
    compile: float = 0.0
    """In torch.compile, in the training's own process."""
    input: float = 0.0
    """Between the loop's request for a batch and its delivery."""
    checkpoint: float = 0.0
    """In which it was saved."""

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not 0 <= seconds < math.inf:
                raise InvalidArgument(f"{name} must be at least 0 and finite, in seconds. Found: {seconds}")

    def plus(self, other: LostTime) -> LostTime:
        """Return the sum by cause."""
        return LostTime(**{name: seconds + getattr(other, name) for name, seconds in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class JobProfile:
    """Describe a running job to a scheduler.

    Raises:
        InvalidArgument: if a value is out of its range.

    Example:
        >>> model = ThroughputModel(compute_fixed_s=0.01, compute_sample_s=0.001, ring_s=0.02)
        >>> job = JobProfile(
        ...     model=model,
        ...     noise=NoiseInterval(500.0, 400.0, 700.0),
        ...     base_batch=64,
        ...     limits=BatchLimits(max_batch_size=1024),
        ...     most_replicas=4,
        ...     restart_s=20.0,
        ...     progress=1500.0,
        ... )
        >>> job.speedup([1, 1, 2, 4], [1, 2, 4, 16]).round(1).tolist()
        [1.0, 1.8, 2.5, 3.8]
        >>> JobProfile.parse(job.to_json(), "job.json") == job
        True
    """

    model: ThroughputModel
    """Of the step time."""
    noise: NoiseInterval
    """Of the gradients, now."""
    base_batch: int
    """M0, samples of a step as the user wrote it, ≥ 1."""
    limits: BatchLimits
    """Between which batches the job chooses."""
    most_replicas: int
    """The most replicas that the job has run on, ≥ 1."""
    restart_s: float
    """What a change of the placement has cost, s, ≥ 0."""
    progress: float
    """Steps of the base batch that the steps so far were worth, ≥ 0."""
    total: float | None = None
    """Steps of the base batch that the whole training is, by the epochs that its script declares; None for unknown."""
    lost: LostTime = LostTime()
    """Where its time went so far, but for training."""

    def __post_init__(self) -> None:
        for name, least in {"base_batch": 1, "most_replicas": 1, "restart_s": 0, "progress": 0}.items():
            if not least <= getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name} must be at least {least} and finite. Found: {getattr(self, name)}")
        if self.total is not None and not 0 < self.total < math.inf:
            raise InvalidArgument(f"total must be positive and finite. Found: {self.total}")

    def speedup(self, nodes: ArrayLike, replicas: ArrayLike, *, bound: Bound = "phi") -> Any:
        """Return how many times faster the job would go than on one replica, each at its best batch.

        More than twice the replicas used so far are reckoned as twice as many: a model promises much of what it has
        not seen. On one replica the reference accumulates as often as the user's batch needs, limits or not.

        Args:
            nodes: hosts, ≥ 1; a number or an array (placements,).
            replicas: ranks in all, ≥ nodes.
            bound: of the noise scale that is reckoned with.

        Returns:
            0 where the user's batch is not within the limits; a float for numbers, an array for arrays.

        Raises:
            InvalidArgument: if there are fewer replicas than nodes, or none.
        """
        most = EXPLORED * self.most_replicas
        hosts, ranks = np.broadcast_arrays(np.asarray(nodes, np.int64), np.asarray(replicas, np.int64))
        needed = -(-self.base_batch // (self.limits.local_max or self.base_batch)) - 1  # by the user's batch there
        one = dataclasses.replace(self.limits, max_accumulation=max(self.limits.max_accumulation, needed))
        reference = SpeedTable(self.model, self.base_batch, one, [1], [1]).best(self.noise, bound).rate[0]
        believed = (np.minimum(each, most).ravel() for each in (hosts, ranks))
        placed = SpeedTable(self.model, self.base_batch, self.limits, *believed).best(self.noise, bound)
        speedup = (placed.rate / reference if reference > 0 else placed.rate).reshape(hosts.shape)
        return speedup if hosts.ndim else float(speedup)

    def to_json(self) -> str:
        """Return the profile as JSON; an infinite noise scale is null."""
        parts = dataclasses.asdict(self)
        parts["noise"] = {name: None if math.isinf(value) else value for name, value in parts["noise"].items()}
        return json.dumps({"schema": SCHEMA, **parts}, indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile, whole or not at all."""
        write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> JobProfile:
        """Read a profile written by `save`.

        Raises:
            InvalidArgument: if the file can't be read, is of another version, or lacks or adds anything.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{path} can't be read as a job profile: {error}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str) -> JobProfile:
        """Read what `to_json` returned; `source` names it in errors."""
        try:
            raw = decode(text)
            version = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
            if type(version) is not int or version != SCHEMA:
                raise UnreadableJson(f"its schema must be {SCHEMA}, got {version!r}; let the job write it again")
            raw.pop("schema")
            parts = [(raw, "job", cls)]
            parts += [(raw.get(name), f"job.{name}", part) for name, part in _PARTS.items()]
            for value, where, part in parts:
                fields = {field.name for field in dataclasses.fields(part)}
                if missing := sorted(fields - value.keys() if isinstance(value, dict) else ()):
                    raise UnreadableJson(f"{where} is incomplete: it lacks {', '.join(missing)}")
            if isinstance(raw["noise"], dict):
                raw["noise"].update({end: math.inf for end in _ENDS if raw["noise"][end] is None})
            return read(cls, raw, "job")
        except ValueError as error:
            raise InvalidArgument(f"{source} is no job profile: {error}") from None


_PARTS = {"model": ThroughputModel, "noise": NoiseInterval, "limits": BatchLimits, "lost": LostTime}
_ENDS = ("phi", "low", "high")
"""Values of a noise scale that may be infinite."""

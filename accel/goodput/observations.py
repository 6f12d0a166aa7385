"""Measured step times, kept by configuration: a median of the last ones, and how far they spread."""

from __future__ import annotations

import math
import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from accel.errors import InvalidArgument
from accel.goodput.throughput import Floats

WINDOW = 31
"""Step times kept of each configuration; odd, so that the median is one of them."""
LIMIT = 64
"""Configurations kept; a fit of so many takes some milliseconds."""

MISFIT = 0.05
"""Standard deviation of log time that no more steps reduce: the model's own error on profiles of real jobs is 6 %."""
_SPREAD, _WORTH = 0.1, 4
"""What the steps of a configuration are taken to spread by before they are many, and how many steps that counts for."""


class Configuration(NamedTuple):
    """What the time of a step depends on."""

    nodes: int
    """Hosts, ≥ 1."""
    replicas: int
    """Ranks in all, ≥ nodes."""
    local_batch: int
    """Samples per replica and micro-step, ≥ 1."""
    accumulation: int = 0
    """Further micro-steps without synchronisation, ≥ 0."""
    communication_scale: float = 1.0
    """Time of the gradients' exchange, in those of the plain one, ≥ 0."""


@dataclass(frozen=True)
class StepTimes:
    """Step times as columns, each (configurations,)."""

    nodes: Floats
    replicas: Floats
    local_batch: Floats
    accumulation: Floats
    communication_scale: Floats
    seconds: Floats
    """Of a step, > 0."""
    deviation: Floats
    """Standard deviation of the logarithm of `seconds` around the model, > 0."""

    def __post_init__(self) -> None:
        if not len(self.seconds):
            raise InvalidArgument("there must be at least one step time to fit a model to. Found: none; add() some")

    @classmethod
    def of(cls, configurations: Iterable[Configuration], seconds: Iterable[float]) -> StepTimes:
        """Return times that are each as sure as the model can be."""
        nodes, replicas, batch, extra, scale = np.array([tuple(c) for c in configurations], float).reshape(-1, 5).T
        times = np.array(list(seconds), float)
        return cls(nodes, replicas, batch, extra, scale, times, np.full(len(times), MISFIT))


class Observations:
    """Aggregate measured step times by configuration.

    Of each configuration the last 31 times stand for all: their median is not moved by a few steps that waited for a
    disk, and a change of the machine is forgotten. Beyond `LIMIT` configurations the one that was not seen for longest
    is dropped.

    Example:
        >>> observations = Observations()
        >>> for seconds in (0.11, 0.10, 0.52):
        ...     observations.add(Configuration(nodes=1, replicas=2, local_batch=32), seconds)
        >>> float(observations.step_times().seconds[0])
        0.11
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Configuration, _Entry] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of configurations."""
        return len(self._entries)

    def count(self, configuration: Configuration) -> int:
        """Return how many steps of a configuration were added, those that its window has lost too."""
        entry = self._entries.get(configuration)
        return entry.count if entry else 0

    def median(self, configuration: Configuration) -> float:
        """Return the median of a configuration's last step times, s.

        Raises:
            KeyError: if none was added.
        """
        return self._entries[configuration].summary()[0]

    def configurations(self) -> list[Configuration]:
        """Return those that have step times, the one seen last at the end."""
        return list(self._entries)

    def forget(self, configuration: Configuration) -> None:
        """Drop the step times of a configuration, if there are any."""
        self._entries.pop(configuration, None)

    def add(self, configuration: Configuration, seconds: float) -> None:
        """Add the time of one step.

        Args:
            configuration: under which it was measured.
            seconds: of the step, > 0 and finite.

        Raises:
            InvalidArgument: if the time or a part of the configuration is out of its range.
        """
        entry = self._entries.get(configuration)
        if not (0 < seconds < math.inf):
            raise InvalidArgument(f"the time of a step must be positive and finite, in seconds. Found: {seconds}")
        if entry is None:
            configuration = _checked(configuration)
            entry = self._entries[configuration] = _Entry()
            if len(self._entries) > LIMIT:
                self._entries.popitem(last=False)
        self._entries.move_to_end(configuration)
        entry.add(float(seconds))

    def step_times(self) -> StepTimes:
        """Return the median of each configuration, and how sure it is.

        Raises:
            InvalidArgument: if there is none.
        """
        summaries = [entry.summary() for entry in self._entries.values()]
        table = StepTimes.of(self._entries, [seconds for seconds, _ in summaries])
        return replace(table, deviation=np.array([deviation for _, deviation in summaries]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as lists and numbers that JSON has."""
        kept = [
            {**configuration._asdict(), "count": entry.count, "seconds": list(entry.seconds)}
            for configuration, entry in self._entries.items()
        ]
        return {"configurations": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that `state_dict` returned in place of what is there.

        Raises:
            InvalidArgument: if it is none; what is there then stays.
        """
        fresh = Observations()
        try:
            for each in state["configurations"]:
                values = dict(each)
                count, seconds = values.pop("count"), values.pop("seconds")
                configuration = Configuration(**values)
                if type(count) is not int or not 1 <= len(seconds) <= count:
                    raise InvalidArgument(
                        f"each configuration must have 1 to count step times, got {len(seconds)}, {count}"
                    )
                for one in seconds:
                    fresh.add(configuration, one)
                fresh._entries[_checked(configuration)].count = count
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"the state of the observations must be what state_dict() returned. Found: {type(error).__name__}: "
                f"{error}"
            ) from None
        self._entries = fresh._entries


class _Entry:
    """The step times of one configuration."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds.append(seconds)

    def summary(self) -> tuple[float, float]:
        """Return the median, s, and the standard deviation of its logarithm around the model."""
        times = sorted(self.seconds)
        count = len(times)
        # A quarter of the times lies outside of each quartile, 0.674 deviations from the median if they are normal.
        spread = math.log(times[3 * count // 4] / times[count // 4]) / 1.349
        pooled = (_WORTH * _SPREAD**2 + (count - 1) * spread**2) / (_WORTH + count - 1)
        # A median is worth π/2 times fewer values than a mean.
        return times[count // 2], math.sqrt(MISFIT**2 + math.pi / 2 * pooled / count)


def _checked(configuration: Configuration) -> Configuration:
    """Return the configuration with plain numbers, which JSON has."""
    *counts, scale = configuration
    try:
        nodes, replicas, local_batch, accumulation = map(operator.index, counts)
    except TypeError:
        raise InvalidArgument(f"all of a configuration but its scale must be whole. Found: {configuration}") from None
    is_possible = 1 <= nodes <= replicas and local_batch >= 1 and accumulation >= 0
    if not (is_possible and 0 <= scale < math.inf):
        raise InvalidArgument(
            "a configuration must have 1 ≤ nodes ≤ replicas, local_batch ≥ 1, accumulation ≥ 0 and a finite "
            f"communication_scale ≥ 0. Found: {configuration}"
        )
    return Configuration(nodes, replicas, local_batch, accumulation, float(scale))

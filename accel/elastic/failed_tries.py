"""Batches that were tried in vain: for how long each is left alone, and by how many steps it is judged next time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from accel.goodput.observations import Configuration

_RETRY = 256
"""Steps until a batch that was tried in vain may be tried again, at most; doubled each time."""
_RETRY_SOONER = 64, 2
"""The same at least, and in steps of the run until then: a dozen cold steps at step 54 are no verdict for long."""


class FailedTries:
    """Count the tries of each batch that did not make it the one that stands.

    Args:
        earlier: batches with their counts, of an earlier process.

    Example:
        >>> batch = Configuration(nodes=1, replicas=1, local_batch=64)
        >>> tries = FailedTries()
        >>> tries.add(batch, step=100)
        >>> list(tries.may_be_tried_again(step=299)), list(tries.may_be_tried_again(step=300))
        ([], [Configuration(nodes=1, replicas=1, local_batch=64, accumulation=0, communication_scale=1.0)])
    """

    def __init__(self, earlier: Iterable[tuple[Configuration, int]] = ()) -> None:
        self._tries: dict[Configuration, tuple[int, float]] = {tried: (count, 0) for tried, count in earlier}
        """How often, and at which step last: 0 in an earlier process, inf once it is forgiven."""

    def add(self, tried: Configuration, step: int) -> None:
        """Count a try that failed by this step of the run."""
        count, _ = self._tries.get(tried, (0, 0))
        self._tries[tried] = (count + 1, step)

    def forgive(self, tried: Configuration) -> None:
        """Let it stand against the batch no more; it stays counted."""
        count, _ = self._tries[tried]
        self._tries[tried] = (count, math.inf)

    def all(self) -> list[Configuration]:
        """Return all that ever failed."""
        return list(self._tries)

    def standing(self) -> Iterator[Configuration]:
        """Yield those that are not forgiven."""
        return (tried for tried, (_, since) in self._tries.items() if math.isfinite(since))

    def may_be_tried_again(self, step: int) -> Iterator[Configuration]:
        """Yield those that have been left alone for long enough: the machine may have been busy just then."""
        for tried, (count, since) in list(self._tries.items()):
            sooner = max(_RETRY_SOONER[0], _RETRY_SOONER[1] * since) if since else math.inf
            if step - since >= min(_RETRY * 2**count, sooner):
                yield tried

    def forgiven(self, batch: Configuration) -> int:
        """Return how often a batch failed that may be tried again; 0 for any other."""
        count, since = self._tries.get(batch, (0, 0))
        return count if math.isinf(since) else 0

    def state(self) -> list[list[float]]:
        """Return those that stand, each with its count at the end, as values that JSON can hold."""
        return [[*tried, self._tries[tried][0]] for tried in self.standing()]

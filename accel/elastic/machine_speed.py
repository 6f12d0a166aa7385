"""How much slower the machine has become since a batch was timed, by the batches that were timed since.

The times of a batch that has been left grow old: another process comes, a strategy is kept. All batches are taken to
have become slower alike, by as much as the one that was timed then and now. It is not compared across a change of the
batch, so that two such factors multiply; while one batch stays, errors of its medians don't add up.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping


class MachineSpeed:
    """The time that a step of any batch takes, in those of its own first ones.

    Example:
        >>> speed = MachineSpeed()
        >>> speed.timed(32, 0.010)
        >>> speed.timed(64, 0.015)
        >>> speed.timed(64, 0.030)  # a process has come
        >>> speed.since(32), speed.since(64)
        (2.0, 1.0)
    """

    def __init__(self) -> None:
        self._batch: Hashable = None
        self._first_s = 1.0
        """Time of a step of the present batch when it was taken."""
        self._before = self._now = 1.0
        """Slowness when the present batch was taken, and now."""
        self._earlier: dict[Hashable, float] = {}
        """Batch → time of a step in an earlier process, until one of them has been timed in this one."""
        self._then: dict[Hashable, float] = {}
        """Batch → slowness when it was last timed."""

    def resume(self, seconds: Mapping[Hashable, float]) -> None:
        """Go on from the times of an earlier process; the first of these batches that is timed tells its speed.

        Args:
            seconds: batch → time of a step then, s.
        """
        self._earlier = dict(seconds)
        self._then = dict.fromkeys(seconds, 1.0)

    def timed(self, batch: Hashable, seconds: float) -> None:
        """Take in the present time of a step.

        Args:
            batch: what was timed: samples of the step, say.
            seconds: median of its last steps, > 0.
        """
        if batch in self._earlier:
            self._compare(seconds / self._earlier[batch])
        if batch != self._batch:
            self._batch, self._first_s, self._before = batch, seconds, self._now
        self._now = self._before * seconds / self._first_s
        self._then[batch] = self._now

    def _compare(self, slowness: float) -> None:
        """Be told how slow this machine is beside the earlier process's: all that was timed since has been as slow."""
        scale = slowness / self._now
        self._then = {each: then * (1.0 if each in self._earlier else scale) for each, then in self._then.items()}
        self._now, self._earlier = slowness, {}

    def since(self, batch: Hashable) -> float:
        """Return how many times as long a step of a batch takes now as when it was last timed; 1 if it never was."""
        return self._now / self._then.get(batch, self._now)

"""When buckets were ready and averaged, step by step, as the hook sees it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from accel.comm.cost_model.choice import ObservedStep

Work = tuple[float, float]


def work() -> Work:
    """Return the seconds of cores that this process has used, and those of the calling thread."""
    return time.process_time(), time.thread_time()


def unknown() -> Work:
    """Return 0 for both, where the work is not known."""
    return 0.0, 0.0


class _TimedStep(NamedTuple):
    began: float
    worked: Work
    bytes: list[int]
    ready: list[float]
    done: list[float]
    extra: list[float]


class Times:
    """Records of steps; a step lasts from its first bucket to the next step's.

    Args:
        clock: seconds, monotonic.
        work: seconds of cores that this process has used, and those of the calling thread; default `unknown`.
    """

    def __init__(self, clock: Callable[[], float], work: Callable[[], Work] = unknown) -> None:
        self._clock, self._work = clock, work
        self._now: _TimedStep | None = None
        self._steps: list[tuple[_TimedStep, float, Work]] = []

    def __len__(self) -> int:
        """Return the number of whole steps recorded."""
        return len(self._steps)

    def clear(self) -> None:
        """Forget all steps."""
        self._now, self._steps = None, []

    def open(self) -> None:
        """Begin a step: its first bucket is ready."""
        self._now = _TimedStep(self._clock(), self._work(), [], [], [], [])

    def close(self) -> None:
        """End the step that was begun, if there is one."""
        if self._now is not None:
            before, after = self._now.worked, self._work()
            self._steps.append((self._now, self._clock(), (after[0] - before[0], after[1] - before[1])))
            self._now = None

    def ready(self, nbytes: int) -> Callable[[], None] | None:
        """Note that a bucket is ready; return what notes that it is averaged, None while nothing is recorded."""
        if self._now is None:
            return None
        step, clock = self._now, self._clock
        step.bytes.append(nbytes)
        step.ready.append(clock() - step.began)
        return lambda: step.done.append(clock() - step.began)

    def extra(self, seconds: float) -> None:
        """Note time that the hook took for what DDP does in passing."""
        if self._now is not None:
            self._now.extra.append(seconds)

    def observed(self) -> ObservedStep:
        """Return the medians over the steps that had the buckets of the last one."""
        last = self._steps[-1][0]
        alike = [record for record in self._steps if record[0].bytes == last.bytes]
        ready = [statistics.median(times) for times in zip(*(step.ready for step, *_ in alike), strict=True)]
        return ObservedStep(
            tuple(last.bytes),
            tuple(seconds - ready[0] for seconds in ready),
            statistics.median(max(step.done) for step, *_ in alike) - ready[0],
            statistics.median(end - step.began for step, end, _ in alike),
            statistics.median(sum(step.extra) for step, *_ in alike),
            statistics.median(work for *_, (work, _) in alike),
            statistics.median(work for *_, (_, work) in alike),
        )

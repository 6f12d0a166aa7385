"""Choose how batches are made by measuring it on the running loop.

The first batches are made in the loop's own thread. If that takes next to nothing beside the step, it stays so. If not,
the settings that could be faster are tried on real batches, in blocks, A B C then C B A, about a second in all. What
counts is the loop's time per batch: its wait for the batch, and its own step, which workers may slow down. The fastest
setting stays; a simpler one does if it is within 3 %. From then on the look-ahead follows the loop's wait. When the
loop waits much longer than it did when that was decided, or its step becomes another, the choice is made anew.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from accel.dataio.look_ahead import LookAhead

# Of the loop's time per batch: below it, there is nothing to be won by fetching ahead.
_NEGLIGIBLE = 0.02
_SIMPLER = 0.03
_HOPELESS = 1.3
_FIRST = 8
_FIRST_S = 0.2
_BLOCK_S = 0.06
_BLOCK = 6
_LONGEST = 2000
_START_S = 0.1
_WINDOW = 100
_WINDOW_S = 2.0
# No new choice before so many times the seconds that the last one took have passed.
_REST = 20.0
_MOST_WORKERS = 16


class Setting(NamedTuple):
    """A way to make batches."""

    mode: str
    workers: int = 1

    def __str__(self) -> str:
        return self.mode if self.mode == "inline" else f"{self.mode}({self.workers})"


@dataclass
class Tried:
    """What was measured of a setting."""

    setting: Setting
    step_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def score(self) -> float:
        """Seconds of the loop per batch; infinite if it failed or was not measured."""
        return min(self.step_s) if self.step_s and not self.failure else math.inf


class Cost(NamedTuple):
    """What the first batches showed: seconds per batch."""

    fetch_s: float
    fetch_cpu_s: float
    step_s: float


def candidates(cost: Cost, cores: int, process_mode: str, threads: bool, limit: int | None = None) -> list[Setting]:
    """Return the settings worth trying beside `inline`, simplest first.

    Args:
        cost: of a batch made in the loop's thread.
        cores: that this process may use.
        process_mode: start method of worker processes.
        threads: whether several threads may read the dataset at once.
        limit: the most workers that the user allows.
    """
    # A batch that mostly waits for storage or the network needs no core while it waits.
    waiting = cost.fetch_cpu_s < 0.5 * cost.fetch_s
    most = min(_MOST_WORKERS if waiting else cores, limit or _MOST_WORKERS)
    # With a step that costs next to nothing everything the machine has may help.
    needed = min(most, max(1, math.ceil(1.2 * cost.fetch_s / max(cost.step_s, 1e-4))))
    counts = sorted({1, needed, min(most, 2 * needed)} if waiting else _powers(most, limit))
    return [Setting(mode, n) for mode in (["threads"] if threads else []) + [process_mode] for n in counts]


def _powers(most: int, limit: int | None) -> set[int]:
    return {n for n in (1, 2, 4, 8, 16) if n <= most} | ({most} if limit else set())


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Choice:
    """Decide on a setting from the times of the running loop.

    Ask `wanted` before each batch and fetch it so; report each with `served`.

    Args:
        process_mode: start method of worker processes.
        no_threads: why threads may not read the dataset at once; '' if they may.
        ahead: how many batches each worker may be ahead.
        limit: the most workers, default the cores, and more where fetching waits.
        processes_only: why only processes may make batches; '' if others may.
    """

    def __init__(
        self,
        process_mode: str,
        no_threads: str = "",
        ahead: LookAhead | None = None,
        *,
        limit: int | None = None,
        processes_only: str = "",
    ) -> None:
        self._process_mode, self._no_threads = process_mode, processes_only or no_threads
        self._limit, self._processes_only = limit, processes_only
        self.ahead = LookAhead(2) if ahead is None else ahead
        self.reason = "not decided yet"
        self.tried: list[Tried] = []
        self.changes = 0
        self._begin()

    def _begin(self) -> None:
        self._phase = "first"
        self.current = Setting("inline")
        self.ahead.reset()
        self.tried = [Tried(self.current, failure=self._processes_only)]
        if self._no_threads:
            self.tried.append(Tried(Setting("threads"), failure=self._no_threads))
        self._plan: list[Tried] = [self.tried[0]]
        self._began = time.perf_counter()
        self._took_s = 0.0
        self._block()
        if self._processes_only:
            most = min(self._limit or cores(), _MOST_WORKERS)
            self._try([Setting(self._process_mode, n) for n in sorted(_powers(most, self._limit))])

    def _block(self, settle: int = 0, settle_s: float = 0.0) -> None:
        self._settle, self._settle_until = settle, time.perf_counter() + settle_s
        self._steps: list[float] = []
        self._waits: list[float] = []
        self._cpu: list[float] = []
        self._spent_s = 0.0

    @property
    def decided(self) -> bool:
        """True when no setting is on trial."""
        return self._phase == "decided"

    @property
    def exhausted(self) -> bool:
        """True when every setting there is has failed."""
        return all(each.failure for each in self.tried)

    def forbid_threads(self, reason: str) -> None:
        """Use no threads: the dataset was seen to be no function of the index. If some are in use, choose anew."""
        if self.current.mode == "threads":
            self._no_threads = reason
            self._begin()
        if self._no_threads:
            return
        self._no_threads = reason
        self.tried = [each for each in self.tried if each.setting.mode != "threads"]
        self._plan = [each for each in self._plan if each.setting.mode != "threads"]
        self.tried.append(Tried(Setting("threads"), failure=reason))

    def failed(self, error: BaseException) -> None:
        """Leave the setting on trial: it can't be used."""
        tried = next((each for each in self.tried if each.setting == self.current), None)
        if tried is not None:
            tried.failure = f"{type(error).__name__}: {error}".splitlines()[0]
        self._plan = [each for each in self._plan if each is not tried]
        self._next_block(0)

    def served(self, wait_s: float, own_s: float, cpu_s: float, capacity: int) -> None:
        """Take note of one batch.

        Args:
            wait_s: seconds that the loop waited for it.
            own_s: seconds that the loop took for itself since the batch before; NaN for an epoch's first, which tells
                nothing of the step.
            cpu_s: processor seconds of this thread while it waited.
            capacity: batches that the engine may have under way.
        """
        if math.isnan(own_s):
            return
        if self._settle > 0 or time.perf_counter() < self._settle_until:
            self._settle -= 1
            return
        self._waits.append(wait_s)
        self._steps.append(own_s)
        self._cpu.append(cpu_s)
        self._spent_s += wait_s + own_s
        if self._phase == "first":
            self._after_first()
        elif self._phase == "trial":
            self._after_trial(capacity)
        else:
            self._watch()

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _after_first(self) -> None:
        count = len(self._waits)
        if count < 3 or (count < _FIRST and self._spent_s < _FIRST_S):
            return
        cost = Cost(statistics.median(self._waits), statistics.median(self._cpu), statistics.median(self._steps))
        if cost.fetch_s < _NEGLIGIBLE * (cost.fetch_s + cost.step_s):
            self._note(self.tried[0])
            self._decide(f"making a batch takes {cost.fetch_s * 1e3:.2f} ms of {self.tried[0].score * 1e3:.2f} ms")
            return
        self._try(candidates(cost, cores(), self._process_mode, not self._no_threads, self._limit))

    def _try(self, settings: list[Setting]) -> None:
        """Begin the trial of `settings` and what is there already."""
        known = {each.setting for each in self.tried}
        self.tried += [Tried(setting) for setting in settings if setting not in known]
        usable = [each for each in self.tried if not each.failure]
        # There and back again, so that what drifts meanwhile touches all alike. The first batches don't count: the
        # dataset was watched while they were made.
        self._plan = [*usable, *reversed(usable)]
        self._phase = "trial"
        self._next_block(0)

    def _after_trial(self, capacity: int) -> None:
        # A full queue at a block's end would flatter it: as many batches as can be queued are taken at the least.
        enough = max(_BLOCK, 2 * capacity)
        if len(self._waits) < enough or (self._spent_s < _BLOCK_S and len(self._waits) < _LONGEST):
            return
        self._note(self._plan.pop(0))
        best = min(each.score for each in self.tried)
        self._plan = [each for each in self._plan if not each.step_s or each.score < _HOPELESS * best]
        self._next_block(capacity)

    def _note(self, tried: Tried) -> None:
        # The wait by its mean, since batches come in bursts; the step by its median: now and then it logs or saves.
        tried.wait_s.append(statistics.fmean(self._waits))
        tried.step_s.append(statistics.fmean(self._waits) + statistics.median(self._steps))

    def _next_block(self, capacity: int) -> None:
        if self._phase == "decided":  # what was chosen has failed
            self._decide(f"{self.current} failed")
        elif not self._plan:
            self._decide("the fastest of those tried")
        else:
            self.current = self._plan[0].setting
            # The first batches find the queue empty; those of a new pool wait for its start, and for the pages that a
            # fork shares to be copied.
            new = not self._plan[0].step_s and self.current.mode not in ("inline", "threads")
            settle = max(2, capacity) + (2 if self.current.mode == "inline" else 2 * self.current.workers)
            self._block(settle, _START_S if new else 0.0)

    def _decide(self, reason: str) -> None:
        usable = [each for each in self.tried if each.score < math.inf]
        best = min((each.score for each in usable), default=math.inf)
        chosen = next((each for each in usable if each.score <= (1 + _SIMPLER) * best), self._fallback())
        self.current, self.reason, self._phase = chosen.setting, reason, "decided"
        self._expected = (chosen.wait_s[-1], chosen.score) if chosen.wait_s else (0.0, math.inf)
        self._took_s = time.perf_counter() - self._began
        self._decided_at = time.perf_counter()
        self.changes += 1
        self._block(settle=2 * max(2, self.current.workers))

    def _fallback(self) -> Tried:
        return next((each for each in self.tried if not each.failure), self.tried[-1])

    def _watch(self) -> None:
        """Look whether the loop is another than when the setting was chosen."""
        if self._spent_s < _WINDOW_S or len(self._waits) < _WINDOW:
            return
        wait, step = statistics.fmean(self._waits), statistics.median(self._steps)
        if self.current.mode != "inline" and self.ahead.saw(wait, step, self.current.workers):
            self.changes += 1
            self._block(settle=2 * self.current.workers * self.ahead.batches)
            return
        expected_wait, expected = self._expected
        longer = wait - expected_wait > 0.15 * expected and wait > 0.1 * (wait + step)
        other_step = not 0.5 < step / max(expected - expected_wait, 1e-9) < 2.0 and wait > 0.05 * (wait + step)
        rested = time.perf_counter() - self._decided_at > _REST * self._took_s
        if (longer or other_step) and rested:
            self._begin()
        else:
            self._block()

    # -- telling -----------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Return what was tried and what was chosen, as lines of text."""
        ahead = "" if self.current.mode == "inline" else f", each {self.ahead.batches} batches ahead"
        lines = [f"{self.current}: {self.reason}{ahead}" if self.decided else f"trying {self.current}"]
        for each in self.tried:
            if each.failure:
                name = each.setting.mode if each.setting.mode == "threads" else str(each.setting)
                lines.append(f"  {name:16} not used: {each.failure}")
            elif each.step_s:
                waits = statistics.fmean(each.wait_s) * 1e3
                lines.append(f"  {each.setting!s:16} {each.score * 1e3:9.3f} ms per batch, {waits:9.3f} of it waiting")
            else:
                lines.append(f"  {each.setting!s:16} not tried yet")
        return "\n".join(lines)

"""Choose how batches are made by measuring it on the running loop.

The first batches are made in the loop's own thread. If that takes next to nothing beside the step,
it stays so. If not, the settings that could be faster are tried on real batches, in rounds
(`accel.dataio.passes.rounds`): about a second in all on a quiet machine. What counts is the loop's
time per batch: its wait for the batch, and its own step, which workers may slow down. The fastest
setting stays; a simpler one does if it is within 3 %. From then on the look-ahead follows the
loop's wait. When the loop waits much longer than it did when that was decided, when its step
becomes another, and now and then while it waits at all, the choice is made anew; what was in use
stays unless something else is faster.

More workers than cores are tried only where making a batch is asleep for long: for storage, for the
network. A thread that waits for a core is not asleep. The clock can't tell the two apart, the
scheduler can.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import NamedTuple

from accel.dataio.passes.rounds import Rounds, Setting, Tried
from accel.profiler.host import ThreadMeter, usable_cores

# Of the loop's time per batch: below it, there is nothing to be won by fetching ahead.
_NEGLIGIBLE = 0.02
# Of the time that a batch takes: it is asleep for less, and the cores are what limits it.
_ASLEEP = 0.25
_FIRST = 8
_FIRST_S = 0.2
_BLOCK_S = 0.06
_BLOCK = 6
_LONGEST = 2000
_START_S = 0.1
_WINDOW = 100
_WINDOW_S = 2.0
# No new choice before so many times the seconds that the last one took have passed; twice as many after each that came
# to the same, up to this many times.
_REST = 20.0
_MOST_PATIENCE = 16
# Of the loop's time per batch: while it waits for more, another setting may have become the better one.
_WAITS = 0.1
_MOST_WORKERS = 16
# Of the loop's time per batch: a shorter wait is not worth memory.
_WAIT_NEGLIGIBLE = 0.03
_DEEPER = 4
_SHORTER = 0.67
# Batches in all: beyond that, an epoch's order is drawn far ahead, and memory fills.
_MOST_AHEAD = 64


class InlineCost(NamedTuple):
    """Seconds of a batch made in the loop's thread: its fetch, of that on a core and in line for one; the step."""

    fetch_s: float
    run_s: float
    line_s: float
    step_s: float


def most_workers(cost: InlineCost, cores: int) -> int:
    """Return how many workers can be of use: as many as keep all cores busy, had they these for themselves."""
    alone_s = cost.fetch_s - cost.line_s
    if cost.run_s > (1 - _ASLEEP) * alone_s:
        return min(_MOST_WORKERS, cores)
    return min(_MOST_WORKERS, math.ceil(cores * alone_s / max(cost.run_s, 1e-9)))


def candidates(
    cost: InlineCost, cores: int, process_mode: str, threads: bool, limit: int | None = None, own: int = 0
) -> list[Setting]:
    """Return the settings worth trying beside `inline`, simplest first.

    Args:
        cost: of a batch made in the loop's thread.
        cores: that this process may use.
        process_mode: start method of worker processes.
        threads: whether several threads may read the dataset at once.
        limit: the most workers that the user allows.
        own: worker processes that the user's own loader has.
    """
    most = min(most_workers(cost, cores), limit or _MOST_WORKERS)
    counts = _powers(most)
    if most > cores:
        # With a step that costs next to nothing everything that is of use may help.
        needed = min(most, max(1, math.ceil(1.2 * cost.fetch_s / max(cost.step_s, 1e-4))))
        counts = {1, min(cores, most), needed, min(most, 2 * needed)}
    processes = counts | ({own} if own else set())
    return [
        *(Setting("threads", n) for n in sorted(counts) if threads),
        *(Setting(process_mode, n) for n in sorted(processes)),
    ]


def _powers(most: int) -> set[int]:
    return {n for n in (1, 2, 4, 8, 16) if n <= most} | {most}


class Busy(NamedTuple):
    """Seconds so far: of this process on a core, of this thread in line for one."""

    run_s: float = 0.0
    line_s: float = 0.0

    @classmethod
    def now(cls) -> Busy:
        """Return the seconds so far.

        Threads that help with a batch count: while the loop's thread sleeps, they may be at work on
        it. Where the system keeps no record of the line, a crowded core can't be distinguished from
        slow storage.
        """
        meter = ThreadMeter("thread-self")
        seen = meter.read()
        meter.close()
        return cls(time.process_time(), 0.0 if seen is None else seen.wait)

    def since(self, before: Busy) -> Busy:
        return Busy(self.run_s - before.run_s, self.line_s - before.line_s)


class LookAhead:
    """How many batches each worker may be ahead, from how long the running loop waits; `fixed`: as many as at first.

    Batches that all cost the same need two. If now and then one takes long (a slow answer of the
    storage, a long clip, a step that saves), the queue runs dry although the workers are fast
    enough on average. Then a deeper queue bridges the gap. It costs memory and no time, so nothing
    is tried beforehand: while the loop waits, the look-ahead is multiplied by four, and put back if
    that didn't shorten the wait by a third, as when the workers are just too slow.

    Example:
        >>> ahead = LookAhead(2)
        >>> ahead.saw(wait_s=0.002, step_s=0.003, workers=2)
        True
        >>> ahead.batches
        8
    """

    def __init__(self, batches: int, *, fixed: bool = False) -> None:
        self._least, self._fixed = batches, fixed
        self.reset()

    def reset(self) -> None:
        """Begin again: batches are made in another way now."""
        self.batches = self._least
        self._settled = self._fixed
        self._before: tuple[int, float] | None = None

    def saw(self, wait_s: float, step_s: float, workers: int) -> bool:
        """Record the mean wait for a batch and the time of a step; return whether `batches` has changed."""
        if self._settled:
            return False
        if self._before is not None:
            least, waited = self._before
            self._before = None
            if wait_s > _SHORTER * waited:
                self.batches, self._settled = least, True
                return True
        deeper = min(_DEEPER * self.batches, _MOST_AHEAD // workers)
        if wait_s <= _WAIT_NEGLIGIBLE * (wait_s + step_s) or deeper <= self.batches:
            return False
        self._before, self.batches = (self.batches, wait_s), deeper
        return True


class _Served(NamedTuple):
    """A batch: the wait for it, the loop's own time since the one before, and how much of the wait was at work."""

    wait_s: float
    own_s: float
    busy: Busy


class _Window:
    """Batches that were served in a row under one setting, but for the first ones and seconds: `settle`."""

    def __init__(self, settle: int = 0, settle_s: float = 0.0) -> None:
        self._settle, self._settle_until = settle, time.perf_counter() + settle_s
        self._batches: list[_Served] = []  # one list: Ctrl-C between two appends would leave two of unequal length
        self.spent_s = 0.0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, served: _Served) -> bool:
        """Add a batch; return False if it is left out."""
        if self._settle > 0 or time.perf_counter() < self._settle_until:
            self._settle -= 1
            return False
        self._batches.append(served)
        self.spent_s += served.wait_s + served.own_s
        return True

    def cost(self) -> InlineCost:
        """Return what the batches cost that the loop made itself."""
        fetch = statistics.median(each.wait_s for each in self._batches)
        run = min(fetch, max(0.0, statistics.median(each.busy.run_s for each in self._batches)))
        # Asleep batch by batch: where a crowd comes and goes, the median of the line is not that of the median batch.
        asleep = statistics.median(max(0.0, each.wait_s - each.busy.run_s - each.busy.line_s) for each in self._batches)
        return InlineCost(fetch, run, max(0.0, fetch - run - asleep), self.step_s())

    def step_s(self) -> float:
        return statistics.median(each.own_s for each in self._batches)

    def wait_s(self) -> float:
        return statistics.fmean(each.wait_s for each in self._batches)

    def measured(self) -> tuple[float, float]:
        """Return the loop's time for a batch, and its wait in it."""
        # By means, since batches come in bursts, and what is no wait in one setting is a longer step in another. But
        # now and then a step logs or saves: that counts as no more than three.
        most, wait = 3 * self.step_s(), self.wait_s()
        return wait + statistics.fmean(min(each.own_s, most) for each in self._batches), wait


class Tuner:
    """Decide on a setting from the times of the running loop.

    Ask `wanted` before each batch and fetch it so; report each with `served`.

    Args:
        process_mode: start method of worker processes.
        no_threads: why threads may not read the dataset at once; '' if they may.
        ahead: how many batches each worker may be ahead.
        limit: the most workers, default the cores, and more where fetching waits for something other than a core.
        processes_only: why only processes may make batches; '' if others may.
        own: worker processes that the user's own loader has; tried in any case.
    """

    def __init__(
        self,
        process_mode: str,
        no_threads: str = "",
        ahead: LookAhead | None = None,
        *,
        limit: int | None = None,
        processes_only: str = "",
        own: int = 0,
    ) -> None:
        self._process_mode, self._no_threads = process_mode, processes_only or no_threads
        self._limit, self._processes_only, self._own = limit, processes_only, own
        self._patience, self._kept = 1, Setting("inline")
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
        self._rounds = Rounds(self.tried[:1])
        self._began = time.perf_counter()
        self._took_s = 0.0
        self._window = _Window()
        if self._processes_only:
            most = min(self._limit or usable_cores(), _MOST_WORKERS)
            self._try([Setting(self._process_mode, n) for n in sorted(_powers(most))])

    @property
    def decided(self) -> bool:
        return self._phase == "decided"

    @property
    def exhausted(self) -> bool:
        return all(each.failure for each in self.tried)

    def forbid_threads(self, reason: str) -> None:
        """Use no threads: the dataset was seen to be no function of the index. If some are in use, choose anew."""
        if self.current.mode == "threads":
            self._no_threads = reason
            self._begin()
        if self._no_threads:
            return
        self._no_threads = reason
        self._rounds.drop(each for each in self.tried if each.setting.mode == "threads")
        self.tried = [each for each in self.tried if each.setting.mode != "threads"]
        self.tried.append(Tried(Setting("threads"), failure=reason))

    def failed(self, error: BaseException) -> None:
        """Leave the setting on trial: it can't be used."""
        tried = next((each for each in self.tried if each.setting == self.current), None)
        if tried is not None:
            tried.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            self._rounds.drop([tried])
        self._next_block(0)

    def busy(self) -> Busy:
        """Return what `served` wants to know the growth of; all zeros where it is of no use."""
        return Busy() if self.decided or self.current.mode != "inline" else Busy.now()

    def served(self, wait_s: float, own_s: float, busy: Busy, capacity: int) -> None:
        """Record one batch.

        Args:
            wait_s: seconds that the loop waited for it.
            own_s: seconds that the loop took for itself since the batch before; NaN for an epoch's first.
            busy: how much of the wait was at work, or in line for a core.
            capacity: batches that the engine may have under way.
        """
        if math.isnan(own_s) or not self._window.add(_Served(wait_s, own_s, busy)):
            return
        if self._phase == "first":
            self._after_first()
        elif self._phase == "trial":
            self._after_trial(capacity)
        else:
            self._watch()

    # -- deciding ----------------------------------------------------------------------------------

    def _after_first(self) -> None:
        count = len(self._window)
        if count < 3 or (count < _FIRST and self._window.spent_s < _FIRST_S):
            return
        cost = self._window.cost()
        if cost.fetch_s < _NEGLIGIBLE * (cost.fetch_s + cost.step_s):
            self._rounds.record(*self._window.measured())
            self._decide(f"making a batch takes {cost.fetch_s * 1e3:.2f} ms of {self.tried[0].score * 1e3:.2f} ms")
            return
        threads = not self._no_threads
        self._try(candidates(cost, usable_cores(), self._process_mode, threads, self._limit, self._own))

    def _try(self, settings: list[Setting]) -> None:
        """Begin the trial of `settings` and what is there already."""
        known = {each.setting for each in self.tried}
        self.tried += [Tried(setting) for setting in settings if setting not in known]
        # The first batches don't count: the dataset was watched while they were made.
        usable = [each for each in self.tried if not each.failure]
        self._rounds = Rounds(sorted(usable, key=lambda each: each.setting != self._kept))
        self._phase = "trial"
        self._next_block(0)

    def _after_trial(self, capacity: int) -> None:
        # A full queue at a block's end would flatter it: as many batches as can be queued are taken at the least.
        enough = max(_BLOCK, 2 * capacity)
        # Rounds that decide nothing are too short for the bursts of this machine.
        block_s = _BLOCK_S * (1 + self._rounds.done // 4)
        count = len(self._window)
        if count < enough or (self._window.spent_s < block_s and count < _LONGEST):
            return
        if self.current.mode == "inline":
            # The first batches may have waited for a cold cache.
            most = most_workers(self._window.cost(), usable_cores())
            idle = [each for each in self.tried if not each.failure and each.setting.workers > most]
            for each in idle:
                each.failure = "fetching hardly waits for anything but a core: more workers than cores don't help"
            self._rounds.drop(idle)
        self._rounds.record(*self._window.measured())
        self._next_block(capacity)

    def _next_block(self, capacity: int) -> None:
        following = self._rounds.current
        if self._phase == "decided":  # what was chosen has failed
            self._decide(f"{self.current} failed")
        elif following is None:
            self._decide("the fastest of those tried")
        else:
            self.current = following.setting
            # The first batches find the queue empty; those of a new pool wait for its start, and for the pages that a
            # fork shares to be copied.
            new = not following.step_s and self.current.mode not in ("inline", "threads")
            settle = max(2, capacity) + (2 if self.current.mode == "inline" else 2 * self.current.workers)
            self._window = _Window(settle, _START_S if new else 0.0)

    def _decide(self, reason: str) -> None:
        usable = [each for each in self.tried if not each.failure]
        chosen = self._rounds.best or min(usable, key=lambda each: each.score, default=self.tried[-1])
        self.current, self.reason, self._phase = chosen.setting, reason, "decided"
        self._expected = (chosen.wait_s[-1], chosen.score) if chosen.wait_s else (0.0, math.inf)
        self._patience = min(2 * self._patience, _MOST_PATIENCE) if self.current == self._kept else 1
        self._kept = self.current
        self._took_s = time.perf_counter() - self._began
        self._decided_at = time.perf_counter()
        self.changes += 1
        self._window = _Window(settle=2 * max(2, self.current.workers))

    def _watch(self) -> None:
        """Look whether the loop is another than when the setting was chosen."""
        if self._window.spent_s < _WINDOW_S or len(self._window) < _WINDOW:
            return
        wait, step = self._window.wait_s(), self._window.step_s()
        if self.current.mode != "inline" and self.ahead.saw(wait, step, self.current.workers):
            self.changes += 1
            self._window = _Window(settle=2 * self.current.workers * self.ahead.batches)
            return
        expected_wait, expected = self._expected
        longer = wait - expected_wait > 0.15 * expected and wait > _WAITS * (wait + step)
        other_step = not 0.5 < step / max(expected - expected_wait, 1e-9) < 2.0 and wait > 0.05 * (wait + step)
        # A crowd that has gone shows in nothing that is looked at here: what waits is tried again in any case.
        patience = 1 if longer or other_step else self._patience if wait > _WAITS * (wait + step) else math.inf
        if time.perf_counter() - self._decided_at > _REST * self._took_s * patience:
            self._begin()
        else:
            self._window = _Window()

    # -- telling -----------------------------------------------------------------------------------

    def explain(self) -> str:
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

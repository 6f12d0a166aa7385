"""loader_workers: fetch batches ahead, in threads or worker processes, and go on across the epoch boundary."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from accel.dataio.dataset.handles import check_fork, shared_handle
from accel.dataio.passes.proxy import movable, same_as_plain
from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, Strategy

if TYPE_CHECKING:
    from accel.dataio.engine.engine import Engine
    from accel.dataio.passes.continuous import Continuous


class LoaderWorkers(Strategy):
    """Move the fetching of a loader without workers out of the loop's way, in the same sample order.

    It applies only when fetching depends on the indices alone (see `accel.dataio.dataset.fetch_watch`): then the
    batches are the same bits. The next epoch's first batches are fetched while the last ones of this epoch are used.
    Threads are tried only on a dataset that they may read together (see `accel.dataio.dataset.thread_safety`).
    """

    name = "loader_workers"
    summary = "batches fetched ahead by threads or worker processes, across epochs"
    treats = frozenset({Bottleneck.INPUT})
    exactness = Exactness.EXACT
    host_dependent = True
    touches = frozenset({"input"})
    phase = "data"

    def __init__(self) -> None:
        self._pool: dict[Any, Continuous] = {}

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: the loader's kind, or a dataset that is more than a function of the index."""
        reason = movable(run.loader)
        if reason:
            return reason
        if run.observed.fetch_finding:
            return run.observed.fetch_finding + ": batches made elsewhere would be others"
        if run.cores < 2:
            return "there is only one core, which the model needs"
        return shared_handle(run.loader)

    def settings(self, run: Run) -> list[Any]:
        """Return 1, 2, 4, … processes up to the cores this process may use and at most 8; before them threads."""
        from accel.dataio.dataset.thread_safety import unsafe

        counts = [n for n in (1, 2, 4, 8) if n <= run.cores]
        threads = [] if unsafe(run.loader.dataset) else [f"{_THREADS}{n}" for n in counts]
        return [*threads, *counts]

    def enable(self, run: Run, setting: Any) -> None:
        """Fetch so from the next batch on."""
        from accel.dataio.passes.continuous import Continuous

        if setting not in self._pool:
            self._pool[setting] = ahead = Continuous(run.loader, _engine(run, setting), strict=True)
            if not same_as_plain(run.loader, ahead):
                raise ValueError("batches fetched ahead differ from the plain ones")
        run.fetching.workers = self._pool[setting]

    def disable(self, run: Run) -> None:
        """Fetch in the loop's own thread from the next batch on; the workers are kept."""
        run.fetching.workers = None

    def close(self, run: Run) -> None:
        """Let go of the workers that are not in use; they end once the epoch that may still wait for them is over."""
        self._pool = {setting: ahead for setting, ahead in self._pool.items() if ahead is run.fetching.workers}

    def settling(self, setting: Any) -> int:
        """Return the batches that are still under way after a switch, and some: a fork makes pages copy on write."""
        return 2 * _count(setting) + 2

    def describe(self, setting: Any) -> str:
        """Return `workers=n` or `threads=n`."""
        return f"workers={setting}" if isinstance(setting, int) else str(setting)


_THREADS = "threads="
# Processes by another method import the user's script; where there is no fork, starting them is refused.
_START_METHOD = "fork" if sys.platform == "linux" else None


def _count(setting: int | str) -> int:
    return setting if isinstance(setting, int) else int(setting.removeprefix(_THREADS))


def _engine(run: Run, setting: int | str) -> Engine:
    if isinstance(setting, int):
        from accel.dataio.engine.processes import ProcessEngine

        return ProcessEngine(run.loader, setting, start_method=_START_METHOD, check=partial(check_fork, run.loader))
    from accel.dataio.engine.engine import ThreadEngine

    return ThreadEngine(run.loader, _count(setting))

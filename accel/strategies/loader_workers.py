"""loader_workers: fetch batches in worker processes, and go on across the epoch boundary."""

from __future__ import annotations

from typing import Any

from accel.dataio.continuous import ContinuousWorkers
from accel.dataio.proxy import movable, same_as_plain
from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, Strategy


class LoaderWorkers(Strategy):
    """Move the fetching of a loader without workers into persistent processes, in the same sample order.

    It applies only when fetching depends on the indices alone (see `accel.dataio.witness`): then the batches are the
    same bits. The next epoch's first batches are fetched while the last ones of this epoch are used.
    """

    name = "loader_workers"
    summary = "batches fetched ahead by worker processes, across epochs"
    treats = frozenset({Bottleneck.INPUT})
    exactness = Exactness.EXACT
    host_dependent = True
    touches = frozenset({"input"})
    phase = "data"

    def __init__(self) -> None:
        self._pool: dict[int, ContinuousWorkers] = {}

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: the loader's kind, or a dataset that is more than a function of the index."""
        reason = movable(run.loader)
        if reason:
            return reason
        if run.observed.fetch_finding:
            return run.observed.fetch_finding + ": other processes would draw or keep others"
        if run.cores < 2:
            return "there is only one core, which the model needs"
        return ""

    def settings(self, run: Run) -> list[Any]:
        """Return 1, 2, 4, … workers, up to the cores this process may use and at most 8."""
        return [n for n in (1, 2, 4, 8) if n <= run.cores]

    def enable(self, run: Run, setting: Any) -> None:
        """Fetch by `setting` workers from the next batch on."""
        if setting not in self._pool:
            workers = ContinuousWorkers(run.loader, setting)
            self._pool[setting] = workers
            if not same_as_plain(run.loader, workers):
                raise ValueError("batches fetched by a worker process differ from the plain ones")
        run.fetching.workers = self._pool[setting]

    def disable(self, run: Run) -> None:
        """Fetch in the loop's own process from the next batch on; the workers are kept."""
        run.fetching.workers = None

    def close(self, run: Run) -> None:
        """Let go of the workers that are not in use; they end once the epoch that may still wait for them is over."""
        self._pool = {setting: workers for setting, workers in self._pool.items() if workers is run.fetching.workers}

    def settling(self, setting: Any) -> int:
        """Return the batches that are still under way after a switch, and some: a fork makes pages copy on write."""
        return 2 * int(setting) + 2

    def describe(self, setting: Any) -> str:
        """Return `workers=n`."""
        return f"workers={setting}"

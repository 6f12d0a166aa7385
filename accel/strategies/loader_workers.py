"""loader_workers: fetch batches ahead, in threads or worker processes, and go on across the epoch boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, DistributedSampler

from accel.dataio.passes.movable import movable, not_elsewhere, not_read_ahead
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.host import available_memory, resident_memory
from accel.run import Run
from accel.strategies.base import Exactness, Strategy
from accel.strategies.trial_design import EpochDesign, TrialDesign

if TYPE_CHECKING:
    from accel.dataio.passes.next_epoch import NextEpoch
    from accel.dataio.passes.not_ahead import AheadCheck
    from accel.dataio.passes.prefetch import PrefetchAcrossEpochs


class LoaderWorkers(Strategy):
    """Move the fetching of a loader out of the loop's way, in the same sample order and across epochs.

    A loader without workers gets some, if fetching depends on the indices alone (see
    `accel.dataio.dataset.fetch_watch`): then the batches are the same bits. Threads are tried only on a dataset that
    they may read together (see `accel.dataio.dataset.thread_safety`).

    One with workers has its next epoch begun early, by workers of its own (see `accel.dataio.passes.next_epoch`). That
    is tried in whole epochs.

    In both cases the next epoch's first batches are fetched while the last ones of this epoch are used.
    """

    name = "loader_workers"
    summary = "batches fetched ahead by threads or worker processes, across epochs"
    treats = frozenset({Bottleneck.INPUT})
    exactness = Exactness.EXACT
    touches = frozenset({"input"})

    def __init__(self) -> None:
        self._pool: dict[Any, PrefetchAcrossEpochs] = {}
        self._next_epoch: NextEpoch | None = None
        self._checks: list[AheadCheck] = []

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: the loader's kind, or a dataset that is more than a function of the index."""
        reason = movable(run.loader)
        if reason:
            return reason
        if run.loader.num_workers > 0:
            return _refusal_of_own(run)
        if reason := not_read_ahead(run.loader):
            return reason
        if run.observed.fetch_finding:
            return run.observed.fetch_finding + ": batches made elsewhere would differ"
        if run.cores < 2:
            return "there is only one core, which the model needs"
        short = "there is no memory for a worker process that comes to have all of this one's"
        return not_elsewhere(run.loader, exact=run.exact) or ("" if self.settings(run) else short)

    def trial_design(self, run: Run) -> TrialDesign:
        """Judge in whole epochs where the loader has workers of its own, which it starts for each epoch."""
        is_by_epoch = isinstance(run.loader, DataLoader) and run.loader.num_workers > 0
        return (EpochDesign if is_by_epoch else TrialDesign)(
            phase="data",
            # What fetches batches otherwise begins with imports and threads, and makes two batches to compare.
            cost_s=0.1,
            # The batches that are still under way after a switch, and some: a fork makes pages copy on write.
            settle_steps=lambda setting: 2 * _count(setting) + 2,
            describe=lambda setting: f"workers={setting}" if isinstance(setting, int) else str(setting),
            depends_on_host=True,
            note=self._compared(),
        )

    def _compared(self) -> str:
        """Tell how many of the batches that were made elsewhere were compared with the loop's own."""
        seen, compared = sum(each.seen for each in self._checks), sum(each.compared for each in self._checks)
        return f"{compared:,} of {seen:,} batches were made by the loop too and compared: the same bits" if seen else ""

    def settings(self, run: Run) -> list[Any]:
        """Return 1, 2, 4, … processes up to the cores this process may use and at most 8; before them threads.

        No more processes than there is memory for, if each comes to have all pages of this one: Python counts
        references in the objects themselves, so that reading a dataset of such copies them.

        A loader with workers of its own keeps their number: what they draw depends on it.
        """
        if run.loader.num_workers > 0:
            return [run.loader.num_workers]
        from accel.dataio.dataset.thread_safety import unsafe

        counts = [n for n in (1, 2, 4, 8) if n <= run.cores]
        threads = [] if unsafe(run.loader.dataset, run.loader.collate_fn) else [f"{_THREADS}{n}" for n in counts]
        available, own = available_memory(), resident_memory()
        return [*threads, *(n for n in counts if available is None or own is None or n * own.private <= available)]

    def enable(self, run: Run, setting: Any) -> None:
        """Fetch so from the next batch on; begin the next epoch early where the loader has workers of its own."""
        if run.loader.num_workers > 0:
            from accel.dataio.passes.next_epoch import NextEpoch

            if self._next_epoch is None:
                self._next_epoch = NextEpoch(run.loader)
            run.fetching.next_epoch = self._next_epoch
            return
        from accel.dataio.passes.moved import moved

        if setting not in self._pool:
            threads = not isinstance(setting, int)
            self._pool[setting] = ahead = moved(run.loader, _count(setting), threads=threads, whole=run.exact)
            self._checks.append(ahead.check)
        run.fetching.workers = self._pool[setting]

    def disable(self, run: Run) -> None:
        """Fetch in the loop's own thread from the next batch on; the workers are kept."""
        run.fetching.workers = run.fetching.next_epoch = None
        if self._next_epoch is not None:
            self._next_epoch.close()

    def close(self, run: Run) -> None:
        """Let go of the workers that are not in use; they end once the epoch that may still wait for them is over."""
        self._pool = {setting: ahead for setting, ahead in self._pool.items() if ahead is run.fetching.workers}
        if self._next_epoch is not run.fetching.next_epoch and self._next_epoch is not None:
            self._next_epoch.close()
            self._next_epoch = None  # the next one may be of another loader


_THREADS = "threads="
_EPOCHS = 12
"""That a trial takes which ends by keeping it."""
# Batches: such a trial takes long, and could win little.
_LONG_EPOCH = 500


def _refusal_of_own(run: Run) -> str:
    if run.world_size > 1 and not isinstance(run.loader.sampler, DistributedSampler):
        return "without a DistributedSampler epochs may end at other steps on each rank, and whole epochs are compared"
    try:
        batches = len(run.loader)
    except TypeError:
        return "the loader's sampler has no length: its epochs may have no end"
    if run.planned_epochs is not None and run.planned_epochs <= _EPOCHS:
        return f"it is compared in {_EPOCHS} whole epochs, more than the run has"
    if batches > _LONG_EPOCH:
        return f"an epoch has {batches:,} batches: starting the loader's own workers costs little beside them"
    return ""


def _count(setting: int | str) -> int:
    return setting if isinstance(setting, int) else int(setting.removeprefix(_THREADS))

"""sample_cache: keep the samples of a dataset that yields the same ones in each epoch, and decode them no more."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from accel.dataio.passes.movable import movable
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.interruptions import ours
from accel.run import Run
from accel.strategies.base import Exactness, NothingHelps, Strategy
from accel.strategies.trial_design import TrialDesign

if TYPE_CHECKING:
    from accel.dataio.passes.kept_samples import KeptSamples

_EPOCHS, _NOTED_S = 2, 15e-6
"""Seconds of noting a sample of 3 kB in each of two epochs: 8 to 23 µs in the first, up to 13 in the second."""
_UNKNOWN_S = 0.1


class KeepSamples(Strategy):
    """Hand out samples from memory that came out the same twice, where fetching depends on the index alone.

    While it waits to be tried, the samples that the loop fetches are looked at: a digest of each in the first epoch;
    in the second those are kept whose digest is the same again (see `accel.dataio.sample_cache`). Then it is switched
    on and off between two steps, like any other.

    Below it the loader's own iterator, threads or forked workers make the batches, so that it goes with
    `loader_workers`.
    """

    name = "sample_cache"
    summary = "samples that come out the same in each epoch kept in memory"
    treats = frozenset({Bottleneck.INPUT})
    exactness = Exactness.EXACT
    touches = frozenset({"input"})

    def __init__(self) -> None:
        self._kept: KeptSamples | None = None
        self._under_way, self._is_preparing = 0, False

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: the loader's kind, or a dataset whose samples differ or can't be kept."""
        reason = movable(run.loader)
        if reason:
            return reason
        from accel.dataio.passes.kept_samples import not_keepable

        if run.observed.fetch_finding:
            return run.observed.fetch_finding + ": a sample may not be the same in each epoch"
        if self._kept is not None and self._kept.loader is run.loader and self._kept.finding:
            return self._kept.finding
        return not_keepable(run.loader)

    def trial_design(self, run: Run) -> TrialDesign:
        """Have samples noted before the trial, and leave out the batches that workers have under way, and one."""
        return TrialDesign(
            phase="data",
            cost_s=self._noting_s(run),
            settle_steps=self._under_way + 1,
            prepare=partial(self.waits, run),
            is_preparing=self._is_preparing,
        )

    def _noting_s(self, run: Run) -> float:
        if self._kept is not None and self._kept.loader is run.loader:
            return 0.0
        try:
            return _EPOCHS * _NOTED_S * len(run.loader.dataset)
        except ours():  # no dataset, or none with a length
            return _UNKNOWN_S

    def waits(self, run: Run) -> str:
        """Have samples looked at, and say what is waited for until most have been kept."""
        kept, workers = self._of(run), run.fetching.workers
        self._under_way = 0 if workers is None else workers.engine.capacity
        waits = kept.waits
        self._is_preparing = bool(waits)
        return kept.finding or waits

    def enable(self, run: Run, setting: Any) -> None:
        """Hand out what is kept from the next batch on; a few samples are compared first."""
        kept = self._of(run)
        if kept.finding:
            raise NothingHelps(kept.finding)
        kept.serve()

    def disable(self, run: Run) -> None:
        """Fetch all samples from the next batch on; what is kept stays."""
        if self._kept is not None:
            self._kept.record()

    def failure(self, run: Run) -> str:
        """Return why what was kept has been dropped; '' if it hasn't been."""
        return "" if self._kept is None or self._kept.cache is not None else self._kept.finding

    def close(self, run: Run) -> None:
        """Give the memory back."""
        self._is_preparing = False
        if self._kept is not None:
            self._kept.close()
            if run.fetching.samples is self._kept:
                run.fetching.samples = None
            self._kept = None

    def _of(self, run: Run) -> KeptSamples:
        if self._kept is None or self._kept.loader is not run.loader:
            from accel.dataio.passes.kept_samples import KeptSamples

            self.close(run)
            self._kept = run.fetching.samples = KeptSamples(run.loader)
            if run.fetching.workers is not None and run.fetching.workers.engine.copies:
                run.fetching.workers.renew_copies()
        return self._kept

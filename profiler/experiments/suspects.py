"""Which suspects are tested, and how each is switched off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel

from accel.profiler.experiments.stale_reads import StaleReads
from accel.profiler.experiments.whatif import (
    AllThreads,
    Counterfactual,
    FetchedAhead,
    NoAnomalyMode,
    NoCollector,
    NoExchange,
    OneUpdate,
    can_update_at_once,
)
from accel.profiler.gather import Exchange
from accel.profiler.host import usable_cores
from accel.profiler.loop.recorder import Recorder

MAX_TESTED = 3
"""Most suspects that are tested in a run."""
_AHEAD = ("input.cpu", "input.storage", "input.workers", "input.worker_storage", "input.handover", "input.collate")


def counterfactual(cause: str, recorder: Recorder, local_ranks: int) -> Counterfactual | None:
    """Return what switches a cause off in this run, None if nothing does."""
    if cause in _AHEAD and recorder.loader is not None:
        return FetchedAhead(recorder)
    if cause == "sync.read":
        return StaleReads()
    if cause == "host.gc":
        return NoCollector(lambda: recorder.probes.collector.seconds)
    if cause == "compute.anomaly":
        return NoAnomalyMode()
    if cause == "compute.threads":
        return AllThreads(max(1, usable_cores() // local_ranks))
    if cause.startswith("optimizer.") and any(can_update_at_once(o) for o in recorder.optimizers):
        return OneUpdate(recorder.optimizers)
    ddp = [module for module in recorder.roots.modules if isinstance(module, DistributedDataParallel)]
    return NoExchange(ddp) if cause == "communication.exposed" and ddp else None


def agreed(own: Sequence[str], exchange: Exchange) -> list[str]:
    """Return the causes to test, the same on all ranks.

    Raises:
        OSError: if the other ranks can't be reached.
    """
    if not exchange.launched:
        return list(own[:MAX_TESTED])

    def elected(suspects: list[Sequence[str] | None]) -> list[str]:
        if None in suspects:
            return []
        # A waiting rank suspects what the slow one can't see, so all votes count. A rank that can't switch a cause
        # takes part unchanged.
        votes = Counter(cause for causes in suspects for cause in causes or ())
        return [cause for cause, _ in votes.most_common(MAX_TESTED)]

    return exchange.decide("suspects", list(own), elected)

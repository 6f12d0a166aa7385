"""Workers for a loader that has none, checked to make the same bits."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from accel.dataio.batches import equal, one_memory
from accel.dataio.dataset.handles import check_fork
from accel.dataio.engine.engine import Engine, ThreadEngine
from accel.dataio.engine.processes import STALL_S, ProcessEngine
from accel.dataio.fetching.randomness import states_of_their_own
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from accel.profiler.errors import InvalidArgument

# Processes by another method import the user's script; where there is no fork, starting them is refused.
_START_METHOD = "fork" if sys.platform == "linux" else None


def moved(loader: DataLoader[Any], workers: int, *, threads: bool = False, whole: bool = False) -> PrefetchAcrossEpochs:
    """Return what makes a loader's batches ahead in worker processes, or in threads; `whole`: see `AheadCheck`.

    Raises:
        InvalidArgument: if the batches of its first samples differ from the plain loader's, or hold what is the
            dataset's own, and processes would hand out copies.
    """
    with states_of_their_own():  # these samples may draw
        engine: Engine = ThreadEngine(loader, workers) if threads else _processes(loader, workers)
        continuous = PrefetchAcrossEpochs(loader, engine, strict=True, whole=whole)
        try:
            if not same_as_plain(loader, continuous):
                raise InvalidArgument("prefetched batches differ from the plain loader's")
        except BaseException:
            continuous.close()
            raise
        return continuous


def _processes(loader: DataLoader[Any], workers: int) -> ProcessEngine:
    began = time.perf_counter()
    batch = _plain(loader, _first(loader))
    took_s = time.perf_counter() - began
    if one_memory(batch, _plain(loader, _first(loader))):
        raise InvalidArgument(
            "batches hold the dataset's own objects: what the loop writes there must stay there, and worker processes "
            "return copies"
        )
    stall_s = max(STALL_S, 10 * took_s)
    check = partial(check_fork, loader)
    return ProcessEngine(loader, workers, start_method=_START_METHOD, check=check, as_loop=True, stall_s=stall_s)


def same_as_plain(loader: DataLoader[Any], workers: PrefetchAcrossEpochs) -> bool:
    """Fetch the dataset's first samples plainly and through `workers`, and return whether the bits agree.

    A batch of the loader's own size is taken from the front of the dataset; no sampler and no
    random state is touched. Plainly first: processes are forked by the first fetch through them,
    and what the plain one has moved shows.
    """
    indices = _first(loader)
    plain = _plain(loader, indices)
    workers.take(iter([indices]), ahead=False)
    try:
        return equal(workers.fetch(), plain)
    finally:
        workers.epoch.feeding = False


def _first(loader: DataLoader[Any]) -> list[int]:
    return list(range(min(len(loader.dataset), loader.batch_size or 1)))  # type: ignore[arg-type]


def _plain(loader: DataLoader[Any], indices: list[int]) -> Any:
    return _MapDatasetFetcher(loader.dataset, True, loader.collate_fn, False).fetch(indices)  # type: ignore[no-untyped-call]

"""Workers for a loader that has none, checked to make the same bits."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from accel.dataio.batches import equal
from accel.dataio.dataset.handles import check_fork
from accel.dataio.engine.engine import Engine, ThreadEngine
from accel.dataio.engine.processes import ProcessEngine
from accel.dataio.passes.continuous import Continuous

# Processes by another method import the user's script; where there is no fork, starting them is refused.
_START_METHOD = "fork" if sys.platform == "linux" else None


def moved(loader: DataLoader[Any], workers: int, *, threads: bool = False) -> Continuous:
    """Return what makes a loader's batches ahead in worker processes, or in threads.

    Raises:
        ValueError: if the batches of its first samples differ from the plain loader's.
    """
    engine: Engine
    if threads:
        engine = ThreadEngine(loader, workers)
    else:
        check = partial(check_fork, loader)
        engine = ProcessEngine(loader, workers, start_method=_START_METHOD, check=check, as_loop=True)
    continuous = Continuous(loader, engine, strict=True)
    if not same_as_plain(loader, continuous):
        continuous.close()
        raise ValueError("prefetched batches differ from the plain loader's")
    return continuous


def same_as_plain(loader: DataLoader[Any], workers: Continuous) -> bool:
    """Fetch the dataset's first samples through `workers` and plainly, and return whether the bits agree.

    A batch of the loader's own size is taken from the front of the dataset; no sampler and no random state is touched.
    """
    count = min(len(loader.dataset), loader.batch_size or 1)  # type: ignore[arg-type]
    indices = list(range(count))
    workers.take(iter([indices]), ahead=False)
    try:
        moved = workers.fetch()
    finally:
        workers.close_feed()
    plain = loader.collate_fn(_samples(loader.dataset, indices))
    return equal(moved, plain)


def _samples(dataset: Any, indices: list[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]

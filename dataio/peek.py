"""The next epoch of a sampler before it begins, so that batches can be prefetched across the end of an epoch.

A batch sampler takes part if it has an int `epoch` and a method `peek_epoch(epoch)`, which returns a `PeekedEpoch`, or
None where the next epoch can't be known. accel.dataio.passes.epochs calls it. Samplers of torch need no such method:
their index lists depend only on the random state and on their epoch. It may draw from the loader's generators, not from
torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class PeekedEpoch(NamedTuple):
    """The next epoch of a sampler, whose own state has not changed."""

    lists: Iterator[Any]
    """Its index lists; some are drawn before it begins, the others afterwards."""
    holds: Callable[[], bool] = lambda: True
    """Return whether an epoch that begins now would have the same lists."""
    begin: Callable[[], None] = lambda: None
    """Make it the sampler's running epoch, as `iter(sampler)` would have; called once, if `holds()`."""

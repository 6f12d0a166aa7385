"""What a sampler tells of its next pass before that begins, so that batches can be made ahead across an epoch's end.

A batch sampler with an int `epoch` and a method `foresee(epoch)`, which returns a `Foreseen` or None if it can't, is
asked by what makes batches ahead (accel.dataio.passes.epochs). Samplers of torch need no such method: what they draw
depends on the random state and on their epoch only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


class Foreseen(NamedTuple):
    """The next pass over a sampler, which is left as it is."""

    lists: Iterator[Any]
    """The pass's index lists; drawn before it begins and afterwards, as many as are wanted."""
    holds: Callable[[], bool] = _always
    """Tell whether a pass that begins now would yield them, too."""
    begin: Callable[[], None] = _nothing
    """Make it the sampler's running pass, as `iter(sampler)` would have; called once, if `holds()`."""

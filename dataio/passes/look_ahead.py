"""How many batches each worker may be ahead, from how long the running loop waits.

Batches that all cost the same need two. If now and then one takes long (a slow answer of the storage, a long clip, a
step that saves), the queue runs dry although the workers are fast enough on average. Then a deeper queue bridges the
gap. It costs memory and no time, so nothing is tried beforehand: while the loop waits, the look-ahead is multiplied by
four, and put back if that didn't shorten the wait by a third, as when the workers are just too slow.
"""

from __future__ import annotations

# Of the loop's time per batch: a shorter wait is not worth memory.
_NEGLIGIBLE = 0.03
_FACTOR = 4
_SHORTER = 0.67
# Batches in all: beyond that, an epoch's order is drawn far ahead, and memory fills.
_MOST = 64


class LookAhead:
    """Batches that each worker may be ahead.

    Args:
        batches: at the beginning, at least 1.
        fixed: leave it at that.

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
        deeper = min(_FACTOR * self.batches, _MOST // workers)
        if wait_s <= _NEGLIGIBLE * (wait_s + step_s) or deeper <= self.batches:
            return False
        self._before, self.batches = (self.batches, wait_s), deeper
        return True

"""How many batches a loop fetches ahead of the one that it trains on, as prefetchers that scripts write do.

    batch delivered       1  2     3     4              the second comes before the first is trained on, and so on
    backward pass               1     2     3
    delivered − trained         1     1     1           as long as the loop goes on so

A loop that takes two batches for a step (1, 2, 3, …) fetches none ahead, nor does one that passes over a batch now and
then. Of one that passes over a pass's first batch, as after a picture of it, it can't be told: it counts as one ahead.
"""

from __future__ import annotations

from accel.dataio.elastic_sampler import MOST_HELD


class HeldBatches:
    """Count batches and backward passes.

    Args:
        batches: of the passes before.

    Attributes:
        batches: that are delivered, and not trained on, when a step ends; as in the pass before until it is known.

    Example:
        >>> ahead, one_pass = HeldBatches(), object()
        >>> ahead.delivered(one_pass)
        >>> for _ in range(2):
        ...     ahead.delivered(one_pass)
        ...     ahead.trained()
        >>> ahead.batches
        1
    """

    def __init__(self, batches: int = 0) -> None:
        self.batches = batches
        self._pass: object | None = None
        self._delivered = self._trained = self._at_first = 0
        """In the pass; and how many were ahead when the first was trained on."""
        self._is_new = False
        """A batch was delivered since the last backward pass."""

    @property
    def untrained(self) -> int:
        """Batches of this pass that are delivered, and for which no backward pass has begun."""
        return max(0, self._delivered - self._trained)

    def delivered(self, one: object) -> None:
        """A batch has come.

        Args:
            one: the pass that it is of.
        """
        if one is not self._pass:
            self._pass, self._delivered, self._trained = one, 0, 0
        self._delivered += 1
        self._is_new = True

    def trained(self) -> None:
        """A backward pass begins; the first one since a batch was delivered counts."""
        if not self._is_new:
            return
        self._is_new = False
        self._trained += 1
        ahead = self._delivered - self._trained
        if self._trained == 1:
            self._at_first = ahead
        elif self._trained == 2:
            # One more is in hand while a batch is trained on.
            self.batches = ahead if ahead == self._at_first and ahead < MOST_HELD else 0

"""How far an acceleration may move the numbers of a training."""

from __future__ import annotations

from enum import IntEnum


class Exactness(IntEnum):
    """How far the numbers may move; a higher value moves them further."""

    EXACT = 0
    """The same bits."""
    REORDERED = 1
    """The same precision, another order of summation."""
    REDUCED = 2
    """Fewer bits somewhere: TF32, bfloat16, fp16 with master weights."""
    LOSSY = 3
    """Information is left out and fed back later: gradient compression."""

    @property
    def word(self) -> str:
        """The name users write in `allow=`."""
        return self.name.lower()

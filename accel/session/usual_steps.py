"""Which steps are measured: those that are like most others of the loop.

An epoch's first step includes starting the loader, and its last may have fewer samples. Where every epoch has one
batch, or batches differ in size, as those of a token budget do, nothing can be told apart, and every step counts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

from accel.profiler.phases import Measurement

_LOOKED_AT, _FEW = 64, 8
"""Steps by which the usual one is known; of fewer, an epoch's first is always odd."""
_USUAL = 0.5
"""Share of them that has one size, or is no epoch's first, from which on another one is odd."""


class UsualSteps:
    """Know the usual step by the last ones.

    Attributes:
        tells_sizes: steps of another size are odd. Ranks must end an action at the same step, and may differ in this.
    """

    def __init__(self) -> None:
        self.tells_sizes = True
        self._sizes: deque[int] = deque(maxlen=_LOOKED_AT)
        self._firsts: deque[bool] = deque(maxlen=_LOOKED_AT)
        self._usual: int | None = None

    @property
    def sizes(self) -> Collection[int]:
        """Samples of the last steps."""
        return self._sizes

    @property
    def size(self) -> int:
        """Samples of most steps, 0 if unknown."""
        return Counter(self._sizes).most_common(1)[0][0] if self._sizes else 0

    def add(self, measured: Measurement) -> None:
        """Take in a step."""
        self._sizes.append(measured.samples)
        self._firsts.append(measured.first)

    def is_odd(self, measured: Measurement) -> bool:
        """Return whether a step that was taken in should be left out."""
        if measured.first and (len(self._firsts) < _FEW or sum(self._firsts) <= _USUAL * len(self._firsts)):
            return True
        if measured.samples != self._usual or len(self._sizes) < 2:  # counting costs 5 µs: only if it can matter
            size, count = Counter(self._sizes).most_common(1)[0]
            self._usual = size if count >= _USUAL * len(self._sizes) else None
        return self.tells_sizes and self._usual is not None and measured.samples != self._usual

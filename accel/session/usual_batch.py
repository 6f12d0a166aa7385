"""The usual batch: the shape that most of the measured steps have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

_JUDGED_BY = 5
"""Steps by whose batches the usual shape is judged, at the least."""
_USUAL = 0.8
"""Share of them that has it: one odd batch in four is not a variation."""


class UsualBatch:
    """Know the shape of the usual batch."""

    def __init__(self) -> None:
        self.shape: Hashable = None
        """Its shape, "varying" if there is no usual one, None before the first steps."""
        self._growth = 1.0
        """By how much the batch was changed since growth was taken last."""
        self._grown: Hashable = None
        """The usual shape then."""
        self._counts: Counter[Hashable] = Counter()
        """Of the measured steps since that was judged: an action of one step has one shape although shapes vary."""

    def judge(self, shapes: Iterable[Hashable]) -> bool:
        """Take in the shapes of measured steps; tell whether the usual one was judged anew."""
        self._counts.update(shapes)
        if self.shape is not None and self._counts.total() < _JUDGED_BY:
            return False
        shape, count = self._counts.most_common(1)[0] if self._counts else (None, 0)
        self.shape = shape if count >= _USUAL * self._counts.total() else "varying"
        self._counts.clear()
        return True

    def resize(self, growth: float) -> None:
        """The batch controller has made the batch so many times as large: earlier shapes say nothing of it."""
        self._growth *= growth
        self._counts.clear()

    def take_growth(self) -> float:
        """Return by how much the batch has been changed, once the usual shape has followed; else 1."""
        if self.shape in (self._grown, "varying"):
            return 1.0
        self._grown, growth, self._growth = self.shape, self._growth, 1.0
        return growth

"""What is usual in a loop: the steps that are measured are those that are like most others.

An epoch's first step includes starting the loader, and its last may have fewer samples. Where every epoch has one
batch, or batches differ in size, as those of a token budget do, nothing can be told apart, and every step counts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable

from accel.profiler.phases import Measurement

_LOOKED_AT, _FEW = 64, 8
"""Steps by which the usual one is known; of fewer, an epoch's first is always odd."""
_USUAL = 0.5
"""Share of them that has one size, or is no epoch's first, from which on another one is odd."""
_JUDGED_BY = 5
"""Steps by whose batches the usual shape is judged, at the least."""
_USUAL_SHAPE = 0.8
"""Share of them that has it: one odd batch in four is not a variation."""


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
        self.shape = shape if count >= _USUAL_SHAPE * self._counts.total() else "varying"
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

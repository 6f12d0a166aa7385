"""An action that counts a whole epoch: which steps are in it."""

from __future__ import annotations

from accel.profiler.phases import Measurement
from accel.search.actions import Result

_REPEATED = 50
"""Steps that count as an epoch where the loop repeats batches, and no epoch begins any more."""


class WholeEpoch:
    """Book each step of the first epoch that begins within an action.

    Args:
        begun: epochs that had begun when the action began.
    """

    def __init__(self, begun: int = 0) -> None:
        self._before, self._counted = begun, 0

    def book(self, measured: Measurement, result: Result, begun: int, are_repeated: bool) -> bool:
        """Book a step if it is one of that epoch; return whether the epoch has ended before this step.

        Args:
            measured: the step.
            result: of the action.
            begun: epochs that have begun.
            are_repeated: the loop repeats batches that it has kept.
        """
        if are_repeated:
            result.measurements.append(measured)
            return len(result.measurements) >= _REPEATED
        is_counting = bool(result.measurements)
        if measured.first and begun > (self._counted if is_counting else self._before):
            if is_counting:
                return True  # the loop has left the epoch before its end
            self._counted, is_counting = begun, True
        if is_counting:
            result.measurements.append(measured)
        return False

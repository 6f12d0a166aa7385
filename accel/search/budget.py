"""How much the search may cost: seconds in all, or a share of the run so far and of what it has saved."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from accel.errors import InvalidArgument

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_REINVESTED = 0.5
"""Share of what the search has saved that it may spend again: a run that has become faster stays so."""
TO_WIN = 0.1
"""Gain that a cost must be won back by in what is still to come of the run: if that isn't known, as long again as it
has lasted. Without this bound a compilation of 32 s, for which savings had just become enough, took a sixth of a run of
three minutes."""

_REMEDY = 'write seconds (60), "90s", "2m" or a share of the run ("10%")'


@dataclass(frozen=True)
class Budget:
    """Limit on what guards, one-off work and slower trial steps may cost.

    A share paces the search: a cost c is accepted only once the run has lasted c ÷ share, so that a run that ends early
    has lost no more than that share. This is the ski-rental (rent-or-buy) rule for an unknown horizon. Half of what the
    search has saved by then may be spent too, but on nothing that takes more than a tenth of the run so far. Where it
    is known what is still to come, the share is that of the whole run, savings count up to its end, and one cost may
    take a tenth of what is to come.
    """

    seconds: float = math.inf
    share: float = 1.0
    text: str = ""

    @classmethod
    def parse(cls, value: float | int | str) -> Budget:
        """Read a budget: a number of seconds, "90s", "2m", "1h" or "10%".

        Raises:
            InvalidArgument: if it is none of these, not positive, or a number below 1: that was meant as a share.
        """
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%|s|m|min|h|)\s*", value if isinstance(value, str) else "")
        if isinstance(value, int | float) and not isinstance(value, bool):
            number, unit, text = float(value), "", f"{value:g}s"
        elif match is None:
            raise InvalidArgument(f"budget must be a time or a share, got {value!r}; {_REMEDY}")
        else:
            number, unit = float(match[1]), match[2]
            text = match[0].strip() if unit else f"{number:g}s"
        if not unit and 0 < number < 1:
            meant = f"did you mean '{100 * number:.6g}%'? Else {_REMEDY}"
            raise InvalidArgument(f"budget without a unit must be at least 1 s, got {value!r}; {meant}")
        if unit != "%":
            if not 0 < number < math.inf:
                raise InvalidArgument(f"budget must be a positive time, got {text}; {_REMEDY}")
            return cls(seconds=number * _UNITS.get(unit, 1.0), text=text)
        if not 0 < number <= 100:
            raise InvalidArgument(f"budget as a share must lie in (0 %, 100 %], got {value!r}; {_REMEDY}")
        return cls(share=number / 100, text=text)

    def allows(
        self,
        *,
        spent: float,
        expected: float,
        elapsed: float,
        saved: float = 0.0,
        to_come: float | None = None,
        to_win: float = TO_WIN,
    ) -> bool:
        """Return whether a further cost of `expected` seconds is allowed, `elapsed` seconds into the run.

        Args:
            spent: what the search has cost so far, s.
            expected: the further cost, s.
            elapsed: length of the run so far, s.
            saved: by how much what is kept has shortened it, and will if `to_come` is known, s.
            to_come: length of the rest of the run, s; None if that isn't known.
            to_win: share of the rest, if known, that the cost may take.
        """
        dearest_s = max(self.share, TO_WIN) * elapsed if to_come is None else max(self.share, to_win) * to_come
        if expected > dearest_s:
            return False
        return spent + expected <= self.in_all(elapsed=elapsed + (to_come or 0.0), saved=saved)

    def in_all(self, *, elapsed: float, saved: float = 0.0) -> float:
        """Return what the search may cost in a run of so many seconds, s."""
        return min(self.seconds, self.share * elapsed + _REINVESTED * saved)

    def allowed_from(self, *, spent: float, expected: float, saved: float = 0.0) -> float:
        """Return how long the run must last, s, until that is allowed, if nothing more is saved; may be infinite."""
        if self.exhausted(spent, expected):
            return math.inf
        dearest = max(self.share, TO_WIN)
        return max(max(0.0, spent + expected - _REINVESTED * saved) / self.share, expected / dearest)

    def exhausted(self, spent: float, expected: float) -> bool:
        """Return whether waiting can't help: an absolute budget has too little left."""
        return spent + expected > self.seconds

    def too_dear(self, spent: float, expected: float, work: str = "one-off work", *, never: bool = False) -> str:
        """Return why a further cost of `expected` seconds is not allowed.

        Args:
            spent: what the search has cost so far, s.
            expected: the further cost, s; 0 for one that can't be estimated.
            work: what takes those seconds.
            never: it is known how much longer the run goes on, and that is too short.
        """
        later = "" if never or self.exhausted(spent, expected) else "; tried once the run is long enough"
        if expected:
            return f"about {expected:.2g} s of {work}, more than the budget of {self.text} allows now{later}"
        return f"the budget of {self.text} is spent{later}"

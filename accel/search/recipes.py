"""What an expert would switch on at once, as far as the project's records bear it out.

`recipes.json` is written by `python -m benchmarks.recipes` from the recorded results; a test compares the two. A recipe
is a suggestion, as a plan is that an earlier run has found: `accel.search.trying` checks and tries it as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.interruptions import ours
from accel.profiler.typed_json import decode, read
from accel.search.plan import Choices

if TYPE_CHECKING:
    from accel.search.state import SearchState

PATH = Path(__file__).with_name("recipes.json")


@dataclass(frozen=True, kw_only=True)
class RecipeMember:
    """A strategy of a recipe, and what the records say of it."""

    strategy: str
    where: str = ""
    """The bottleneck that must limit the step; '' for any."""
    is_free: bool = False
    """It moves no bit, costs next to nothing to switch, and has not lost: it is on from the first steps."""
    trials: int = 0
    won: int = 0
    lost: int = 0
    """In these the whole interval was below 1."""
    gain: float | None = None
    """Geometric mean where it won."""


@cache
def members(device: str) -> tuple[RecipeMember, ...]:
    """Return the recipe for a kind of device (`Run.device_kind`), empty for one without."""
    recipes = decode(PATH.read_text("utf-8"))["recipes"]
    return tuple(read(RecipeMember, each, device) for each in recipes.get(device, ()))


class Recipe:
    """The recipe for a run.

    Args:
        device: the kind of device; '' has none.
    """

    what = "the recipe"

    def __init__(self, device: str) -> None:
        self._device, self._members = device, members(device)
        self.is_checking = False
        self._tried: set[str] = set()

    def begin_again(self) -> None:
        """The search begins again: nothing of it has been tried."""
        self.is_checking, self._tried = False, set()

    def gain(self, name: str) -> float:
        """Return the ratio that a strategy has gained on such a device where it won; 1 if there is no record."""
        return next((each.gain or 1.0 for each in self._members if each.strategy == name), 1.0)

    def choices(self, state: SearchState, *, free: bool = False) -> Choices:
        """Return what of it applies here, has not been decided and is not on, each with its best guess of a setting.

        Args:
            free: only what is on from the first steps.
        """
        findings = [Bottleneck(finding.bottleneck) for finding in state.diagnosis.findings]
        limit = next(iter((*findings, *state.diagnosis.limits)), None)
        plan: Choices = {}
        for member in self._members:
            name, candidate = member.strategy, state.candidates.get(member.strategy)
            if candidate is None or not candidate.is_pending or name in self._tried or state.recollection.lost(name):
                continue
            fits = not member.where or (limit is not None and Bottleneck(member.where) is limit)
            if fits and (member.is_free or not free) and not candidate.refusal():
                try:
                    plan[name] = candidate.settings()[0]
                except ours():  # its own check of the run will say so
                    continue
        return plan

    def begin_check(self, plan: Choices) -> None:
        """Note that a part of it is checked now, which is not tried again as such."""
        self._tried.update(plan)
        self.is_checking = True

    def confirm(self) -> None:
        """It has passed the guard and its trial."""
        self.is_checking = False

    def reject(self, why: str) -> None:
        """It did not pass; what it consists of is tried one by one."""
        self.is_checking = False

    def reason(self) -> str:
        """Return why a strategy of it is kept."""
        return f"of the recipe for {self._device}, which was checked and tried as a whole"

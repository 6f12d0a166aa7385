"""What a strategy is: one acceleration that can be switched on and off at a step boundary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.interruptions import ours
from accel.strategies.trial_design import TrialDesign

if TYPE_CHECKING:
    from accel.run import Run


class NothingHelps(Exception):
    """What `Strategy.enable` raises to decline: it looked, and its message says with numbers why nothing would help."""


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


class Strategy(ABC):
    """One acceleration: a small class in a file of its own. This is the manual of writing one.

    It says what it treats, whether it applies to this run and why not, how exact it is, how it is judged, and how it is
    switched on and off; it never measures and never decides. Set the class attributes, write `refusal`, `enable` and
    `disable`; everything else has a default. Then add a line to the registry (`accel.strategies`).

    One object lives as long as the run. It is switched on and off many times in a trial, between two steps, so what is
    expensive to make (a compiled graph, worker processes) is kept from use to use and given up in `close`. Every run
    imports every strategy's module: what takes long to import is imported in `enable`, or in `refusal` behind the
    checks that cost nothing.

    How it is judged is its own business. By default blocks of steps with and without it take turns. `comparison`
    returns a `TrialDesign` with other numbers (one-off work, steps to settle, …), an `EpochDesign` for what takes
    effect when an epoch begins, or a subclass written in the strategy's own file (see `accel.strategies.allocator`).
    `touches` says what the guard compares before that.

    Ways to act:

        wrap the model's call     run.gate.add(self.name, wrap) and run.gate.remove(self.name)
        change each batch         run.fetching.transforms[self.name] = function
        change a setting          of torch, or of the optimizers in run.optimizers; one of the whole process through
                                  `ProcessSetting`, as other models may switch it too
        change modules' classes   see examples/own_strategy.py; never set plain attributes on a module, since the
                                  guard puts attributes back before each replay

    A complete one is in examples/own_strategy.py.
    """

    name: ClassVar[str]
    """Registered name, a Python identifier."""
    summary: ClassVar[str]
    """What it does, one line."""
    treats: ClassVar[frozenset[Bottleneck]]
    """Bottlenecks that it treats: strategies that treat what was just measured are tried first. What treats
    `communication` changes how ranks talk to each other: all of them switch it at the same step, or none."""
    exactness: ClassVar[Exactness]
    """How far it may move the numbers; the guard holds it to that."""
    touches: ClassVar[frozenset[str]] = frozenset({"model"})
    """What the guard compares: `model` (outputs and gradients), `optimizer` (the update), `input` (the batch). Empty if
    nothing has to be compared, or it compares its numbers itself."""

    @abstractmethod
    def refusal(self, run: Run) -> str:
        """Return '' if it applies to this run, else one sentence that says why not."""

    def settings(self, run: Run) -> list[Any]:
        """Return the settings worth trying, best guess first; one None when there is nothing to set."""
        return [None]

    def comparison(self, run: Run) -> TrialDesign:
        """Return how it is judged in this run, as things are now; asked often, so it must be cheap."""
        return TrialDesign()

    @abstractmethod
    def enable(self, run: Run, setting: Any) -> None:
        """Switch on, at a step boundary."""

    @abstractmethod
    def disable(self, run: Run) -> None:
        """Switch off, at a step boundary, also after an `enable` that failed; leaves all as it was before."""

    def failure(self, run: Run) -> str:
        """Return why it has stopped acting since it was switched on, where it does so by itself; '' if it hasn't."""
        return ""

    def close(self, run: Run) -> None:  # noqa: B027  (most strategies keep nothing)
        """Give up what was kept between uses."""


def asked(refusal: Callable[[], str]) -> str:
    """Ask why a strategy does not apply; one whose own check fails is left out, and the run goes on."""
    try:
        return refusal()
    except ours() as error:
        return f"its check of the run failed: {type(error).__name__}: {error}"


def designed(strategy: Strategy, run: Run) -> TrialDesign:
    """Ask how a strategy is judged; one that can't say of this run is judged by blocks, if it applies at all."""
    try:
        return strategy.comparison(run)
    except ours():
        return TrialDesign()


def is_collective(strategy: Strategy) -> bool:
    """Tell whether all ranks must switch a strategy at the same step, or none."""
    return Bottleneck.COMMUNICATION in strategy.treats

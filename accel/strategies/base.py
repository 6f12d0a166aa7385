"""What a strategy is: one acceleration that can be switched on and off at a step boundary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from accel.errors import AccelError
from accel.exactness import Exactness as Exactness
from accel.guard.alone import is_sharded
from accel.guard.together import why_not_together
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.interruptions import ours
from accel.strategies.trial_design import TrialDesign

if TYPE_CHECKING:
    from accel.run import Run


class NothingHelps(AccelError):
    """What `Strategy.enable` raises to decline: it looked, and its message says with numbers why nothing would help."""


class Strategy(ABC):
    """One acceleration: a small class in a file of its own. This is the manual of writing one.

    It says what it treats, whether it applies to this run and why not, how exact it is, how it is judged, and how it is
    switched on and off; it never measures and never decides. Set the class attributes, write `refusal`, `enable` and
    `disable`; everything else has a default. Then add a line to the registry (`accel.strategies`).

    One object lives as long as the run. It is switched on and off many times in a trial, between two steps, so what is
    expensive to make (a compiled graph, worker processes) is kept from use to use and given up in `close`. Every run
    imports every strategy's module: what takes long to import is imported in `enable`, or in `refusal` behind the
    checks that cost nothing.

    How it is judged is its own business. By default blocks of steps with and without it take turns. `trial_design`
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
    """Bottlenecks that it treats: strategies that treat what was just measured are tried first."""
    exactness: ClassVar[Exactness]
    """How far it may move the numbers; the guard holds it to that."""
    touches: ClassVar[frozenset[str]] = frozenset({"model"})
    """What the guard compares: `model` (outputs and gradients), `optimizer` (the update), `input` (the batch). Empty if
    nothing has to be compared, or it compares its numbers itself. With several ranks all switch it on at the same step,
    or none; what touches the `optimizer`, or `ranks` (how they talk, which isn't compared), one can't leave alone. One
    of the model that says `shards` too can do with weights that are gathered in each call (FSDP2)."""

    @abstractmethod
    def refusal(self, run: Run) -> str:
        """Return '' if it applies to this run, else one sentence that says why not."""

    def settings(self, run: Run) -> list[Any]:
        """Return the settings worth trying, best guess first; one None when there is nothing to set."""
        return [None]

    def trial_design(self, run: Run) -> TrialDesign:
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


def why_not(strategy: Strategy, run: Run) -> str:
    """Return why a strategy does not apply to a run, by its own word and for what holds for all of its kind."""
    acts_on_model = "model" in strategy.touches
    if acts_on_model and run.observed.uncalled:
        return run.observed.uncalled
    if why := asked(lambda: strategy.refusal(run)):
        return why
    if acts_on_model and (why := _not_on_shards(strategy, run)):  # after it: that looks at all modules
        return why
    if acts_on_model and len(devices := sorted({str(p.device) for p in run.model.parameters()})) > 1:
        return f"the model is spread over {', '.join(devices)}, and is left whole"
    return run.refused_elsewhere.get(strategy.name, "")


def _not_on_shards(strategy: Strategy, run: Run) -> str:
    if not is_sharded(run.model):
        return ""
    if why := why_not_together(run.model):
        return why
    return "" if "shards" in strategy.touches else "the model is sharded (FSDP2), and gathers its weights in each call"


def designed(strategy: Strategy, run: Run) -> TrialDesign:
    """Ask how a strategy is judged; one that can't say of this run is judged by blocks, if it applies at all."""
    try:
        return strategy.trial_design(run)
    except ours():
        return TrialDesign()


def needs_cuda(run: Run) -> str:
    """Say that a strategy needs a CUDA device; '' where the model is on one."""
    return "" if run.cuda else f"it needs a CUDA device; the model is on the {run.device.type.upper()}"


def is_collective(strategy: Strategy) -> bool:
    """Tell whether no rank may leave a strategy alone: ranks would no longer talk alike, or have the same weights."""
    return bool(strategy.touches & {"optimizer", "ranks"})


def is_compared(strategy: Strategy) -> bool:
    """Tell whether the guard compares a strategy with the plain path."""
    return bool(strategy.touches - {"ranks", "shards"})

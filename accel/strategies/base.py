"""What a strategy is: one acceleration that can be switched on and off at a step boundary.

A strategy is a small class in a file of its own. It says what it treats, whether it applies to this run and why not,
how exact it is, and how it is switched on and off; it never measures and never decides.

Every run imports every strategy's module, so what takes long to import is imported in `enable`, or in `refusal` behind
the checks that cost nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.interruptions import ours

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
    """One acceleration.

    Subclasses set the class attributes and write `refusal`, `enable` and `disable`. The same object is switched on and
    off many times in a trial, so that what is expensive to make (a compiled graph, worker processes) is kept between
    two uses and given up in `close`.
    """

    name: ClassVar[str]
    """Registered name, a Python identifier."""
    summary: ClassVar[str]
    """What it does, one line."""
    treats: ClassVar[frozenset[Bottleneck]]
    """Bottlenecks it treats; the controller tries those strategies first that treat what it just measured."""
    exactness: ClassVar[Exactness]
    touches: ClassVar[frozenset[str]] = frozenset({"model"})
    """What the guard must compare: `model` (outputs and gradients), `optimizer` (the update), `input` (the batch)."""
    phase: ClassVar[str] = ""
    """The one phase of the step that it can shorten (`data`, `optimizer`); not tried when that phase is negligible."""
    host_dependent: ClassVar[bool] = False
    """Its gain depends on what else the machine does: once kept, it is tried again from time to time."""
    frees_cores: ClassVar[bool] = False
    """It uses fewer cores: tried as soon as other processes keep them busy, and again once these have left."""
    compiles: ClassVar[bool] = False
    """The model's call is compiled. It draws random numbers in canonical order (`accel.guard.draws`) by itself."""
    captures: ClassVar[bool] = False
    """The model's calls are graphs, and run eagerly under a mode of torch, which would not see into them."""
    lasting: ClassVar[bool] = False
    """It saves page faults, and its effect may outlast it: where steps without it no longer have them, blocks of steps
    in turns compare nothing, and it is judged by the steps before and after it."""
    collective: ClassVar[bool] = False
    """With it, ranks talk to each other in another way: all must switch it at the same step, or none."""
    opt_in: ClassVar[str] = ""
    """Why it runs only when named in `enable=`; empty for all others."""
    one_off_s: ClassVar[float] = 0.0
    """Seconds of one-off work that the budget must allow for before it is tried; `expected_s` may know better."""
    repeated_share: ClassVar[float] = 1.0
    """Share of that work which a later process does again; the rest is kept on disk, by torch for instance."""
    settle_steps: ClassVar[int] = 1
    """Steps to leave out after each switch, until its effect is steady; see `settling`."""
    is_preparing: bool = False
    """It prepares itself while it is off, see `waits`, so that it is not closed."""

    @abstractmethod
    def refusal(self, run: Run) -> str:
        """Return '' if it applies to this run, else one sentence that says why not."""

    def waits(self, run: Run) -> str:
        """Return '' if it can be tried now, else what it waits for in the running loop; begins what that takes."""
        return ""

    def failure(self, run: Run) -> str:
        """Return why it has stopped acting since it was switched on, where it does so by itself; '' if it hasn't."""
        return ""

    def note(self, run: Run) -> str:
        """Return what the report adds to why it was kept; '' for nothing."""
        return ""

    def expected_s(self, run: Run, setting: Any) -> float:
        """Return seconds of one-off work to expect of a setting in this run, while none have been measured."""
        return self.one_off_s

    def repeats(self, setting: Any) -> float:
        """Return the share of the one-off work just done that a later process does again."""
        return self.repeated_share

    def settings(self, run: Run) -> list[Any]:
        """Return the settings worth trying, best guess first; one None when there is nothing to set."""
        return [None]

    @abstractmethod
    def enable(self, run: Run, setting: Any) -> None:
        """Switch on, at a step boundary."""

    @abstractmethod
    def disable(self, run: Run) -> None:
        """Switch off, at a step boundary; leaves everything as `enable` found it."""

    def close(self, run: Run) -> None:  # noqa: B027  (most strategies keep nothing)
        """Give up what was kept between uses."""

    def by_epoch(self, run: Run) -> bool:
        """Tell whether it takes effect when an epoch begins: then it is tried in whole epochs, after all others."""
        return False

    def settling(self, setting: Any) -> int:
        """Return how many steps to leave out after each switch to or from this setting."""
        return self.settle_steps

    def describe(self, setting: Any) -> str:
        """Return the setting as `key=value` for the report; '' when there is none."""
        return "" if setting is None else f"{self.name}={setting}"


def asked(refusal: Callable[[], str]) -> str:
    """Ask why a strategy does not apply; one whose own check fails is left out, and the run goes on."""
    try:
        return refusal()
    except ours() as error:
        return f"its check of the run failed: {type(error).__name__}: {error}"

"""What the controller asks for and what it gets back: the only words between it and the run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from accel.guard.guard import Comparison
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.evidence import Evidence
from accel.profiler.phases import Measurement
from accel.search.plan import Choices
from accel.strategies.base import Exactness


@dataclass(frozen=True, kw_only=True)
class Action:
    """Run some real training steps under a plan."""

    plan: Choices
    """Strategies that are on in these steps."""
    steps: int = 0
    """Steps to count."""
    whole_epoch: bool = False
    """Count the steps of one epoch instead, from first to last: of the first that begins under the plan."""
    rest: int = 0
    """Steps to pass first, under the plan but with the clocks off; only the watch looks on."""
    settle: int = 0
    """Steps to run first and leave out."""
    check: Choices | None = None
    """A plan to compare with the plain path at the end of each of these steps; the steps themselves run `plan`."""
    anatomy: bool = False
    """Let the profiler look at the counted steps."""
    settled: bool = False
    """The search is over; what strategies that are off have kept may go."""


@dataclass(kw_only=True)
class Result:
    """What happened in the steps of an action."""

    measurements: list[Measurement] = field(default_factory=list)
    """The counted steps."""
    settling: list[float] = field(default_factory=list)
    """Seconds of the steps left out."""
    steps: int = 0
    """All steps, counted or not."""
    aside_s: float = 0.0
    """Seconds spent between steps: switching, replaying, deciding."""
    elapsed_s: float = 0.0
    trips: dict[str, str] = field(default_factory=dict)
    """Strategy → why it was switched off in the middle of the action."""
    evidence: Evidence | None = None
    """What the profiler saw of the counted steps, if it was asked to look."""
    finding: Comparison | None = None
    """What the guard found, if it was asked and could look."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Strategy → why another rank can't have it; of those that all ranks must switch at the same step."""
    regime: Hashable = None
    """What the plan was chosen for: batch shape, world size, threads."""

    @property
    def seconds(self) -> list[float]:
        """Seconds of each counted step."""
        return [m.seconds for m in self.measurements]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy as the controller sees it."""

    name: str
    summary: str = ""
    treats: frozenset[Bottleneck] = frozenset()
    exactness: Exactness = Exactness.EXACT
    one_off_s: float = 0.0
    settling: Callable[[Any], int] = lambda setting: 1
    host_dependent: bool = False
    phase: str = ""
    """The one phase of the step that it can shorten; '' if it acts on more."""
    by_epoch: Callable[[], bool] = lambda: False
    """Tells whether it takes effect when an epoch begins, and is tried in whole epochs."""
    ruled_out: tuple[str, str] | None = None
    """Report status and reason, if the user's arguments leave it out."""
    refusal: Callable[[], str] = lambda: ""
    settings: Callable[[], list[Any]] = lambda: [None]
    describe: Callable[[Any], str] = lambda setting: "" if setting is None else str(setting)

"""The whole interface between the search and the run: actions and their results."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from accel.guard.comparison import Comparison
from accel.profiler.evidence import Evidence
from accel.profiler.phases import Measurement
from accel.run.host_load import HostLoad
from accel.search.plan import Choices
from accel.search.plan import must_be_alike as must_be_alike

if TYPE_CHECKING:
    from accel.profiler.naming import Diagnosis

_MIN_STEPS = 6
"""Steps that suffice to order the candidates; a verdict in a report needs more."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """Run some real training steps under a plan."""

    plan: Choices
    steps: int = 0
    whole_epoch: bool = False
    """Count the steps of one epoch instead, from first to last: of the first that begins under the plan."""
    rest: int = 0
    """Steps to run first, under the plan but unmeasured; only the watch is active."""
    settle: int = 0
    check: Choices | None = None
    """A plan to compare with the plain path at the end of each of these steps; the steps themselves run `plan`."""
    anatomy: bool = False
    base: bool = False
    """The plan is what has been kept so far: no candidate is on."""
    host: bool = False
    """Look at the other processes on the host when the steps have ended."""
    preparing: frozenset[str] = frozenset()
    """Strategies for whose trials rank 0 prepares, as the other ranks then do."""
    after_search: bool = False
    """The search is over; resources of strategies that are off may be released."""

    def on_idle_device(self) -> Action:
        """Return the action for a device that has no work when it begins: then no step hides the first one's fetch."""
        if self.rest or self.whole_epoch or self.check is not None:
            return self
        return replace(self, settle=max(1, self.settle))


@dataclass(kw_only=True)
class Result:
    """What happened in the steps of an action."""

    measurements: list[Measurement] = field(default_factory=list)
    settling: list[Measurement] = field(default_factory=list)
    """The steps left out."""
    drained: bool = False
    """A device has done all work of these steps before the next one begins, so that this costs more than it takes."""
    steps: int = 0
    """All steps, counted or not."""
    aside_s: float = 0.0
    """Seconds spent between steps: switching, replaying, deciding."""
    elapsed_s: float = 0.0
    trips: dict[str, str] = field(default_factory=dict)
    """Strategy → why it was switched off in the middle of the action."""
    evidence: Evidence | None = None
    """What the profiler measured in the counted steps, if the action asked for it."""
    finding: Comparison | None = None
    """The guard's comparison, if the action asked for one and it could be made."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Strategy → why it does not apply on another rank."""
    waits: dict[str, str] = field(default_factory=dict)
    """Strategy that is prepared → what another rank waits for before it can be tried; '' if for nothing."""
    alike: tuple[str, ...] = ()
    """What all ranks must have alike, in words, at their first meeting."""
    load: HostLoad | None = None
    """Of the host since the last look, if the action asked for it and it is known."""
    regime: Hashable = None
    """The conditions that the plan was chosen for: batch shape, world size, threads, …"""
    has_new_batch: bool = False
    """The usual batch is another than before, since the batch controller has changed it."""

    def lengthen(self, step: int, seconds: float) -> None:
        """Add to the last counted step, if it is the one of this number."""
        if self.measurements and self.measurements[-1].step == step:
            last = self.measurements[-1]
            last.seconds += seconds
            for name in [*last.phases][-1:]:
                last.phases[name] += seconds

    def forget_steps(self) -> None:
        """Forget the times of the steps so far."""
        self.measurements.clear()
        self.settling.clear()

    def take_times(self, seconds: Mapping[int, float]) -> None:
        """Let steps have a device's times; those that were observed have them already, by phases."""
        for measured in [*self.settling, *(self.measurements if self.evidence is None else ())]:
            if took := seconds.get(measured.step):
                _scale(measured, took)

    @property
    def diagnosis(self) -> Diagnosis:
        """The profiler's verdict on the counted steps."""
        from accel.profiler import naming  # with all its rules, when the first steps have been seen

        return naming.diagnose(self.evidence or Evidence(steps=self.measurements), min_steps=_MIN_STEPS)

    @property
    def seconds(self) -> list[float]:
        """Seconds of each counted step."""
        return [m.seconds for m in self.measurements]

    @property
    def phases(self) -> dict[str, float]:
        """Phase → seconds in all counted steps."""
        spent: dict[str, float] = {}
        for measured in self.measurements:
            for phase, seconds in measured.phases.items():
                spent[phase] = spent.get(phase, 0.0) + seconds
        return spent

    @classmethod
    def merged(cls, results: list[Result]) -> Result:
        """Merge the ranks' results: rank 0's times, all trips and refusals, the worst finding, the busiest host.

        A finding is unsure if one rank could compare nothing, as where it has no room.
        """
        merged = results[0]
        loads = [each.load for each in results if each.load is not None]
        if len(loads) < len(results):  # a host that nobody has seen may be as busy as another
            merged.load = None
        else:
            merged.load = max(loads, key=lambda load: load.foreign_cores / load.cores)
        for rank, other in enumerate(results[1:], 1):
            merged.refusals.update({name: f"on rank {rank} {why}" for name, why in other.refusals.items()})
            for name, why in other.waits.items():
                merged.waits[name] = (why and f"on rank {rank} {why}") or merged.waits.get(name, "")
            merged.trips.update({name: why for name, why in other.trips.items() if name not in merged.trips})
            if other.finding is not None:
                merged.finding = other.finding if merged.finding is None else merged.finding.beside(other.finding)
        return merged


Decisions = Generator[Action, Result, None]


def _scale(measured: Measurement, seconds: float) -> None:
    factor = seconds / measured.seconds if measured.seconds else 1.0
    measured.seconds = seconds
    measured.phases = {phase: factor * each for phase, each in measured.phases.items()}

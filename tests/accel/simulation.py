"""A simulated training run: the controller's actions are answered with synthetic step times, no clock, no model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import nn

from accel.guard.guard import Comparison as Finding
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.evidence import Evidence, ThreadShare
from accel.profiler.phases import Measurement
from accel.run.host_load import HostLoad
from accel.search.actions import Action, Result
from accel.search.budget import Budget
from accel.search.controller import decisions
from accel.search.state import Candidate, Pace, SearchState
from accel.strategies.base import Exactness, Strategy
from accel.strategies.trial_design import TrialDesign

PLAIN_S = 0.020
INPUT = frozenset({Bottleneck.INPUT})
CROWDED, QUIET = ThreadShare(run=0.5, wait=0.45, blocked=0.05), ThreadShare(run=0.98, wait=0.01, blocked=0.01)
_EPOCH = 10
RUN: Any = SimpleNamespace(
    observed=SimpleNamespace(uncalled=""), refused_elsewhere={}, model=nn.Module(), preparing=set(), world_size=1
)
"""Of a loop that calls its model, on one rank."""


@dataclass
class Machine:
    """Answers actions. `speed` maps a strategy (and setting) to its factor; step times carry log-normal noise."""

    speed: dict[Any, float] = field(default_factory=dict)
    noise: float = 0.0
    seed: int = 0
    wrong: frozenset[str] = frozenset()
    """Strategies that fail the guard."""
    trips_at: dict[Any, int] = field(default_factory=dict)
    """Strategy (and setting) → step from which it trips when it is on."""
    drift: Callable[[int], float] = lambda step: 1.0
    """Factor on every step time, by step."""
    regime: Callable[[int], Any] = lambda step: "shape"
    data_share: float = 0.1
    epoch_start_s: Callable[[dict[str, Any]], float] = lambda plan: 0.0
    """What the first step of an epoch of ten takes longer under a plan."""
    thread: Callable[[int], ThreadShare | None] = lambda step: None
    """How the training thread spends its time, by step."""
    load: Callable[[int], HostLoad | None] = lambda step: None
    """Of the host, by step."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.step = 0
        self.actions: list[Action] = []

    def seconds(self, plan: dict[str, Any]) -> float:
        factor = math.prod(self.speed.get((n, s), self.speed.get(n, 1.0)) for n, s in plan.items())
        return PLAIN_S / factor * self.drift(self.step) * math.exp(self.random.gauss(0, self.noise))

    def answer(self, action: Action) -> Result:
        self.actions.append(action)
        result = Result(regime=self.regime(self.step))
        for _ in range(action.rest):
            result.elapsed_s += self.seconds(action.plan)
            self.step += 1
            result.steps += 1
        for number in range(_EPOCH if action.whole_epoch else action.settle + action.steps):
            seconds = self.seconds(action.plan)
            start = self.epoch_start_s(action.plan) if action.whole_epoch and not number else 0.0
            seconds += start
            self.step += 1
            result.steps += 1
            result.elapsed_s += seconds
            data = start + (seconds - start) * self.data_share
            phases = {"data": data, "forward": seconds - data}
            steps = result.settling if number < action.settle else result.measurements
            steps.append(Measurement(step=self.step, seconds=seconds, phases=phases, samples=32))
        if action.anatomy:
            result.evidence = Evidence(steps=result.measurements, thread=self.thread(self.step))
        result.load = self.load(self.step) if action.host else None
        for name, setting in action.plan.items():
            if self.step >= self.trips_at.get((name, setting), self.trips_at.get(name, 10**9)):
                result.trips[name] = "its output is not finite"
        if action.check is not None:
            bad = [name for name in action.check if name in self.wrong]
            result.finding = Finding("its output is off", 1.0) if bad else Finding()
        return result


class Offered(Strategy):
    """A strategy that does nothing: what it declares is all that counts in a simulated run."""

    summary = ""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        for name in ("name", "treats", "exactness", "touches"):
            setattr(self, name, options.pop(name))
        self._refusal, self._settings = options.pop("refusal"), options.pop("settings")
        self._kind, self._preparing = options.pop("kind"), options.pop("is_preparing")

    def refusal(self, run: Any) -> str:
        return self._refusal()  # type: ignore[no-any-return]

    def settings(self, run: Any) -> list[Any]:
        return list(self._settings() if callable(self._settings) else self._settings)

    def trial_design(self, run: Any) -> TrialDesign:
        return self._kind(is_preparing=self._preparing(), **self._options)  # type: ignore[no-any-return]

    def enable(self, run: Any, setting: Any) -> None: ...

    def disable(self, run: Any) -> None: ...


def candidate(name: str, *, ruled_out: tuple[str, str] | None = None, **options: Any) -> Candidate:
    """Return a candidate; what is no part of a strategy is a part of its comparison, of the class `kind`."""
    defaults: dict[str, Any] = {
        "treats": frozenset({Bottleneck.COMPUTE}),
        "exactness": Exactness.EXACT,
        "touches": frozenset({"model"}),
        "refusal": lambda: "",
        "settings": (None,),
        "kind": TrialDesign,
        "is_preparing": lambda: False,
    }
    return Candidate(strategy=Offered({"name": name, **defaults, **options}), run=RUN, ruled_out=ruled_out)


def simulate(
    candidates: list[Candidate],
    machine: Machine,
    *,
    steps: int = 20_000,
    until_settled: bool = True,
    budget: str | float = 1e9,
    **options: Any,
) -> SearchState:
    """Run a search on a machine until it ends, or for `steps` steps."""
    state = search(candidates, budget=budget, **options)
    actions = decisions(state)
    action = next(actions)
    while machine.step < steps:
        action = actions.send(machine.answer(action))
        if until_settled and action.after_search:
            break
    return state


def search(candidates: list[Candidate], *, budget: str | float | int = 1e9, **options: Any) -> SearchState:
    """Return the state of a search that is to begin; a candidate may have been in an earlier one."""
    for each in candidates:
        each.begin_again()
    return SearchState(offered=candidates, budget=Budget.parse(budget), **options)


def step_of_first(machine: Machine, holds: Callable[[dict[str, Any]], bool]) -> int:
    """Return the step at which a plan was first on."""
    step = 0
    for action in machine.actions:
        if action.plan and holds(action.plan):
            return step
        step += action.rest + action.settle + action.steps
    raise AssertionError("no such plan was on")


FAST = Pace(hold=20, recheck=200)

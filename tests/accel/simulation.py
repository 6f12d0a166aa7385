"""A simulated training run: the controller's actions are answered with synthetic step times, no clock, no model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accel.guard.guard import Comparison
from accel.profiler.bottleneck import Bottleneck
from accel.profiler.evidence import Evidence, ThreadShare
from accel.profiler.phases import Measurement
from accel.search.actions import Action, Candidate, Result
from accel.search.budget import Budget
from accel.search.controller import Controller
from accel.search.host_load import HostLoad
from accel.search.pace import Pace

PLAIN_S = 0.020
INPUT = frozenset({Bottleneck.INPUT})
CROWDED, QUIET = ThreadShare(run=0.5, wait=0.45, blocked=0.05), ThreadShare(run=0.98, wait=0.01, blocked=0.01)
_EPOCH = 10


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
    page_fault_s: float = 0.0
    """What a page fault costs; 0 where they are not counted."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.step = 0
        self.actions: list[Action] = []

    def seconds(self, plan: dict[str, Any]) -> float:
        factor = math.prod(self.speed.get((n, s), self.speed.get(n, 1.0)) for n, s in plan.items())
        return PLAIN_S / factor * self.drift(self.step) * math.exp(self.random.gauss(0, self.noise))

    def page_faults(self, plan: dict[str, Any]) -> int | None:
        """Return those of a step."""
        return None

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
            if number < action.settle:
                result.settling.append(seconds)
            else:
                data = start + (seconds - start) * self.data_share
                phases = {"data": data, "forward": seconds - data}
                faults = self.page_faults(action.plan)
                result.measurements.append(
                    Measurement(step=self.step, seconds=seconds, phases=phases, samples=32, page_faults=faults)
                )
        if action.anatomy:
            result.evidence = Evidence(
                steps=result.measurements,
                thread=self.thread(self.step),
                page_faults=result.page_faults,
                page_fault_s=self.page_fault_s,
            )
        result.load = self.load(self.step) if action.host else None
        for name, setting in action.plan.items():
            if self.step >= self.trips_at.get((name, setting), self.trips_at.get(name, 10**9)):
                result.trips[name] = "its output is not finite"
        if action.check is not None:
            bad = [name for name in action.check if name in self.wrong]
            result.finding = Comparison("its output is off", 1.0) if bad else Comparison()
        return result


def candidate(name: str, *, settings: tuple[Any, ...] = (None,), **options: Any) -> Candidate:
    options.setdefault("treats", frozenset({Bottleneck.COMPUTE}))
    return Candidate(name=name, settings=lambda: list(settings), **options)


def simulate(
    candidates: list[Candidate],
    machine: Machine,
    *,
    steps: int = 20_000,
    until_settled: bool = True,
    budget: str | float = 1e9,
    **options: Any,
) -> Controller:
    """Run a controller on a machine until its search ends, or for `steps` steps."""
    controller = Controller(candidates, budget=Budget.parse(budget), **options)
    decisions = controller.decisions()
    action = next(decisions)
    while machine.step < steps:
        action = decisions.send(machine.answer(action))
        if until_settled and action.settled:
            break
    return controller


def step_of_first(machine: Machine, holds: Callable[[dict[str, Any]], bool]) -> int:
    """Return the step at which a plan was first on."""
    step = 0
    for action in machine.actions:
        if action.plan and holds(action.plan):
            return step
        step += action.rest + action.settle + action.steps
    raise AssertionError("no such plan was on")


FAST = Pace(hold=20, recheck=200)

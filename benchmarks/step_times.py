"""Steps of the suite's models in several variants, in turns: one process a variant, model after model.

A process trains the same models as the others, in the same order, and only while it has the turn. Of each model first
come steps until the variant is as fast as it will be (its search is over, its graph compiled), then turns A B B A.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.pairs import Turn
from benchmarks.spread import Ratio, ratio
from benchmarks.suite import MODELS, Size, Workload, train_step
from benchmarks.suite.files import from_files
from benchmarks.variants import variant

LIMIT = 1.02
"""A step with accel may take so many times as long as a plain one."""
LOSS_STEPS = 10
"""The loss is the mean over the first so many steps: of every variant the same ones."""
_WARM_STEPS = 4
_SETTLE_STEPS = 5
"""Steps at a time until a variant is settled."""
_LEAST_STEPS, _MOST_STEPS = 2, 20
"""In a turn."""
_ATTEMPTS = 4
"""Measurements of a model, in other processes each, in all of which a variant must be slower to be called so."""
_LONGER = 2
"""Each further one has so many times the turns of the one before."""


@dataclass
class Steps:
    """What one variant gave on one model."""

    turns: list[list[float]] = field(default_factory=list)
    """Step times of each turn, s."""
    settle_s: float = 0.0
    """Steps until it was settled, s in all, with making the model, searching and compiling."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Strategies kept, loss of the first steps, peak memory in MB."""
    failed: str = ""
    """Why it could not train the model."""

    @property
    def times_s(self) -> list[float]:
        """Return the steps that count: the first two of a long turn find cold caches."""
        return [seconds for turn in self.turns for seconds in (turn[2:] if len(turn) > 5 else turn)]


class Player(Protocol):
    """The parent's side of a variant: `benchmarks.pairs.Racer`."""

    @property
    def info(self) -> Any:
        """Return what the process told at the end of its last turn."""

    def run(self, steps: int) -> list[float]:
        """Give it the turn."""

    def leave(self) -> None:
        """End what it trains now."""


class Options(NamedTuple):
    """How models are measured."""

    turns: int = 6
    """Of each variant."""
    seconds: float = 4.0
    """Of all turns of a model together, about."""
    settle_s: float = 60.0
    """The longest that a variant may take until it is settled."""

    def longer(self, times: int) -> Options:
        """Return options of a measurement with so many times the turns, each as long."""
        return self._replace(turns=times * self.turns, seconds=times * self.seconds)


def measure(players: Mapping[str, Player], options: Options) -> dict[str, Steps]:
    """Measure the model that all variants have come to, and let them go on to the next.

    Args:
        players: by the names of their variants.
        options: numbers of turns and seconds.
    """
    results = {name: settle(player, options.settle_s) for name, player in players.items()}
    racing = [name for name, steps in results.items() if not steps.failed]
    counts = {name: _count(results[name], options, len(racing)) for name in racing}
    for name in racing:
        results[name].turns = []
    for number in range(options.turns):
        for name in racing if number % 2 == 0 else reversed(racing):
            results[name].turns.append(players[name].run(counts[name]))
    for name, player in players.items():
        facts = dict(player.info or {})
        results[name].failed = facts.pop("failed", "")
        results[name].facts = {key: value for key, value in facts.items() if key != "over"}
        player.leave()
    return results


def judge(
    first: dict[str, Steps], measure_anew: Callable[[int], dict[str, Steps]], judged: Sequence[str]
) -> dict[str, Steps]:
    """Return the first measurement in which no judged variant is slower than plain, the last one if there is none.

    Processes of the same program differ: by where their memory lies, a ResNet-18's steps took 89 ms in one and 109 ms
    in the next. What is slower for a reason is slower in all. Six turns tell too little: of 30 measurements of a DCGAN,
    whose plan gains nothing where memory is faulted in fast, 11 were beyond the limit, at 1.013 on average (two cores
    of an Intel Xeon). So each new measurement is longer than the one before.

    Args:
        first: the measurement that there is.
        measure_anew: measures the model in new processes, with so many times the turns.
        judged: variants that must not be slower than plain.
    """
    results = first
    for attempt in range(1, _ATTEMPTS):
        if not any(slower(results, name) for name in judged):
            break
        results = measure_anew(_LONGER**attempt)
    return results


def settle(player: Player, limit_s: float) -> Steps:
    """Run a variant until it is settled or its time is up; its last steps stand in the result."""
    steps = Steps()
    while True:
        times = player.run(_SETTLE_STEPS if steps.turns else _WARM_STEPS)
        steps.settle_s += sum(times)
        steps.turns = [times]
        info = player.info or {}
        steps.failed = info.get("failed", "")
        if steps.failed or info.get("over") or steps.settle_s >= limit_s or not times:
            return steps


def _count(settled: Steps, options: Options, variants: int) -> int:
    step_s = statistics.median(settled.turns[-1])
    share_s = options.seconds / (options.turns * variants)
    return max(_LEAST_STEPS, min(_MOST_STEPS, round(share_s / max(step_s, 1e-6))))


def against_plain(results: Mapping[str, Steps], name: str) -> Ratio:
    """Return the step time of a variant ÷ that of plain, from neighbouring turns."""
    return ratio(results[name].turns, results["plain"].turns)


def slower(results: Mapping[str, Steps], name: str) -> bool:
    """Tell whether a variant is slower than plain, by more than the limit and beyond the interval."""
    if "plain" not in results or results["plain"].failed or results[name].failed:
        return False
    measured = against_plain(results, name)
    return measured.value > LIMIT and measured.low > 1.0


# One variant's process


class Slowed:
    """Make a strategy slow on purpose, to see that the comparison notices.

    Args:
        name: of the strategy.
        seconds: that each step takes longer while it is on.
    """

    def __init__(self, name: str, seconds: float) -> None:
        from accel import strategies

        (kind,) = (kind for kind in strategies.REGISTRY if kind.name == name)
        self._seconds, self._is_on = seconds, False
        switch: Any = kind
        switch.enable, switch.disable = self._noting(kind.enable, True), self._noting(kind.disable, False)

    def _noting(self, method: Callable[..., None], is_on: bool) -> Callable[..., None]:
        def noted(*arguments: Any) -> None:
            method(*arguments)
            self._is_on = is_on

        return noted

    def wait(self) -> None:
        """Wait, if the strategy is on."""
        if self._is_on:
            time.sleep(self._seconds)


def train(
    on_step: Turn, models: Sequence[str], name: str, size: Size, data: str, slowed: tuple[str, float] | None = None
) -> None:
    """Train models one after the other in a variant, each for as long as the parent wants steps.

    Args:
        on_step: the turn.
        models: of the suite.
        name: of the variant.
        size: of the models.
        data: "synthetic" or "real".
        slowed: a strategy and the seconds that each step with it takes longer.
    """
    slow = Slowed(*slowed) if slowed else None
    for model in models:
        try:
            _train_one(on_step, model, name, size, data, slow)
        except (EOFError, BrokenPipeError):
            raise  # the parent has seen enough
        except Exception:
            text = traceback.format_exc()
            while not on_step.is_over():
                on_step(0, lambda text=text: {"failed": text})  # type: ignore[misc]
        on_step.wait()


def _train_one(on_step: Turn, model: str, name: str, size: Size, data: str, slow: Slowed | None) -> None:
    torch.manual_seed(0)
    workload = MODELS[model](size)
    workload = from_files(workload) if data == "real" else workload
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload.model.to(device)
    workload = variant(name).prepare(workload, model)
    losses: list[float] = []
    try:
        while not on_step.is_over():
            for x, target in workload.loader:
                # Reading the loss waits for a GPU, so that the step is over when its time is taken.
                losses.append(float(train_step(workload, x.to(device), target.to(device))))
                if slow is not None:
                    slow.wait()
                on_step(len(losses), lambda: _facts(workload, name, losses, device))
                if on_step.is_over():
                    break
    finally:
        if variant(name).allow:
            import accel

            accel.undo(workload.model)


def _facts(workload: Workload, name: str, losses: Sequence[float], device: torch.device) -> dict[str, Any]:
    from benchmarks.whole_process import peak_mb

    facts: dict[str, Any] = {"over": True, "loss": statistics.fmean(losses[:LOSS_STEPS]), "peak_mb": peak_mb(device)}
    if variant(name).allow:
        import accel

        report = accel.explain(workload.model)
        kept = [row.name for row in report.rows if row.status == "kept"]
        facts |= {"over": report.state not in ("searching", "interrupted"), "kept": kept}
    return facts

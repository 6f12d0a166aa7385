"""A plan that compiles the model's call: what would make it be compiled once more waits for that, or stays."""

from __future__ import annotations

from typing import Any

import pytest

from accel.search.actions import Action, Result
from accel.search.state import Candidate
from tests.accel.memory import FakeMemory, remembered
from tests.accel.simulation import FAST, PLAIN_S, Machine, candidate, simulate

pytestmark = pytest.mark.usefixtures("today")
COMPILING_S = 5.0


def compiled(**options: Any) -> Candidate:
    return candidate("compile", is_made_for_calls=True, cost_s=COMPILING_S, **options)


class Compiles(Machine):
    """Each plan that is compiled for the first time takes some seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compiled_at: dict[tuple[str, ...], int] = {}

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        for plan in (action.plan, action.check or {}):
            graph = tuple(sorted(set(plan) - {"free"}))
            if "compile" in plan and graph not in self.compiled_at:
                self.compiled_at[graph] = self.step
                result.aside_s += COMPILING_S
        return result


def became_slower(step: int) -> float:
    return 1.0 if step < 1500 else 1.15


def test_a_plan_that_became_slower_is_not_compiled_once_more_without_each_of_its_strategies() -> None:
    machine = Compiles(speed={"x": 1.3, "compile": 1.5}, drift=became_slower)
    controller = simulate([candidate("x"), compiled()], machine, until_settled=False, steps=4000, pace=FAST)
    assert list(controller.plan) == ["x", "compile"]
    assert any("became slower" in event.text for event in controller.events)
    assert list(machine.compiled_at) == [("compile", "x")]
    tried_again = machine.actions[next(n for n, action in enumerate(machine.actions) if action.after_search) :]
    assert any(action.plan == {"x": None} for action in tried_again)


def test_what_touches_no_call_is_tried_again_beside_it() -> None:
    machine = Compiles(speed={"free": 1.3, "compile": 1.5}, drift=became_slower)
    free = candidate("free", touches=frozenset({"input"}))
    simulate([free, compiled()], machine, until_settled=False, steps=4000, pace=FAST)
    assert any(action.plan == {"compile": None} for action in machine.actions)


def test_once_nothing_compiles_any_more_the_others_are_tried_again() -> None:
    class Fades(Compiles):
        def seconds(self, plan: dict[str, Any]) -> float:
            return super().seconds(plan) * (2.0 if "compile" in plan and self.step > 1500 else 1.0)

    machine = Fades(speed={"x": 1.3, "compile": 1.5})
    controller = simulate([candidate("x"), compiled()], machine, until_settled=False, steps=4000, pace=FAST)
    assert controller.plan == {"x": None}
    assert "no longer pays" in controller.rows["compile"].why


def test_what_is_compiled_once_more_waits_until_the_budget_allows_for_it() -> None:
    memory = FakeMemory(remembered(plan={"compile": None}, cost_s={"compile": COMPILING_S}, run_s=1000.0))
    machine = Compiles(speed={"compile": 1.2, "x": 1.3, "free": 1.1})
    offered = [candidate("x"), candidate("free", touches=frozenset({"optimizer"})), compiled()]
    controller = simulate(offered, machine, memory=memory, budget="10%", until_settled=False, steps=12_000)
    assert controller.plan == {"compile": None, "free": None, "x": None}
    at = machine.compiled_at["compile", "x"]
    assert at * PLAIN_S / 1.2 >= 0.8 * COMPILING_S / 0.1  # more than a tenth of the run at once is never spent
    assert controller.check_s["optimizer"] < PLAIN_S
    assert controller.check_s.get("model", 0.0) < COMPILING_S  # the price of a check is not that of compiling


def test_each_kind_of_check_has_a_price_of_its_own() -> None:
    class Checked(Machine):
        def answer(self, action: Action) -> Result:
            result = super().answer(action)
            result.aside_s += 1.0 if "x" in (action.check or {}) else 0.0
            return result

    machine = Checked(speed={"y": 1.3})
    offered = [candidate("x"), candidate("y", touches=frozenset({"optimizer"}))]
    controller = simulate(offered, machine, budget="1m")
    assert controller.check_s == {"model": pytest.approx(1.0), "optimizer": 0.0}


def test_the_price_of_the_next_comparison_is_that_of_the_last_step() -> None:
    """On a GPU cuDNN plans its convolutions in the first."""

    class PlansOnce(Machine):
        def answer(self, action: Action) -> Result:
            result = super().answer(action)
            if action.check is not None and result.finding is not None:
                result.aside_s += 2.1
                result.finding.seconds = 0.1
            return result

    controller = simulate([candidate("x"), candidate("y")], PlansOnce(), budget="1h")
    assert controller.check_s == {"model": pytest.approx(FAST.guard * 0.1)}
    assert controller.rows["x"].cost_s > 2.0  # what it has cost counts all the same

"""What the search may cost, and what waits until the run is long enough."""

from __future__ import annotations

import itertools

import pytest

from accel.search.actions import Action, Result
from tests.accel.simulation import PLAIN_S, Machine, candidate, simulate


def test_one_off_work_waits_until_the_run_is_long_enough() -> None:
    machine = Machine(speed={"compile": 1.5})
    compiled = candidate("compile", cost_s=5.0)

    early = simulate([compiled], machine, budget="10%")
    assert early.plan == {}
    assert "tried once the run is long enough" in early.rows["compile"].why

    later = simulate([compiled], Machine(speed={"compile": 1.5}), budget="10%", until_settled=False, steps=5000)
    assert list(later.plan) == ["compile"]


def test_the_search_goes_on_as_soon_as_the_budget_allows() -> None:
    class Checked(Machine):
        def answer(self, action: Action) -> Result:
            result = super().answer(action)
            result.aside_s += 0.3 if action.check else 0.0
            return result

    machine = Checked(speed={"a": 1.0, "b": 1.3})
    simulate([candidate("a"), candidate("b")], machine, budget="10%", until_settled=False, steps=2000)

    began = {}
    step = 0
    for action in machine.actions:
        for name in action.check or {}:
            began.setdefault(name, step * PLAIN_S)
        step += action.rest + action.settle + action.steps
    assert began["b"] == pytest.approx(6.0, abs=1.0)  # 0.3 s each, of 10 %


def test_half_of_what_the_search_has_saved_may_be_spent_and_a_tenth_of_the_run_at_once() -> None:
    compiled = candidate("compile", cost_s=5.0)
    waits = {}
    for gain in (1.0, 1.1, 1.5):
        machine = Machine(speed={"free": gain, "compile": 1.2})
        candidates = [candidate("free", touches=frozenset()), compiled]
        simulate(candidates, machine, budget="3%", until_settled=False, steps=10_000)
        actions = itertools.takewhile(lambda action: "compile" not in action.plan, machine.actions)
        waits[gain] = sum(action.rest + action.settle + action.steps for action in actions) * PLAIN_S / gain
    assert waits[1.0] > 5.0 / 0.03
    assert waits[1.1] == pytest.approx(5.0 / (0.03 + 0.5 * 0.1), rel=0.35)
    assert waits[1.5] == pytest.approx(5.0 / 0.1, rel=0.1)


def test_one_off_work_beyond_an_absolute_budget_is_not_tried() -> None:
    controller = simulate([candidate("compile", cost_s=30.0)], Machine(), budget="5s")

    assert controller.rows["compile"].why == "about 30 s of one-off work, more than the budget of 5s allows now"


def test_a_spent_budget_ends_the_search() -> None:
    slow = [candidate(name) for name in ("a", "b", "c", "d")]
    machine = Machine(speed=dict.fromkeys("abcd", 0.85), noise=0.02)

    controller = simulate(slow, machine, budget="0.15s")

    statuses = [controller.rows[name].status for name in "abcd"]
    assert statuses[0] == "undone"
    assert statuses[-1] == "not tried"
    assert "the budget of 0.15s" in controller.rows["d"].why


def test_each_candidate_is_charged_what_its_own_trial_has_cost() -> None:
    controller = simulate([candidate("slow"), candidate("good")], Machine(speed={"slow": 0.9, "good": 2.0}))

    assert controller.rows["good"].cost_s == 0.0
    assert controller.rows["slow"].cost_s == pytest.approx(controller.cost_s)
    assert controller.cost_s > 0


def test_the_search_pays_for_itself_and_says_when() -> None:
    machine = Machine(speed={"slow": 0.5, "good": 2.0})

    controller = simulate([candidate("slow"), candidate("good")], machine)

    assert controller.cost_s > 0
    saved_s = (controller.closing.before_ms - controller.closing.after_ms) / 1e3  # type: ignore[union-attr]
    steps = controller.break_even_step()
    assert steps is not None
    assert (steps - controller.searched_until) * saved_s == pytest.approx(controller.cost_s, abs=2 * saved_s)


def test_a_short_wait_for_the_budget_belongs_to_the_search() -> None:
    controller = simulate([candidate("good")], Machine(speed={"good": 1.3}), budget="3%")
    assert controller.closing is not None
    assert controller.plan == {"good": None}

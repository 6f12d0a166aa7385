"""What a comparison by the guard will cost: the work of its first step is done once."""

from __future__ import annotations

import pytest

from accel.guard.guard import Comparison
from accel.profiler.bottleneck import Bottleneck
from accel.search import check_cost
from accel.search.actions import Action, Result
from accel.search.pace import Pace
from accel.strategies import REGISTRY
from tests.accel.simulation import INPUT, PLAIN_S, Machine, candidate, simulate

FIRST_S, SECOND_S = 2.0, 0.1
"""Of a comparison's two steps, on a GPU: cuDNN plans its convolutions in the first."""


class PlansOnce(Machine):
    """Tells what the second step of each comparison took."""

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        if action.check is not None and result.finding is not None:
            is_first = sum(each.check is not None for each in self.actions) == 1
            result.aside_s += (FIRST_S if is_first else SECOND_S) + SECOND_S
            result.finding.seconds = SECOND_S
        return result


def test_the_price_of_the_next_comparison_is_that_of_the_second_step() -> None:
    controller = simulate([candidate("x"), candidate("y")], PlansOnce(), budget="1h")
    assert controller._check_s == {"model": pytest.approx(Pace().guard * SECOND_S)}
    assert controller.rows["x"].cost_s > FIRST_S  # what it has cost counts all the same


def test_the_next_candidate_waits_for_the_cost_alone_and_not_for_its_price_again() -> None:
    machine = PlansOnce(speed={"y": 1.3})
    simulate([candidate("x"), candidate("y")], machine, budget="10%", until_settled=False, steps=4000)
    checks = [n for n, action in enumerate(machine.actions) if action.check]
    steps = sum(action.rest + action.settle + action.steps for action in machine.actions[: checks[1]])
    spent_s = FIRST_S + SECOND_S
    assert (spent_s + 2 * SECOND_S) / 0.1 * 0.9 <= steps * PLAIN_S <= (spent_s + 2 * SECOND_S) / 0.1 * 1.3


def test_without_a_time_of_its_own_all_that_a_comparison_took_counts() -> None:
    assert check_cost.measured_s(None, 2, 0.7) == 0.7
    assert check_cost.measured_s(Comparison(), 2, 0.7) == 0.7
    assert check_cost.measured_s(Comparison(seconds=0.1), 2, 0.7) == pytest.approx(0.2)
    assert check_cost.measured_s(Comparison(seconds=0.6), 2, 0.7) == pytest.approx(1.2)  # the last one is booked later


def test_handing_batches_on_otherwise_costs_next_to_nothing_and_is_no_price_of_fetching_them() -> None:
    """`pin_memory` imports nothing and starts no thread: on an H200 its check took 0.011 s, and 0.1 s were expected."""
    pin = candidate("pin", treats=frozenset({Bottleneck.TRANSFER}), touches=frozenset({"input"}))
    workers = candidate("workers", treats=INPUT, touches=frozenset({"input"}))
    prices = [check_cost.expected_s(check_cost.compared(each), 2, 0.02, 0.01) for each in (pin, workers)]
    assert prices[0] < 0.02
    assert prices[1] == pytest.approx(0.12)
    assert check_cost.compared(pin) != check_cost.compared(workers)


@pytest.mark.parametrize("kind", [each for each in REGISTRY if each.touches], ids=lambda each: each.name)
def test_each_strategy_has_a_price(kind: type) -> None:
    each = candidate(kind.name, treats=kind.treats, touches=kind.touches)  # type: ignore[attr-defined]
    assert check_cost.expected_s(check_cost.compared(each), 2, 0.02, 0.01) > 0

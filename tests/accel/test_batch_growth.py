"""A plan outlasts the changes of the batch that the batch controller makes, and is tried again after them."""

from __future__ import annotations

from typing import Any

import pytest

from accel.search.actions import Action, Result
from tests.accel.simulation import FAST, Machine, candidate, simulate


class Grows(Machine):
    """A batch that the batch controller changes at step 1000."""

    def answer(self, action: Action) -> Result:
        before = self.regime(self.step)
        result = super().answer(action)
        result.regime = self.regime(self.step)
        result.has_new_batch = result.regime != before
        return result


@pytest.mark.parametrize(("of_shape", "searches"), [(False, 0), (True, 1)])
def test_a_plan_stays_on_when_the_batch_controller_changes_the_batch(of_shape: bool, searches: int) -> None:
    machine = Grows(speed={"good": 1.5}, noise=0.02, regime=lambda step: "small" if step < 1000 else "large")
    controller = simulate(
        [candidate("good", is_made_for_calls=of_shape)], machine, until_settled=False, steps=3000, pace=FAST
    )

    assert sum("searching again" in event.text for event in controller.events) == searches
    assert list(controller.plan) == ["good"]
    off = [at for at, action in _begun(machine) if at > 1000 and not action.plan]
    assert bool(off) and (off[0] > 1000 + FAST.recheck / 2 or searches)  # tried again only when its check is due


def test_a_plan_that_no_longer_pays_at_the_larger_batch_is_undone() -> None:
    machine = Fades(speed={"good": 1.5}, noise=0.02, regime=lambda step: "small" if step < 1000 else "large")
    controller = simulate([candidate("good")], machine, until_settled=False, steps=3000, pace=FAST)
    assert controller.plan == {}
    assert controller.rows["good"].why.startswith("it no longer pays")


class Fades(Grows):
    """What made the small batch faster makes the large one slower."""

    def seconds(self, plan: dict[str, Any]) -> float:
        return super().seconds(plan) * (2.0 if plan and self.regime(self.step) == "large" else 1.0)


def _begun(machine: Machine) -> list[tuple[int, Action]]:
    """Return each action with the step at which it began."""
    step, begun = 0, []
    for action in machine.actions:
        begun.append((step, action))
        step += action.rest + action.settle + action.steps
    return begun

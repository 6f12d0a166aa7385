"""One-off work that differs by setting, and work that is prepared beside the loop: what each costs is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accel.search.actions import Action, Candidate, Result
from accel.search.remembered import RememberedSearch
from tests.accel.memory import FakeMemory
from tests.accel.simulation import FAST, PLAIN_S, Machine, candidate, simulate

WORK_S = {"blocks": 4.0, "whole": 20.0}


def compiled(**options: Any) -> Candidate:
    """Settings with one-off work of their own."""
    given: dict[str, Any] = {"settings": ("blocks", "whole"), "one_off_s": 30.0, "expected_s": WORK_S.__getitem__}
    return candidate("compile", **given | options)


class Compiles(Machine):
    """The first check of each setting takes its one-off work."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.checked: dict[str, int] = {}
        self.spent_at: list[tuple[str, float]] = []
        self.elapsed = 0.0

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        setting = (action.check or {}).get("compile")
        if setting is not None and setting not in self.checked:
            self.checked[setting] = self.step
            self.spent_at.append((setting, self.elapsed))
            result.aside_s += WORK_S[setting]
        self.elapsed += result.elapsed_s + result.aside_s
        return result


def test_each_setting_waits_for_its_own_work_and_the_verdict_so_far_stands() -> None:
    machine = Compiles(speed={("compile", "blocks"): 1.3, ("compile", "whole"): 1.5})
    early = simulate([compiled()], machine, budget="10%", until_settled=False, steps=7_000)
    assert list(machine.checked) == ["blocks"]
    assert early.plan == {"compile": "blocks"}
    assert early.rows["compile"].status == "kept"
    assert early.closing is not None

    machine = Compiles(speed={("compile", "blocks"): 1.3, ("compile", "whole"): 1.5})
    later = simulate([compiled()], machine, budget="10%", until_settled=False, steps=20_000)
    assert later.plan == {"compile": "whole"}
    assert later.closing is not None and later.closing.gain == pytest.approx(1.5, rel=0.01)
    (_, first), (_, second) = machine.spent_at
    assert 40 <= first < 60  # a tenth of the run pays for 4 s
    assert 200 <= second < 220  # and for no more than that at once, whatever the blocks have saved
    texts = [event.text for event in later.events]
    assert "compile blocks: one-off work took 4.0 s, expected 4.0 s" in texts
    assert "compile whole: one-off work took 20.0 s, expected 20.0 s" in texts


def test_a_setting_that_gains_nothing_is_followed_by_the_next() -> None:
    machine = Compiles(speed={("compile", "blocks"): 0.9, ("compile", "whole"): 1.5})
    controller = simulate([compiled()], machine, budget="1m", until_settled=False, steps=4_000)
    assert controller.plan == {"compile": "whole"}


def test_a_budget_that_never_allows_for_the_second_leaves_the_first() -> None:
    machine = Compiles(speed={("compile", "blocks"): 1.3, ("compile", "whole"): 9.0})
    controller = simulate([compiled()], machine, budget="10s", until_settled=False, steps=5_000)
    assert controller.plan == {"compile": "blocks"}
    assert list(machine.checked) == ["blocks"]


def test_what_is_left_is_forgotten_when_the_search_begins_anew() -> None:
    machine = Compiles(
        speed={("compile", "blocks"): 1.3, ("compile", "whole"): 1.5}, regime=lambda step: "a" if step < 4_000 else "b"
    )
    controller = simulate([compiled()], machine, budget="10%", until_settled=False, steps=5_000)
    first = [action.plan["compile"] for action in machine.actions if "compile" in action.plan]
    assert set(first) == {"blocks"}
    assert controller.plan == {"compile": "blocks"}


def test_each_setting_is_remembered_by_itself() -> None:
    memory = FakeMemory()
    machine = Compiles(speed={("compile", "blocks"): 1.3, ("compile", "whole"): 1.5})
    slow = {"blocks": 1.0, "whole": 0.25}.__getitem__
    simulate([compiled(repeats=slow)], machine, budget="1m", memory=memory, until_settled=False, steps=3_000)
    assert isinstance(memory.search, RememberedSearch)
    assert memory.search.one_off_s == {
        "compile blocks": pytest.approx(4.0, abs=0.01),
        "compile whole": pytest.approx(5.0, abs=0.01),
    }
    # The next run reckons with that, whatever the estimate.
    search = replace(memory.search, plan={}, trials={})
    again = Compiles(speed={("compile", "blocks"): 1.3, ("compile", "whole"): 1.5})
    simulate([compiled()], again, budget="10%", memory=FakeMemory(search), until_settled=False, steps=12_000)
    assert [setting for setting, _ in again.spent_at] == ["blocks", "whole"]
    assert again.spent_at[1][1] < 120  # 4 s and 5 s, not 24


def test_an_estimate_that_fails_is_the_declared_time() -> None:
    def fails(setting: Any) -> float:
        raise TypeError("no layers")

    controller = simulate([compiled(expected_s=fails)], Machine(), budget="5s")
    assert controller.rows["compile"].why == "about 30 s of one-off work, more than the budget of 5s allows now"


# -- beside the loop ---------------------------------------------------------------------------------------------------


class Beside(Machine):
    """Its steps take longer while something is prepared."""

    began: int | None = None
    lasts = 600
    slowdown = 1.2
    rested = False
    """The search took a rest meanwhile."""

    def answer(self, action: Action) -> Result:
        self.rested = self.rested or (self.is_preparing and action.rest > 0)
        return super().answer(action)

    @property
    def is_preparing(self) -> bool:
        return self.began is not None and self.step < self.began + self.lasts

    def seconds(self, plan: dict[str, Any]) -> float:
        return super().seconds(plan) * (self.slowdown if self.is_preparing else 1.0)

    def waits(self) -> str:
        if self.began is None:
            self.began = self.step
        return "it is prepared" if self.is_preparing else ""

    def candidate(self) -> Candidate:
        return compiled(settings=("blocks",), waits=self.waits, is_preparing=lambda: self.is_preparing)


def test_what_steps_take_longer_beside_a_preparation_is_a_cost() -> None:
    machine = Beside(speed={"compile": 1.5, "good": 1.25})
    controller = simulate(
        [machine.candidate(), candidate("good")], machine, budget="10%", until_settled=False, steps=8_000, pace=FAST
    )
    assert machine.began is not None
    assert machine.began * PLAIN_S > 15  # not before the budget allows for the rest of the work
    assert controller.plan == {"good": None, "compile": "blocks"}
    assert controller.rows["compile"].cost_s == pytest.approx(600 * 0.2 * PLAIN_S / 1.25, rel=0.15)
    texts = [event.text for event in controller.events]
    assert "compile was prepared beside the loop: steps took 20% longer meanwhile" in texts
    assert not any("slower than" in text or "trying the plan again" in text for text in texts)
    assert not machine.rested


def test_the_second_setting_is_prepared_too() -> None:
    machine = Compiles(speed={("compile", "blocks"): 1.3, ("compile", "whole"): 1.5})
    asked: list[int] = []

    def waits() -> str:
        if "blocks" not in machine.checked:
            return ""
        asked.append(machine.step)
        return "it is prepared" if machine.step < asked[0] + 500 else ""

    controller = simulate([compiled(waits=waits)], machine, until_settled=False, steps=3_000)
    assert controller.plan == {"compile": "whole"}
    assert machine.checked["whole"] >= asked[0] + 500


def test_a_preparation_that_costs_nothing_is_said_too() -> None:
    machine = Beside(speed={"compile": 1.5})
    machine.slowdown = 1.0
    controller = simulate([machine.candidate()], machine, budget="10%", until_settled=False, steps=8_000, pace=FAST)
    assert controller.plan == {"compile": "blocks"}
    assert "compile was prepared beside the loop: steps took 0% longer meanwhile" in [e.text for e in controller.events]


def test_work_that_is_not_expected_any_more_once_it_has_begun_is_charged_then() -> None:
    machine = Beside(speed={"compile": 1.5})
    machine.slowdown = 1.0
    noting = compiled(
        settings=(None,),
        waits=machine.waits,
        is_preparing=lambda: machine.is_preparing,
        expected_s=lambda setting: 1.5 if machine.began is None else 0.0,
    )
    drifts = replace(noting, name="compile")
    machine.drift = lambda step: 1.1 if machine.is_preparing else 1.0  # the machine's doing, not the candidate's
    controller = simulate([drifts], machine, budget="10%", until_settled=False, steps=8_000, pace=FAST)
    assert machine.began is not None and machine.began * PLAIN_S >= 15
    assert controller.rows["compile"].cost_s == pytest.approx(1.5, rel=0.05)
    assert controller.plan == {"compile": None}
    assert not any("was prepared beside the loop" in event.text for event in controller.events)

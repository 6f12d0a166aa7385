"""One-off work that differs by setting, and work that is prepared beside the loop: what each costs is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accel.profiler.bottleneck import Bottleneck
from accel.search.actions import Action, Result
from accel.search.remembered import RememberedSearch
from accel.search.state import Candidate
from accel.strategies.trial_design import TrialDesign
from tests.accel.memory import FakeMemory
from tests.accel.simulation import FAST, PLAIN_S, QUIET, Machine, candidate, simulate, step_of_first

WORK_S = {"blocks": 4.0, "whole": 20.0}


def compiled(**options: Any) -> Candidate:
    """Settings with one-off work of their own."""
    given: dict[str, Any] = {"settings": ("blocks", "whole"), "cost_s": WORK_S.__getitem__}
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


def test_a_budget_that_never_allows_for_the_second_leaves_the_first() -> None:
    machine = Compiles(speed={("compile", "blocks"): 1.3, ("compile", "whole"): 9.0})
    controller = simulate([compiled()], machine, budget="10s", until_settled=False, steps=5_000)
    assert controller.plan == {"compile": "blocks"}
    assert list(machine.checked) == ["blocks"]


def test_each_setting_is_remembered_by_itself() -> None:
    memory = FakeMemory()
    machine = Compiles(speed={("compile", "blocks"): 1.3, ("compile", "whole"): 1.5})
    simulate([compiled()], machine, budget="1m", memory=memory, until_settled=False, steps=3_000)
    assert isinstance(memory.search, RememberedSearch)
    assert memory.search.cost_s == {name: pytest.approx(WORK_S[name[8:]], abs=0.01) for name in memory.search.cost_s}
    # The next run reckons with what was measured, whatever the estimate.
    search = replace(memory.search, plan={}, cost_s={"compile blocks": 4.0, "compile whole": 5.0})
    again = Compiles(speed={("compile", "blocks"): 1.3, ("compile", "whole"): 1.5})
    simulate([compiled()], again, budget="10%", memory=FakeMemory(search), until_settled=False, steps=12_000)
    assert [setting for setting, _ in again.spent_at] == ["blocks", "whole"]
    assert again.spent_at[1][1] < 120  # 4 s and 5 s, not 24


def test_an_estimate_that_fails_stops_no_search() -> None:
    def fails(setting: Any) -> float:
        raise TypeError("no layers")

    offered = [compiled(cost_s=fails, refusal=lambda: "it has no layers"), candidate("good")]
    controller = simulate(offered, Machine(speed={"good": 1.3}), budget="5s")
    assert controller.rows["compile"].status == "not applicable" and controller.plan == {"good": None}


def test_the_second_setting_is_prepared_too() -> None:
    machine = Compiles(speed={("compile", "blocks"): 1.3, ("compile", "whole"): 1.5})
    asked: list[int] = []

    def waits() -> str:
        if "blocks" not in machine.checked:
            return ""
        asked.append(machine.step)
        return "it is prepared" if machine.step < asked[0] + 500 else ""

    controller = simulate([compiled(prepare=waits)], machine, until_settled=False, steps=3_000)
    assert controller.plan == {"compile": "whole"}
    assert machine.checked["whole"] >= asked[0] + 500


def test_work_that_is_not_expected_any_more_once_it_has_begun_is_charged_then() -> None:
    machine, began = Machine(speed={"noting": 1.5}), list[int]()

    def is_preparing() -> bool:
        return bool(began) and machine.step < began[0] + 600

    def prepare() -> str:
        began.extend([] if began else [machine.step])
        return "it waits for two epochs" if is_preparing() else ""

    def cost_s(setting: Any) -> float:
        return 0.0 if began else 1.5

    noting = candidate("noting", prepare=prepare, is_preparing=is_preparing, cost_s=cost_s)
    machine.drift = lambda step: 1.1 if is_preparing() else 1.0  # the machine's doing, not the candidate's
    controller = simulate([noting], machine, budget="10%", until_settled=False, steps=8_000, pace=FAST)
    assert began[0] * PLAIN_S >= 15  # not before the budget allows for it
    assert controller.rows["noting"].cost_s == pytest.approx(1.5, rel=0.05)
    assert controller.plan == {"noting": None}


@pytest.mark.parametrize(("data_share", "leads"), [(0.5, True), (0.1, False)])
def test_what_takes_epochs_to_prepare_begins_before_others_spend_the_budget_bit_by_bit(
    data_share: float, leads: bool
) -> None:
    """A cache of samples, for half of the step, came after a minute: cheaper trials were affordable before it."""
    machine, began = Machine(data_share=data_share, thread=lambda step: QUIET), list[int]()

    def prepare() -> str:
        began.extend([] if began else [machine.step])
        return "it waits for two epochs" if machine.step < began[0] + 100 else ""

    def design(**options: Any) -> TrialDesign:
        return TrialDesign(cost_s=0.0 if began else 0.03, prepare=prepare, **options)

    noting = candidate("noting", treats=frozenset({Bottleneck.INPUT}), touches=frozenset({"input"}), kind=design)
    small = [candidate(f"small{number}", touches=frozenset({"optimizer"})) for number in range(4)]
    simulate([*small, noting], machine, budget="3%", until_settled=False, steps=3_000, pace=FAST)
    assert (began[0] < step_of_first(machine, lambda plan: "noting" not in plan)) == leads

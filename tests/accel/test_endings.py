"""A run that ends without a verdict: what was kept, why there is none, and what brings one sooner."""

from __future__ import annotations

from typing import Any

import pytest

import accel
from accel import entry
from accel.profiler import naming
from accel.profiler.evidence import Evidence
from accel.search import outlook as search
from accel.search.state import Candidate
from tests.accel.loops import advance, make, training
from tests.accel.run_reports import full, row
from tests.accel.simulation import CROWDED, INPUT, Machine, candidate, simulate

SOONER = 'to decide sooner: budget="30s" (accel run --budget 30s), or a longer run'


def ended(candidates: list[Candidate], machine: Machine, steps: int, **options: Any) -> tuple[str, str]:
    """Return what a run says that ends after so many steps."""
    return search.why_open(simulate(candidates, machine, steps=steps, until_settled=False, **options))


def test_a_run_that_ends_before_the_plain_loop_is_timed() -> None:
    assert ended([candidate("free")], Machine(), 0)[0] == "too few steps to time the plain loop"


def test_a_budget_that_is_waited_for_is_named_with_the_time_that_it_takes() -> None:
    """0.3 s of start and a comparison of 0.12 s are 3 % of 14 s."""
    why, remedy = ended([candidate("free")], Machine(), 200, budget="3%", startup_s=lambda: 0.3)
    assert why == "the budget of 3% allows the next trial 14 s into the run"
    assert remedy == SOONER


def test_the_remedy_brings_a_trial_at_once() -> None:
    """What the line advises is true: in a run of the same length something is kept."""
    options: dict[str, Any] = {"steps": 400, "until_settled": False, "startup_s": lambda: 0.3}
    machines = Machine(speed={"free": 1.3}), Machine(speed={"free": 1.3})
    assert simulate([candidate("free")], machines[0], budget="3%", **options).plan == {}
    assert simulate([candidate("free")], machines[1], budget="30s", **options).plan == {"free": None}


def test_the_budget_that_is_advised_is_enough_for_what_is_left() -> None:
    dear = [candidate("dear", cost_s=50.0)]
    assert 'budget="101s"' in ended(dear, Machine(), 400, budget="3%", startup_s=lambda: 0.3)[1]


def test_a_budget_in_seconds_is_not_blamed() -> None:
    why, remedy = ended([candidate("free"), candidate("other")], Machine(noise=0.3), 60, budget=60)
    assert (why, remedy) == ("trials were under way", "a longer run decides")


def test_a_busy_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "is_crowded", lambda diagnosis: True)
    machine = Machine(thread=lambda step: CROWDED)
    assert ended([candidate("free", treats=INPUT)], machine, 60)[0].startswith("other processes kept the machine busy")


def test_a_remembered_plan_that_is_being_checked_is_named() -> None:
    controller = simulate([candidate("free")], Machine(), steps=60, until_settled=False)
    controller.recollection.is_checking = True
    assert search.why_open(controller)[0] == "the remembered plan was still being checked"


def test_a_closing_trial_that_has_not_ended_is_named() -> None:
    def machine() -> Machine:
        return Machine(speed={"one": 1.5, "two": 1.4}, noise=0.02)

    offered = [candidate("one"), candidate("two")]
    settled = simulate(offered, machine())
    assert (settled.plan, search.why_open(settled)) == ({"one": None, "two": None}, ("", ""))
    said = {ended(offered, machine(), steps)[0] for steps in range(20, settled.searched_until - 20, 10)}
    assert said == {"trials were under way", "the trial of the whole plan had not ended"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("steps", range(0, 2000, 97))
@pytest.mark.parametrize("budget", ["3%", "100%", 60])
def test_every_ending_of_a_search_that_is_under_way_has_a_reason(steps: int, budget: str | float) -> None:
    offered = [candidate("fast"), candidate("slow", touches=frozenset()), candidate("dear", cost_s=5.0)]
    machine = Machine(speed={"fast": 1.2, "slow": 0.8}, noise=0.1)
    controller = simulate(offered, machine, steps=steps, until_settled=False, budget=budget, startup_s=lambda: 0.1)
    why, remedy = search.why_open(controller)
    assert bool(why) == bool(remedy)
    assert why or not controller.searching


def test_what_was_kept_is_named_with_its_gain() -> None:
    rows = [row(), row(name="allocator", gain=1.1, gain_low=1.05, gain_high=1.17), row(name="as_remembered", gain=None)]
    kept = full(rows=rows).kept_text()
    assert kept == "channels_last 1.45x [1.38, 1.52], allocator 1.10x [1.05, 1.17], as_remembered"


def test_a_run_that_was_too_short_for_a_trial_says_what_would_bring_one(
    only_quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "is_crowded", lambda diagnosis: False)
    model, loader, optimizer = accel.optimize(*make(), budget="3%", cache=False)
    advance(training(model, loader, optimizer), 30)
    entry.MODELS[model].journal._controller.diagnosis = naming.diagnose(Evidence())  # of a quiet machine
    entry._at_exit()
    told = capsys.readouterr().err
    assert told.startswith("accel: following a loop of ") and told.count("\n") == 2 and "kept so far: nothing" in told
    assert "the budget of 3% allows the next trial" in told and told.endswith(f"; {SOONER}\n")


@pytest.mark.parametrize("cache", [True, False])
def test_what_the_next_run_begins_with_is_said(
    only_quick: None, capsys: pytest.CaptureFixture[str], cache: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("ACCEL_CACHE", str(tmp_path))
    model, loader, optimizer = accel.optimize(*make(), budget=60, cache=cache)
    loop = training(model, loader, optimizer)
    controller = entry.MODELS[model].journal._controller
    for _ in range(2000):
        advance(loop, 1)
        if controller.plan:
            break
    assert controller.searching
    entry._at_exit()
    told = capsys.readouterr().err
    assert "kept so far: quick " in told and "x [" in told
    assert ("; the next run begins with quick; " in told) is cache

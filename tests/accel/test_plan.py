"""Plans: saved and read back, bound to their model, and taken over without a search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel import entry, strategies
from accel.errors import PlanError
from accel.run import Run
from accel.search import controller
from accel.search.plan import Plan, fingerprint
from tests.accel.loops import (
    WAIT_S,
    Net,
    Quick,
    advance,
    advance_until,
    assert_same,
    everything,
    loss_of,
    make,
    make_loader,
    plain_run,
    settled,
    training,
)


class Turned(Quick):
    """Turns the outputs round: wrong."""

    name = "turned"

    def enable(self, run: Run, setting: Any) -> None:
        run.gate.add(self.name, lambda call: lambda x: -call(x))

    def disable(self, run: Run) -> None:
        run.gate.remove(self.name)


class Unfit(Quick):
    """Does not apply."""

    name = "unfit"

    def refusal(self, run: Run) -> str:
        return "it needs another machine"


def plan_for(model: nn.Module, **choices: Any) -> Plan:
    return Plan(fingerprint=fingerprint(model), model=type(model).__name__, strategies=choices)


# -- as a file ---------------------------------------------------------------------------------------------------------


def test_a_plan_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    plan = Plan(
        fingerprint="0123456789abcdef",
        model="Net",
        strategies={"loader_workers": 2, "channels_last": None, "fused_optimizer": "fused"},
        allow="reduced",
        device="cpu",
        torch="2.13.0",
        speedup=1.25,
    )
    plan.save(tmp_path / "new" / "plan.json")
    again = Plan.load(tmp_path / "new" / "plan.json")
    assert again == plan
    assert list(again.strategies) == list(plan.strategies)  # the order is that of switching on


def test_fields_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_for(Net(), quick=None).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "blue"}))
    assert Plan.load(path).strategies == {"quick": None}


def test_the_fingerprint_is_of_names_shapes_and_dtypes_not_of_values() -> None:
    one = fingerprint(Net())
    assert fingerprint(Net()) == one  # other weights
    trained, loader, optimizer = make()
    advance(training(trained, loader, optimizer), 3)
    assert fingerprint(trained) == one

    class Other(Net):
        pass

    renamed = Net()
    renamed.tail = renamed.head
    assert len({one, fingerprint(Other()), fingerprint(Net().double()), fingerprint(renamed)}) == 4
    assert fingerprint(nn.Linear(2, 3)) != fingerprint(nn.Linear(3, 2))


# -- taken over --------------------------------------------------------------------------------------------------------


def test_the_plan_of_a_search_is_taken_over_in_the_next_run(only_quick: None, tmp_path: Path) -> None:
    model, loader, optimizer = accel.optimize(*make(), allow="exact", budget=60, report=tmp_path / "first")
    advance_until(training(model, loader, optimizer), settled(model))
    searched = accel.explain(model).search_steps
    accel.undo(model)
    plan = Plan.load(tmp_path / "first" / "plan.json")
    assert plan.strategies == {"quick": None}
    assert plan.speedup is not None
    assert plan.speedup > 1.5

    model, loader, optimizer = accel.optimize(
        *make(), allow="exact", plan=tmp_path / "first" / "plan.json", report=tmp_path / "second"
    )
    loop = training(model, loader, optimizer)
    steps = advance_until(loop, lambda: Quick.on)

    assert steps < 30 < searched
    steps += len(advance(loop, 20))
    report = accel.explain(model)
    assert report.state == "replayed"
    assert report.search_steps == 0
    assert report.plan == plan.strategies
    assert report.rows[0].status == "kept"
    assert report.rows[0].gain is None  # not measured here, so not claimed
    assert report.rows[0].steps == 0
    steps += len(advance(loop, 100))
    assert Quick.on
    assert_same(everything(model, optimizer), plain_run(steps))
    assert Plan.load(tmp_path / "second" / "plan.json").strategies == plan.strategies


@pytest.mark.parametrize("steps", [0, 60])
@pytest.mark.parametrize("applies", [True, False])
def test_a_plan_that_is_replayed_stays_as_it_was_made(
    only_quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int, applies: bool
) -> None:
    """With the folder of the report as its own: a run that failed early emptied it, and no later one searched."""
    model, loader, optimizer = make()
    plan = Plan(fingerprint=fingerprint(model), model="Net", strategies={"quick": None}, allow="exact", speedup=8.0)
    plan.save(tmp_path / "plan.json")
    if not applies:
        monkeypatch.setattr(Quick, "refusal", lambda self, run: "not on this machine")
    model, loader, optimizer = accel.optimize(
        model, loader, optimizer, allow="exact", plan=tmp_path / "plan.json", report=tmp_path
    )
    advance(training(model, loader, optimizer), steps)
    accel.undo(model)
    assert accel.Report.load(tmp_path / "report.json").plan == ({"quick": None} if steps and applies else {})
    assert Plan.load(tmp_path / "plan.json") == plan


class Dtypes(Quick):
    """Has a setting that JSON does not know."""

    def settings(self, run: Run) -> list[Any]:
        return [torch.bfloat16]


def test_a_setting_that_json_does_not_know_costs_the_report_and_not_the_plan(
    only_quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Dtypes])
    model, loader, optimizer = accel.optimize(*make(), allow="exact", budget=60, report=tmp_path / "report.json")
    loop = training(model, loader, optimizer)
    advance_until(loop, settled(model))
    advance(loop, 5)
    assert Quick.on and accel.explain(model).plan == {"quick": torch.bfloat16}
    told = capsys.readouterr().err
    assert "the report could not be written" in told and "not JSON serializable" in told
    assert "accel stopped" not in told


def test_a_plan_that_is_wrong_here_is_undone_by_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [Quick, Turned, Unfit])
    model, loader, optimizer = make()
    plan = plan_for(model, turned=None, unfit=None, quick=None)
    model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", plan=plan)
    advance(training(model, loader, optimizer), 60)

    report = accel.explain(model)
    rows = {row.name: row for row in report.rows}
    assert report.plan == {"quick": None}
    assert rows["turned"].status == "undone"
    assert rows["turned"].why.startswith("wrong: ")
    assert (rows["unfit"].status, rows["unfit"].why) == ("not applicable", "it needs another machine")
    assert_same(everything(model, optimizer), plain_run(60))


def test_a_plan_brings_its_own_allowance_and_disable_takes_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Coarse(Quick):
        exactness = strategies.Exactness.REDUCED

    monkeypatch.setattr(strategies, "REGISTRY", [Coarse])
    for disable, kept, status in (((), {"quick": None}, "kept"), (("quick",), {}, "not applicable")):
        model, loader, optimizer = make()
        plan = plan_for(model, quick=None)
        model, loader, optimizer = accel.optimize(model, loader, optimizer, plan=plan, disable=disable)
        advance(training(model, loader, optimizer), 40)
        report = accel.explain(model)
        assert report.plan == kept
        assert Quick.on == bool(kept)
        assert report.rows[0].status == status
        accel.undo(model)
    assert report.rows[0].why == "left out by disable="


def test_the_run_is_as_long_as_its_steps_however_short_its_epochs_are(
    only_quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has waited for the budget is tried once the run is long enough, and most steps are rest."""
    monkeypatch.setattr(controller, "_IDLE", 1)
    model, loader, optimizer = make()
    model, loader, optimizer = accel.optimize(model, loader, optimizer, disable=("quick",))
    advance(training(model, loader, optimizer), 700)
    state = entry.MODELS[model].journal._controller
    assert state.steps >= 400
    assert state.elapsed_s >= state.steps * WAIT_S


def test_a_plan_is_taken_over_again_after_the_batches_have_changed(only_quick: None) -> None:
    """Another batch shape makes a search begin anew; a replayed run has none, and must not lose its plan."""
    model, _, optimizer = make()
    sizes = [8] * 100 + [16] * 200
    batches = [(torch.randn(size, 6), torch.arange(size)) for size in sizes]
    model, loader, optimizer = accel.optimize(model, batches, optimizer, plan=plan_for(model, quick=None))
    on = []
    for x, target in loader:
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        optimizer.step()
        on.append(Quick.on)
    assert any("changed" in event.text for event in accel.explain(model).events)
    assert on[50]
    assert on[-1]
    report = accel.explain(model)
    assert (report.state, report.plan, report.search_steps) == ("replayed", {"quick": None}, 0)


def lazy_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 3))


def test_lazy_modules_are_described_once_they_have_their_shapes(only_quick: None) -> None:
    model = lazy_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, loader, optimizer = accel.optimize(model, make_loader(), optimizer, budget=60)
    assert accel.explain(model).parameters == 27  # the last layer's
    advance(training(model, loader, optimizer), 3)
    report = accel.explain(model)
    assert report.parameters == sum(p.numel() for p in model.parameters()) == 99
    assert report.fingerprint == fingerprint(model)


def test_a_plan_for_lazy_modules_asks_for_their_shapes_first() -> None:
    model = lazy_net()
    model(torch.randn(4, 6))
    plan = plan_for(model)
    with pytest.raises(PlanError, match="lazy modules"):
        accel.optimize(lazy_net(), make_loader(), plan=plan)
    plan.check(model)

"""What a run prints beside its report: one line where it would otherwise stay silent, and only once."""

from __future__ import annotations

import pytest

import accel
from accel import entry
from accel.search import outlook
from tests.accel.loops import Quick, advance, advance_until, make, settled, training
from tests.accel.simulation import Machine, candidate, simulate


def test_a_run_that_ends_before_its_search_says_so(only_quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    model, loader, optimizer = accel.optimize(*make(), budget=60)
    advance(training(model, loader, optimizer), 10)
    entry._at_exit()
    line = "accel: the run ended after 8 steps, before the search for Net had a verdict"
    why = "too few steps to time the plain loop"
    assert capsys.readouterr().err == f"{line} ({why}); kept so far: nothing; it takes a longer run\n"
    entry._at_exit()
    assert capsys.readouterr().err == ""


def test_a_run_without_a_step_says_so(only_quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    accel.optimize(*make(), budget=60)
    entry._at_exit()
    remedy = "iterate the loader that optimize returned, and call the model that it was given"
    assert capsys.readouterr().err == f"accel: no training step of Net was seen; {remedy}\n"


def test_a_run_that_was_told_of_its_loader_is_not_told_again(
    only_quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model, loader, optimizer = make()
    accel.optimize(model, loader, optimizer, budget=60)
    loop = training(model, loader, optimizer)
    advance(loop, 2)
    assert capsys.readouterr().err == ""
    advance(loop, 40)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "Net was updated 3 times without a batch from the loader that accel.optimize returned" in told
    entry._at_exit()
    assert capsys.readouterr().err == ""


def test_a_run_whose_search_has_ended_has_nothing_more_to_say(
    only_quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model, loader, optimizer = accel.optimize(*make(), budget=60)
    advance_until(training(model, loader, optimizer), settled(model))
    capsys.readouterr()
    entry._at_exit()
    assert capsys.readouterr().err == ""


def test_a_crowded_machine_is_named_as_the_search_begins(
    only_quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlook, "is_crowded", lambda diagnosis: True)
    Quick.on = True  # nothing waits
    model, loader, optimizer = accel.optimize(*make(), budget=60)
    advance(training(model, loader, optimizer), 60)
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("accel: following a loop of ")
    assert first.endswith(" ms a step, budget 60s: trials begin now, beside other processes that keep the machine busy")


def test_a_run_that_ends_after_a_pass_that_trains_nothing_says_so(
    only_quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, loader, _ = accel.optimize(*make(), budget=60)
    for _ in range(3):
        list(loader)
    assert capsys.readouterr().err == ""
    entry._at_exit()
    assert capsys.readouterr().err.startswith("accel: no training step of Net was seen; iterate the loader")


def test_what_is_on_before_its_trial_has_ended_is_kept_so_far(only_quick: None) -> None:
    model, _, _ = accel.optimize(*make(), budget=60)
    journal = entry.optimized(model).journal  # type: ignore[union-attr]
    journal._controller.plan = {"quick": None}
    journal.finish()
    report = journal.report()
    (row,) = [row for row in report.rows if row.name == "quick"]
    assert (report.state, row.status, row.why) == ("interrupted", "kept", "on so far; its trial has not ended")


@pytest.mark.parametrize(
    ("budget", "started_s", "line"),
    [
        ("60s", 0.3, "following a loop of 20 ms a step, budget 60s: trials begin now"),
        ("3%", 0.3, 'a step, budget 3%: trials begin 10 s into the run; sooner: budget="30s" (accel run --budget 30s)'),
    ],
)
def test_the_first_line_says_when_trials_begin(budget: str, started_s: float, line: str) -> None:
    lines: list[str] = []
    simulate([candidate("x")], Machine(), budget=budget, startup_s=lambda: started_s, say=lines.append)
    assert line in lines[0]


def test_where_nothing_can_be_tried_there_is_no_first_line() -> None:
    lines: list[str] = []
    simulate([candidate("x", refusal=lambda: "there is no GPU")], Machine(), say=lines.append)
    assert not lines

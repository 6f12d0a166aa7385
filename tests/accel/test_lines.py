"""What a run prints beside its report: one line where it would otherwise stay silent, and only once."""

from __future__ import annotations

import copy

import pytest
import torch

import accel
from accel import controller, entry
from tests.accel.loops import Quick, advance, advance_until, make, settled, training


def test_a_run_that_ends_before_its_search_says_so(only_quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    model, loader, optimizer = accel.optimize(*make(), budget=60)
    advance(training(model, loader, optimizer), 10)
    entry._at_exit()
    line = "accel: the run ended after 8 steps, before the search for Net had a verdict; kept so far: nothing\n"
    assert capsys.readouterr().err == line
    entry._at_exit()
    assert capsys.readouterr().err == ""


def test_a_run_without_a_step_says_so(only_quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    accel.optimize(*make(), budget=60)
    entry._at_exit()
    assert capsys.readouterr().err == "accel: no training step of Net was seen\n"


def test_a_run_that_was_told_of_its_loader_is_not_told_again(
    only_quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model, loader, optimizer = make()
    accel.optimize(model, loader, optimizer, budget=60)
    advance(training(model, loader, optimizer), 20)
    assert capsys.readouterr().err.count("\n") == 1
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


def test_a_crowded_machine_is_named_as_soon_as_the_search_waits(
    only_quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_is_crowded", lambda diagnosis: True)
    Quick.on = True  # nothing waits
    model, loader, optimizer = accel.optimize(*make(), budget=60)
    advance(training(model, loader, optimizer), 60)
    assert capsys.readouterr().err == "accel: other processes keep the machine busy: the search waits\n"


def test_a_loop_that_trains_another_model_is_told_once(only_quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    model, loader, optimizer = make()
    _, loader, _ = accel.optimize(model, loader, optimizer, budget=60)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for _ in range(3):
            list(loader)
    assert capsys.readouterr().err == ""
    accel.undo(model)
    _, loader, _ = accel.optimize(model, loader, optimizer, budget=60)
    advance(training(copied, loader, torch.optim.SGD(copied.parameters(), lr=0.1)), 80)
    words = "32 batches were fetched without a training call of Net or a step of its optimizer; pass the model"
    assert capsys.readouterr().err.count(words) == 1

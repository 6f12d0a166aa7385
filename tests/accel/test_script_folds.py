"""Scripts whose models come and go: folds, clients, models by turns. What is gone is let go of, at a bounded cost."""

from __future__ import annotations

import copy
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel import entry
from accel.profiler.loop import called_modules
from accel.script.training import ScriptTraining
from tests.accel.loops import Quick, make
from tests.accel.script_followed import OPTIONS, epochs, step, training

__all__ = ["training"]


def steps(model: Any, optimizer: Any, count: int) -> None:
    """Take some steps without a loader."""
    for _ in range(count):
        step(model, optimizer, torch.randn(8, 6), torch.randint(9, (8,)))


# -- what looking at new models may take -------------------------------------------------------------------------------


def test_ever_new_models_are_looked_at_a_bounded_number_of_times(
    only_quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Federated training copies the model for each client, which takes some steps: each was looked at for 20 ms."""
    looks, plain = list[int](), called_modules._modules

    def look() -> list[nn.Module]:
        looks.append(1)
        return plain()

    monkeypatch.setattr(called_modules, "_modules", look)
    training = ScriptTraining(dict(OPTIONS), threading.get_ident(), whole="")
    training.start()
    try:
        model, *_ = make()

        def client(count: int) -> None:
            copied = copy.deepcopy(model)
            steps(copied, torch.optim.SGD(copied.parameters(), lr=0.01), count)

        for _ in range(30):
            client(3)
        assert len(looks) == 16
        training.updates += 1000  # one more for each thousand
        client(3)
        client(3)
        assert len(looks) == 17
    finally:
        training.stop()
        training.models.undo()


def test_why_an_optimizer_for_each_step_gains_nothing_is_told(training: ScriptTraining) -> None:
    model, *_ = make()
    for _ in range(10):
        steps(model, torch.optim.SGD(model.parameters(), lr=0.01), 1)
    told = "each of the 10 optimizers looked at stepped only once; make one before the loop"
    assert training.why_nothing() == told


# -- models that are trained no more -----------------------------------------------------------------------------------


def test_the_model_of_a_fold_is_freed_when_the_next_one_is_trained(training: ScriptTraining) -> None:
    folds: list[weakref.ref[Any]] = []
    for seed in range(3):
        model, loader, optimizer = make(seed)
        epochs(model, loader, optimizer, 1)
        folds.append(weakref.ref(model))
        assert [fold() is None for fold in folds] == [True] * seed + [False]


def test_so_it_is_in_a_loop_without_a_loader(training: ScriptTraining) -> None:
    first: list[weakref.ref[Any]] = []
    for seed in range(2):
        model, _, optimizer = make(seed)
        first += [weakref.ref(model), weakref.ref(optimizer)]
        steps(model, optimizer, 300 if seed == 0 else 250)
    del _
    assert [each() is None for each in first] == [True, True, False, False]


def test_what_a_fold_has_kept_is_off_while_the_next_one_is_measured(training: ScriptTraining) -> None:
    model, loader, optimizer = make()
    epochs(model, loader, optimizer, 20)
    assert accel.explain(model).plan == {"quick": None}
    model, loader, optimizer = make(1)
    for number, (x, target) in enumerate(loader):
        step(model, optimizer, x, target)
        assert not Quick.on or number < 2


def test_a_model_that_is_trained_again_is_optimized_again(training: ScriptTraining) -> None:
    first, second = make(0), make(1)
    epochs(*first, 4)
    epochs(*second, 20)
    assert entry.optimized(first[0]) is None
    epochs(*first, 4)
    assert training.models.count == 3
    assert accel.explain(first[0]).steps >= 40


def test_models_that_are_trained_by_turns_with_new_optimizers_are_let_go_of_once_at_most(
    training: ScriptTraining,
) -> None:
    models, (_, loader, _) = [make(seed)[0] for seed in range(2)], make()
    for _ in range(6):
        for model in models:
            epochs(model, loader, torch.optim.SGD(model.parameters(), lr=0.01), 1)
    assert training.models.count == 4
    assert all(entry.optimized(model) is not None for model in models)


def test_an_optimizer_for_each_parameter_is_no_end_of_a_model(
    training: ScriptTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the model comes after hundreds of updates then."""
    looks, plain = list[int](), called_modules._modules

    def look() -> list[nn.Module]:
        looks.append(1)
        return plain()

    monkeypatch.setattr(called_modules, "_modules", look)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(120)))
    optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()]
    for _ in range(4):
        model(torch.randn(8, 6)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert training.models.count == 1 and len(looks) <= 16 and entry.optimized(model) is not None


def test_beyond_eight_models_at_a_time_others_wait_and_that_is_told_once(
    training: ScriptTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [make(seed) for seed in range(9)]
    for _ in range(6):
        for model, _, optimizer in made:
            steps(model, optimizer, 1)
    assert training.models.count == 8
    assert capsys.readouterr().err.count("8 models are optimized at a time; others are left alone") == 1
    (left,) = [each for each in made if entry.optimized(each[0]) is None]
    epochs(*left, 30)
    assert entry.optimized(left[0]) is not None
    assert "at a time" not in capsys.readouterr().err


def test_the_report_of_an_earlier_fold_says_how_its_search_ended(training: ScriptTraining, tmp_path: Path) -> None:
    training.models._options["report"] = tmp_path / "runs"
    for seed, count in enumerate((20, 1, 1)):
        model, loader, optimizer = make(seed)
        epochs(model, loader, optimizer, count)
    done, interrupted = (accel.Report.load(tmp_path / name / "report.json") for name in ("runs", "runs-2"))
    assert (done.state, interrupted.state) == ("done", "interrupted")
    assert interrupted.verdict().startswith("no verdict: the run ended after")

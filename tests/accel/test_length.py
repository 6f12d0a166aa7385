"""The length of the run, from whoever knows it, and what the search spends by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accel
from accel.dataio.elastic_sampler import LoopTurns
from accel.errors import InvalidArgument
from accel.integrations import callback
from accel.run import Run
from accel.script import training as script_training
from accel.search.actions import Action, Result
from accel.search.budget import Budget
from accel.search.state import SearchState
from benchmarks.suite.packages import let_torchvision_import
from tests.accel.loops import advance, make, training
from tests.accel.simulation import PLAIN_S, Machine, candidate, simulate, step_of_first


class Compiles(Machine):
    """The first check of a plan with `compile` in it takes some seconds."""

    takes_s = 5.0
    done = False

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        if "compile" in (action.check or {}) and not self.done:
            self.done = True
            result.aside_s += self.takes_s
        return result


def run(steps_in_all: float | None, machine: Machine, steps: int = 3000, **options: Any) -> SearchState:
    declared = options.pop("cost_s", 5.0)
    return simulate(
        [candidate("compile", cost_s=declared)],
        machine,
        budget=options.pop("budget", "3%"),
        steps=steps,
        until_settled=False,
        steps_in_all=lambda: steps_in_all,
        **options,
    )


# -- what is spent -----------------------------------------------------------------------------------------------------


def test_what_a_long_run_pays_back_is_done_at_once_and_what_a_short_one_does_not_is_never_done() -> None:
    """5 s are 3 % of 170 s."""
    long, short, unknown = Compiles(speed={"compile": 1.5}), Compiles(), Compiles()
    assert run(20_000, long, steps=500).plan == {"compile": None}
    assert step_of_first(long, lambda plan: bool(plan)) < 30
    state = run(3000, short)
    assert not short.done and state.cost_s < 1.0
    assert state.rows["compile"].why == "about 5 s of one-off work, more than the budget of 3% allows now"
    run(None, unknown, steps=500)
    assert not unknown.done


def test_near_the_end_nothing_dear_begins() -> None:
    machine = Compiles()
    run(20_000, machine, steps=19_990, budget=3600, ran_s=lambda: 0.0)
    assert machine.done
    late = Compiles(regime=lambda step: step > 19_900)  # the search begins again
    run(20_000, late, steps=19_990, budget="3%")
    assert sum("compile" in (action.check or {}) for action in late.actions) == 1


@given(
    share=st.floats(0.001, 1.0),
    elapsed=st.floats(0.0, 1e4),
    to_come=st.floats(0.0, 1e4),
    spent=st.floats(0.0, 100.0),
    expected=st.floats(0.0, 100.0),
    saved=st.floats(0.0, 1e3),
)
def test_a_known_length_allows_its_share_and_nothing_that_the_rest_does_not_pay_back(
    share: float, elapsed: float, to_come: float, spent: float, expected: float, saved: float
) -> None:
    budget = Budget(share=share)
    fixed: dict[str, Any] = {"spent": spent, "expected": expected, "elapsed": elapsed, "saved": saved}
    if budget.allows(**fixed, to_come=to_come):
        assert spent + expected <= share * (elapsed + to_come) + 0.5 * saved
        assert expected <= max(share, 0.1) * to_come
        assert budget.allows(**fixed, to_come=2 * to_come)
    assert Budget(seconds=5.0).allows(spent=0.0, expected=6.0, elapsed=elapsed, to_come=to_come) is False


def test_compiling_beside_the_loop_costs_it_less_than_three_percent() -> None:
    """A helper takes 30 s, in which steps are 2 % slower; then this process takes 2 s.

    The loop makes its steps meanwhile: one that stood still would have none of them.
    """

    class Beside(Compiles):
        takes_s = 2.0
        helped_s = 0.0
        wall_s = 0.0
        steps_meanwhile = 0

        def seconds(self, plan: dict[str, Any]) -> float:
            return super().seconds(plan) * (1.02 if 0 < self.helped_s < 30 else 1.0)

        def answer(self, action: Action) -> Result:
            before, is_helped = self.step, 0 < self.helped_s < 30
            result = super().answer(action)
            self.steps_meanwhile += (self.step - before) * is_helped
            self.helped_s += result.elapsed_s + result.aside_s if self.helped_s else 0.0
            self.wall_s += result.elapsed_s + result.aside_s
            return result

    machine = Beside(speed={"compile": 1.5}, noise=0.01)

    def prepare() -> str:
        machine.helped_s = machine.helped_s or 1e-9
        return "a helper process compiles" if machine.helped_s < 30 else ""

    compiled = candidate("compile", cost_s=2.0, prepare=prepare, is_preparing=lambda: 0 < machine.helped_s < 30)
    state = search_until(machine, compiled, 120.0)
    assert state.plan == {"compile": None}
    assert machine.steps_meanwhile > 0.97 * 30.0 / PLAIN_S
    assert state.cost_s < 0.03 * 120.0


def search_until(machine: Any, compiled: Any, seconds: float) -> SearchState:
    from accel.search.controller import decisions
    from tests.accel.simulation import search

    state = search([compiled], budget="3%", steps_in_all=lambda: seconds / PLAIN_S)
    actions = decisions(state)
    action = next(actions)
    while machine.wall_s < seconds:
        action = actions.send(machine.answer(action))
    return state


# -- who knows it ------------------------------------------------------------------------------------------------------


def run_of(**fields: Any) -> Run:
    return Run(nn.Linear(1, 1), fields.pop("loader", range(0)), [], SimpleNamespace(), None, **fields)  # type: ignore[arg-type]


def test_steps_of_a_run() -> None:
    loader = list(range(10))
    assert run_of(loader=loader).steps_in_all() is None
    assert run_of(loader=loader, planned_steps=7).steps_in_all() == 7
    accumulating = run_of(loader=loader, planned_epochs=3)
    assert accumulating.steps_in_all() == 30
    accumulating.observed.batches_of_steps.update([4, 4, 7])  # an update was left out
    assert accumulating.steps_in_all() == 7.5
    assert run_of(loader=iter(loader), planned_epochs=3).steps_in_all() is None
    resumed = SimpleNamespace(batch_sampler=SimpleNamespace(turns=LoopTurns(to_come=2)), __len__=lambda: 10)
    assert run_of(loader=resumed).steps_in_all() is None  # it has no length

    class Loader(list[int]):
        batch_sampler = SimpleNamespace(turns=LoopTurns(to_come=2))

    assert run_of(loader=Loader(range(10))).steps_in_all() == 20


def test_the_arguments_reach_the_search(only_quick: None) -> None:
    model, loader, optimizer = accel.optimize(*make(), budget=60, epochs=3)
    run = accel.entry.MODELS[model].session.run  # type: ignore[attr-defined]
    assert run.steps_in_all() == 39
    advance(training(model, loader, optimizer), 20)
    assert run.observed.batches_per_step() == 1
    model, _, _ = accel.optimize(*make(), budget=60, steps=100)
    assert accel.entry.MODELS[model].session.run.steps_in_all() == 100  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"steps": 0}, "steps must be how many steps the run will have, above 0, got 0"),
        ({"steps": 1.5}, "steps must be"),
        ({"epochs": float("inf")}, "epochs must be"),
        ({"epochs": True}, "epochs must be"),
        ({"steps": 3, "epochs": 3}, "given once"),
    ],
)
def test_a_wrong_length_is_refused(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        accel.optimize(*make(), **given_)


def begun(made: callback.TrainingCallback, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the options of the trainings that a callback begins to follow."""
    begun: list[dict[str, Any]] = []
    follow = SimpleNamespace(
        start=lambda: None, stop=lambda: None, models=SimpleNamespace(end_trials=lambda _: None, undo=list, count=0)
    )
    monkeypatch.setattr(script_training, "ScriptTraining", lambda options, *others: begun.append(options) or follow)
    return begun


@pytest.mark.integration
@pytest.mark.parametrize(("most", "steps"), [(500, 400), (100, None), (-1, None)])
def test_the_trainer_of_transformers_tells_its_steps(
    most: int, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pytest.importorskip("accel.integrations.transformers").TransformersCallback()
    trainings = begun(made, monkeypatch)
    made.on_train_begin(None, SimpleNamespace(max_steps=most, global_step=100), None)
    made._end()
    assert trainings[0].get("steps") == steps


@pytest.mark.integration
@pytest.mark.parametrize(
    ("bounds", "steps"),
    [
        ({"max_epochs": 5}, 40),
        ({"max_steps": 20}, 10),
        ({"max_epochs": 5, "max_steps": 20}, 10),
        ({"max_epochs": 5, "limit_train_batches": 4, "accumulate_grad_batches": 2}, 0),
        ({"max_epochs": 5, "max_time": {"seconds": 60}}, None),
        ({}, None),
    ],
)
def test_the_trainer_of_lightning_tells_its_length(
    bounds: dict[str, Any], steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_torchvision_import()
    lightning = pytest.importorskip("lightning")
    made = pytest.importorskip("accel.integrations.lightning").LightningCallback()
    trainings = begun(made, monkeypatch)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(**quiet, **bounds)
    if trainer.max_epochs is None:  # `fit` sets it
        trainer.fit_loop.max_epochs = -1 if "max_steps" in bounds else 1000
    module = lightning.LightningModule()
    trainer.strategy.connect(module)
    monkeypatch.setattr(type(trainer), "train_dataloader", object())
    monkeypatch.setattr(type(trainer), "num_training_batches", bounds.get("limit_train_batches", 10))
    monkeypatch.setattr(type(trainer), "global_step", 10)
    made.on_fit_start(trainer, module)
    made.on_train_start(trainer, module)
    made._end()
    assert trainings[0].get("steps", 0) == (steps or 0)

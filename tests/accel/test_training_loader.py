"""Which loader the loop trains on, where it iterates more than one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry, strategies
from accel.dataio.dataset import fetch_watch
from accel.dataio.dataset.watch import DatasetWatch
from accel.search.actions import Action
from accel.session.session import Session
from accel.session.training_loader import TrainingLoader


def successor_after(steps: int, before_each: str) -> Any:
    """What the loop has gone on to after so many steps on a second loader, each after a batch of the first one."""
    first, second = (SimpleNamespace(_accel_loader=DataLoader([1, 2])) for _ in range(2))
    run = SimpleNamespace(loader=first._accel_loader, optimizers=[None])
    training: Any = TrainingLoader(run)  # type: ignore[arg-type]
    training.turns_to(first)
    training.source = training.delivered
    training.successor()
    for _ in range(steps):
        if before_each:
            with torch.set_grad_enabled(before_each == "trained on"):
                training.turns_to(first)
        training.turns_to(second)
        training.source = training.delivered
        if training.successor() is not None:
            return "second"
    return "first"


@pytest.mark.parametrize(
    ("before_each", "trained_on"), [("trained on", "first"), ("validated", "second"), ("", "second")]
)
def test_a_loader_that_serves_each_step_together_with_another_is_trained_on(before_each: str, trained_on: str) -> None:
    assert successor_after(40, before_each) == trained_on


@pytest.mark.parametrize(("workers", "is_watched"), [(0, True), (1, False)])
def test_fetching_in_worker_processes_is_not_watched_from_here(workers: int, is_watched: bool) -> None:
    run: Any = SimpleNamespace(
        loader=DataLoader([1, 2], num_workers=workers), optimizers=[None], fetching=SimpleNamespace(fetch_watch=None)
    )
    training = TrainingLoader(run)
    training.watch(True)
    assert (run.fetching.fetch_watch is not None) == is_watched
    training.watch(False)
    assert run.fetching.fetch_watch is None


@pytest.mark.parametrize("is_suspended", [False, True])
def test_looks_at_the_dataset_are_a_cost_of_the_search_and_in_no_step(
    is_suspended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lay in the observed fetches: up to 20 ms of a large dataset's."""
    now_s, looks = [0.0], [0]

    def clock() -> float:
        now_s[0] += 1e-6
        return now_s[0]

    class Look(DatasetWatch):
        def changed(self, indices: Any = (), **options: bool) -> bool:
            now_s[0] += 0.02
            looks[0] += 1
            return super().changed(indices, **options)

    class Fetched(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            now_s[0] += 0.003
            return [super(Fetched, self).__getitem__(index) for index in indices]

    monkeypatch.setattr(fetch_watch, "DatasetWatch", Look)
    monkeypatch.setitem(Session.__init__.__kwdefaults__, "clock", clock)
    model: Any = nn.Linear(4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    plain = DataLoader(Fetched(torch.randn(200, 4), torch.randn(200, 2)), batch_size=4)
    model, loader, optimizer = accel.optimize(
        model, plain, optimizer, disable=strategies.names(), budget=60, cache=False
    )
    for x, target in loader:
        with accel.disabled() if is_suspended else nullcontext():
            now_s[0] += 0.005
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
    report = accel.explain(model)
    accel.undo(model)
    assert looks[0] >= 23
    assert report.anatomy_before["data"] == pytest.approx(3.0, rel=0.1)
    assert sum(report.anatomy_before.values()) == pytest.approx(3.0 if is_suspended else 8.0, rel=0.1)
    assert report.search_s >= 23 * 0.02


def test_a_rest_is_not_watched() -> None:
    """Hundreds of fetches on a crowded machine."""
    model: Any = nn.Linear(4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    plain = DataLoader(TensorDataset(torch.randn(200, 4), torch.randn(200, 2)), batch_size=4)
    model, loader, optimizer = accel.optimize(
        model, plain, optimizer, disable=strategies.names(), budget=60, cache=False
    )
    session: Any = entry.MODELS[model].session
    watched = []

    def decisions() -> Any:
        yield Action(plan={}, rest=5, steps=3, anatomy=True)
        while True:
            yield Action(plan={}, rest=50, steps=1, after_search=True)

    session.runner.make_decisions = decisions
    for x, target in loader:
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
        watched.append(session.run.fetching.fetch_watch is not None)
    accel.undo(model)
    assert watched == [True] + [False] * 5 + [True] * 3 + [False] * 41

"""loader_workers: left alone where what makes the batches keeps a state, and where memory is short."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import accel
from accel import strategies
from accel.dataio.passes.proxy import LoaderProxy
from accel.profiler.host import ResidentMemory
from accel.run import Run
from accel.run.gate import Gate
from accel.search.plan import Plan, fingerprint
from accel.session.training_loader import TrainingLoader
from accel.strategies import loader_workers
from accel.strategies.loader_workers import LoaderWorkers
from tests.accel.loops import Net, Samples, advance, assert_same, everything, make, training
from tests.accel.strategies.test_sample_cache import Silent


def run_of(loader: DataLoader[Any], cores: int = 8) -> tuple[Run, Any]:
    """Return a run, and the loop's loader."""
    proxy: Any = LoaderProxy(loader, Silent())
    model = Net()
    return Run(model, loader, [], Gate(model, []), proxy._accel_fetching, 1, cores=cores), proxy


class Masks:
    """A collate function with a generator of its own, as one that masks words has."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __call__(self, samples: list[int]) -> tuple[Tensor, Any]:
        return torch.tensor(samples), self.random.random(len(samples))


def test_a_collate_function_that_keeps_a_state_is_seen_while_the_loop_is_watched() -> None:
    """Each worker had a copy of it, which drew the same masks."""
    run, loop = run_of(DataLoader(list(range(40)), 4, collate_fn=Masks()))
    training = TrainingLoader(run)
    training.watch(True)
    for number, _ in enumerate(loop):
        if number == 3:
            break
    run.observed.fetch_finding = training.finding
    assert training.finding == "making a batch changes what the collate function keeps"
    assert training.finding in LoaderWorkers().refusal(run)


def test_a_loader_that_is_no_dataloader_is_watched_by_its_dataset() -> None:
    run, _ = run_of(DataLoader([1, 2]))
    run.loader = [1, 2]
    assert TrainingLoader(run).finding == ""


@pytest.mark.parametrize(
    ("available", "own", "processes"), [(None, 100, [1, 2, 4, 8]), (450, 100, [1, 2, 4]), (99, 100, [])]
)
def test_no_more_processes_than_there_is_memory_for_copies_of_this_one(
    available: int | None, own: int, processes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_workers, "available_memory", lambda: available)
    monkeypatch.setattr(loader_workers, "resident_memory", lambda: ResidentMemory(own, own, own))
    run, _ = run_of(DataLoader([object()] * 8))
    settings = LoaderWorkers().settings(run)
    assert [each for each in settings if isinstance(each, int)] == processes
    if not settings:
        assert "no memory for a worker process" in LoaderWorkers().refusal(run)


LEVEL = [0.0]


class Curriculum(Samples):
    """Follows a number that the loop sets."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + LEVEL[0], y


@pytest.mark.parametrize("changes_at", [None, 50])
def test_a_run_says_what_was_compared_and_leaves_a_dataset_that_the_loop_changes(
    changes_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that threads had made before the change were trained on after it."""
    monkeypatch.setattr(strategies, "REGISTRY", [LoaderWorkers])

    def train(wrap: Any) -> Any:
        LEVEL[0] = 0.0
        model, _, optimizer = make()
        loader: Any = DataLoader(Curriculum(), 8, shuffle=True)
        model, loader, optimizer = wrap(model, loader, optimizer)
        loop = training(model, loader, optimizer)
        for step in range(80):
            if step == changes_at:
                LEVEL[0] = 1.0
            advance(loop, 1)
        return model, everything(model, optimizer)

    def replay(model: Any, loader: Any, optimizer: Any) -> Any:
        workers = {"loader_workers": "threads=1"}
        plan = Plan(fingerprint=fingerprint(model), model="Net", strategies=workers, allow="exact")
        return accel.optimize(model, loader, optimizer, allow="exact", plan=plan)

    model, seen = train(replay)
    (row,) = accel.explain(model).rows
    assert_same(seen, train(lambda *arguments: arguments)[1])
    if changes_at is None:
        assert row.status == "kept"
        assert re.search(r"; [1-9]\d* of \d+ batches were made by the loop too and compared: the same bits$", row.why)
    else:
        assert row.status == "undone"
        assert "NotAhead: the loop changes the global LEVEL within an epoch" in row.why

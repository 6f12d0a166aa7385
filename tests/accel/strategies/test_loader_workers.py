"""loader_workers: left alone where what makes the batches keeps a state, and where memory is short."""

from __future__ import annotations

import io
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


class Buffers:
    """A collate function that writes into a buffer of its own."""

    def __init__(self) -> None:
        self.buffer = io.BytesIO()

    def __call__(self, samples: list[int]) -> bytes:
        self.buffer.seek(0)
        self.buffer.write(bytes(samples))
        return self.buffer.getvalue()


def test_threads_do_not_share_a_collate_function_that_may_not_be_shared() -> None:
    run, _ = run_of(DataLoader(list(range(40)), 4, collate_fn=Buffers()))
    assert "threads=1" not in LoaderWorkers().settings(run)
    assert LoaderWorkers().settings(run_of(DataLoader(list(range(40)), 4))[0])[0] == "threads=1"


def test_of_another_loader_its_own_next_epoch_is_begun() -> None:
    """As in the next stage of a curriculum: the batches of the first one came again."""
    strategy = LoaderWorkers()
    for first in (0, 100):
        run, _ = run_of(DataLoader(list(range(first, first + 8)), 4, num_workers=1))
        strategy.enable(run, 1)
        assert run.fetching.next_epoch is not None
        assert next(run.fetching.next_epoch.begin()).tolist() == list(range(first, first + 4))
        strategy.disable(run)
        strategy.close(run)


def test_a_trial_in_whole_epochs_ends_where_each_has_a_loader_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "REGISTRY", [LoaderWorkers])
    model, _, optimizer = make()
    for _ in range(8):
        loader = DataLoader(Samples(80), 2, num_workers=1)
        model, batches, optimizer = accel.optimize(model, loader, optimizer, budget=60, cache=False)
        advance(training(model, batches, optimizer), 40)
    assert accel.explain(model).state == "done"
    accel.undo(model)


def test_a_run_of_few_epochs_is_not_compared_in_whole_ones() -> None:
    run, _ = run_of(DataLoader(list(range(40)), 4, num_workers=1))
    assert LoaderWorkers().refusal(run) == ""
    run.planned_epochs = 10
    assert LoaderWorkers().refusal(run) == "it is compared in 12 whole epochs, more than the run has"

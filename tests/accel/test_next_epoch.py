"""A loader with workers of its own, under `optimize`: the same weights, and a trial in whole epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

import accel
from accel.dataio.passes.next_epoch import NextEpoch
from accel.dataio.passes.proxy import Fetching
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies.loader_workers import LoaderWorkers
from accel.strategies.trial_design import EpochDesign
from tests.accel.loops import Net, loss_of

OTHERS = ("allocator", "dropout_masks", "intraop_threads", "fused_optimizer", "channels_last", "torch_compile")


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise, drawn in the workers."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(0, 1, 6) * index + 0.1 * torch.randn(6)
        return x, torch.tensor(index % 3)


def train(epochs: int, *, wrap: bool, steps: int | None = None, **options: Any) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(3)
    model: Any = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    own = loader = DataLoader(Augmented(), 8, shuffle=True, num_workers=2, **options)
    if wrap:
        model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="exact", budget=600, disable=OTHERS)
    for _ in range(epochs):
        for count, (x, y) in enumerate(loader):
            if count == steps:
                break
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    report = accel.explain(model) if wrap else None
    if wrap:
        accel.undo(model)
    if own._iterator is not None:  # left to the garbage collector, torch waits five seconds for each worker
        own._iterator._shutdown_workers()  # type: ignore[attr-defined]
    return {**model.state_dict(), "random": torch.get_rng_state()}, report


def row_of(report: Any) -> Any:
    return next(row for row in report.rows if row.name == "loader_workers")


@pytest.mark.parametrize(
    ("steps", "epochs"),
    [pytest.param(None, 60, id="to the end", marks=pytest.mark.slow), pytest.param(4, 8, id="left early")],
)
def test_the_weights_are_those_of_the_plain_loop(
    steps: int | None, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    begin = NextEpoch.begin
    monkeypatch.setattr(NextEpoch, "begin", lambda *args: begun.append(begin(*args)) or begun[-1])
    plain, _ = train(epochs, wrap=False, steps=steps)
    assert not begun
    continued, report = train(epochs, wrap=True, steps=steps)

    assert plain.keys() == continued.keys()
    assert all(torch.equal(plain[name], continued[name]) for name in plain)
    assert begun and all(begun)
    assert row_of(report).setting == "workers=2"
    assert not any("failed" in event.text for event in report.events)


def test_persistent_workers_are_left_alone() -> None:
    _, report = train(4, wrap=True, persistent_workers=True)

    assert row_of(report).status == "not applicable"
    assert "keeps its workers itself (persistent_workers=True)" in row_of(report).why


class NoLength(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0]


@pytest.mark.parametrize(
    ("options", "ranks", "why"),
    [
        ({"batch_size": 2}, 1, ""),
        ({"batch_size": 1, "sampler": [0] * 501}, 1, "an epoch has 501 batches"),
        ({"batch_sampler": NoLength()}, 1, "no length"),
        ({"batch_size": 2}, 2, "without a DistributedSampler"),
        ({"batch_size": 2, "in_order": False}, 1, "in_order=False"),
        ({"batch_size": None}, 1, "no batch sampler"),
    ],
)
def test_why_it_is_left_alone(options: dict[str, Any], ranks: int, why: str) -> None:
    model, strategy = Net(), LoaderWorkers()
    loader = DataLoader(Augmented(), num_workers=2, **options)
    run = Run(model, loader, [], Gate(model, []), Fetching(), world_size=ranks, cores=2)

    assert why in strategy.refusal(run) and bool(why) == bool(strategy.refusal(run))
    assert isinstance(strategy.trial_design(run), EpochDesign)
    assert strategy.settings(run) == [2]

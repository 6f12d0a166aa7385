"""What the loop changes between two epochs, in place or not, is in the batches of the next one, whoever makes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from accel.dataio.dataset import walk
from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.engine.processes import ProcessEngine
from accel.dataio.fetching.fetch import Fetch
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from tests.dataio.engines import proxied, wrapped

LENGTH = 300  # more entries than are compared one by one
OFFSET = [0]


class Table(Dataset[Tensor]):
    """Sample i is what all kinds of tables hold at i."""

    scale = 1

    def __init__(self) -> None:
        self.numbers = list(range(LENGTH))
        self.array = np.arange(LENGTH)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.numbers[index], int(self.array[index]), OFFSET[0], self.scale])


class Collate:
    def __init__(self) -> None:
        self.shift = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return default_collate(samples) + self.shift


def _offset(data: Table, collate: Collate) -> None:
    OFFSET[0] += 1


CHANGES: dict[str, Callable[[Table, Collate], Any]] = {
    "shuffled list": lambda data, collate: random.Random(1).shuffle(data.numbers),
    "array": lambda data, collate: np.random.default_rng(1).shuffle(data.array),
    "global": _offset,
}


def epochs(loader: Any, data: Table, collate: Collate, change: Callable[[Table, Collate], Any]) -> list[Tensor]:
    OFFSET[0], Table.scale = 0, 1
    seen = []
    for _ in range(3):
        seen.append(torch.cat(list(loader)))
        change(data, collate)
    return seen


def assert_as_plain(mode: str, change: Callable[[Table, Collate], Any]) -> None:
    data, collate = Table(), Collate()
    wanted = epochs(DataLoader(data, 64, collate_fn=collate), data, collate, change)
    data, collate = Table(), Collate()
    plain = DataLoader(data, 64, collate_fn=collate)
    with wrapped(plain, mode) as loader:
        for one, other in zip(epochs(loader, data, collate, change), wanted, strict=True):
            assert torch.equal(one, other)


def _see_little(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_SLOW_BYTES", "MOST_SLOW_ENTRIES", "_MOST_BYTES", "_MOST_ENTRIES"):
        monkeypatch.setattr(walk, name, 100)


@pytest.mark.parametrize("sees", ["all", "little"])
@pytest.mark.parametrize(
    ("mode", "change"), [("threads", "shuffled list"), ("fork", "array"), ("proxy", "array"), ("proxy", "global")]
)
def test_a_change_between_epochs(mode: str, change: str, sees: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is too much to compare."""
    if sees == "little":
        _see_little(monkeypatch)
    assert_as_plain(mode, CHANGES[change])


def test_workers_that_the_user_keeps_are_kept_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_little(monkeypatch)
    plain = DataLoader(Table(), 64, num_workers=1, persistent_workers=True)
    with ContinuousLoader(plain, mode="fork") as loader:
        workers = []
        for _ in range(3):
            list(loader)
            workers.append([process.pid for process in loader._core.worker_processes()])

    assert workers[0] == workers[1] == workers[2]


def test_another_collate_function() -> None:
    with proxied(DataLoader(Table(), 64)) as proxy:
        first = torch.cat(list(proxy))
        proxy.collate_fn = lambda samples: default_collate(samples) + 1
        assert torch.equal(torch.cat(list(proxy)), first + 1)


def test_an_attribute_of_the_users_own_ends_no_worker() -> None:
    with ContinuousLoader(DataLoader(Table(), 64), mode="fork", num_workers=1) as loader:
        batches = iter(loader)
        next(batches)
        (before,) = loader._core.worker_processes()
        loader.name = "training"  # type: ignore[attr-defined]
        assert len(list(batches)) == 4
        assert loader._core.worker_processes() == [before]


def test_workers_are_made_anew_once_in_an_epoch_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that take turns on trial keep their workers within an epoch."""
    _see_little(monkeypatch)
    plain = DataLoader(Table(), 20)
    engines = [ProcessEngine(plain, 1), ProcessEngine(plain, 2)]
    continuous, seen = PrefetchAcrossEpochs(plain, engines[0]), []
    for _ in range(2):
        continuous.take(iter(plain.batch_sampler))  # type: ignore[arg-type]
        for number in range(8):
            continuous.switch(engines[number % 2])
            continuous.fetch()
            seen.append(tuple(process.pid for process in continuous.engine.processes))  # type: ignore[attr-defined]
    for engine in engines:
        engine.close()

    assert len(set(seen)) == 4


class Curriculum(Table):
    level = 0

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + self.level


# All the time: a mode that was asked for makes batches ahead all the same.
@pytest.mark.parametrize("often", [False, True], ids=["once", "often"])
@pytest.mark.parametrize("mode", ["threads", "fork", "proxy", "auto"])
def test_a_change_within_an_epoch(mode: Any, often: bool) -> None:
    def seen(loader: Any, data: Curriculum) -> list[Tensor]:
        Table.scale, found = 1, []
        for _ in range(3):
            for number, batch in enumerate(loader):
                found.append(batch.clone())
                if number == 4 or (often and mode in ("proxy", "auto")):
                    data.level += 1
        return found

    data = Curriculum()
    wanted = seen(DataLoader(data, 20), data)
    data = Curriculum()
    plain = DataLoader(data, 20)
    strict = proxied(plain, PrefetchAcrossEpochs(plain, ProcessEngine(plain, 2), strict=True))
    with strict if mode == "proxy" else wrapped(plain, mode) as loader:
        made = seen(loader, data)

    assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))


def test_a_collate_function_of_a_trainer_is_watched_where_its_code_looks() -> None:
    """Of what else the trainer keeps much changes in each step."""

    class Trainer:
        def __init__(self) -> None:
            self.step, self.pad = 0, 0

        def collate(self, samples: list[Tensor]) -> Tensor:
            return default_collate(samples) + self.pad

    trainer = Trainer()
    check = DatasetWatch(Fetch(Table(), trainer.collate, batched=True))
    trainer.step += 1
    assert not check.changed()
    trainer.pad = 2
    assert check.changed()

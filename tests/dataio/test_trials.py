"""A setting that nobody asked for costs nothing when it fails: it is left, and that very batch made in the loop."""

from __future__ import annotations

import sqlite3
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes import engines as way
from accel.dataio.passes import tuner
from tests.dataio.numbers import Numbers, indices


@pytest.fixture(autouse=True)
def everything_is_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_NEGLIGIBLE": -1.0, "_BLOCK_S": 0.0, "_FIRST_S": 0.0}.items():
        monkeypatch.setattr(tuner, name, value)


def told_after(loader: ContinuousLoader, data: Numbers, epochs: int = 12) -> str:
    """Return what the loader tells after some epochs, each of which must yield every sample in order."""
    for _ in range(epochs):
        assert [index for batch in loader for index in indices(batch)] == list(range(len(data)))
    return loader.explain()


class OfItsThread(Numbers):
    """Has a database connection that no other thread may use, which it says threads may."""

    thread_safe = True

    def __init__(self) -> None:
        super().__init__()
        self.owner = threading.get_ident()

    def __getitem__(self, index: int) -> Tensor:
        if threading.get_ident() != self.owner:
            raise sqlite3.ProgrammingError("SQLite objects created in a thread can only be used in that same thread")
        return super().__getitem__(index)


def test_a_dataset_that_other_threads_may_not_use() -> None:
    data = OfItsThread()
    with ContinuousLoader(DataLoader(data, 4), num_workers=2) as loader:
        told = told_after(loader, data)

    assert "not used: ProgrammingError: SQLite objects created in a thread" in told


def test_batches_that_can_not_be_pickled() -> None:
    data = Numbers()
    with ContinuousLoader(DataLoader(data, 4, collate_fn=_with_code), num_workers=2, thread_safe=False) as loader:
        for _ in range(12):
            assert [index for batch, _ in loader for index in indices(batch)] == list(range(len(data)))
        told = loader.explain()

    assert loader.setting == "inline"
    assert "not used: InvalidType" in told


def _with_code(samples: list[Tensor]) -> Any:
    return default_collate(samples), lambda: 1


class Broken(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        if index == 13:
            raise LookupError("a bad picture")
        return super().__getitem__(index)


def test_the_datasets_own_error_is_nobody_elses_fault() -> None:
    with ContinuousLoader(DataLoader(Broken(), 4), num_workers=2) as loader:
        for _ in range(12):
            batches, seen = iter(loader), []
            for number in range(13):
                if number == 3:
                    with pytest.raises(LookupError, match="a bad picture"):
                        next(batches)
                else:
                    seen += indices(next(batches))
            assert seen == [*range(12), *range(16, 50)]
        assert "not used: LookupError" not in loader.explain()


class Locked(Numbers):
    """Holds a lock while it makes a sample, for a while."""

    thread_safe = True

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> Tensor:
        with self.lock:
            time.sleep(0.0005)
            return super().__getitem__(index)


def test_no_process_is_forked_while_its_own_threads_hold_a_lock() -> None:
    data = Locked()
    with ContinuousLoader(DataLoader(data, 4), num_workers=2) as loader:
        began = time.monotonic()
        told = told_after(loader, data)
        took = time.monotonic() - began

    assert "waits for a lock" not in told
    assert took < way._STALL_S + 20  # a stall was 30 s; the rest is slow machines


SCRIPT = """
import os, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset
from accel.dataio.passes import tuner
from accel.dataio.loader import ContinuousLoader

tuner._NEGLIGIBLE = -1.0
with open({runs!r}, "a") as file:
    file.write("run ")

class Data(Dataset):
    thread_safe = True
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor(index)

loader = ContinuousLoader(DataLoader(Data(), 4), workers=2)
for _ in range(40):
    assert torch.cat(list(loader)).tolist() == list(range(64))

class Hangs(Data):
    def __getitem__(self, index):
        if index == 9:
            time.sleep(3600)
        return super().__getitem__(index)

batches = iter(ContinuousLoader(DataLoader(Hangs(), 4, timeout=1, num_workers=1), mode="threads"))
for _ in range(2):
    next(batches)
"""


class Counting(Numbers):
    """Counts its fetches: a copy in another process would count some of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched = 0

    def __getitem__(self, index: int) -> Tensor:
        self.fetched += 1
        return super().__getitem__(index)


class Collating:
    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.batches += 1
        return torch.stack(samples)


@pytest.mark.parametrize("data", [Counting(), Numbers()])
def test_what_fetching_changes_is_not_copied_by_processes_that_nobody_asked_for(data: Any) -> None:
    collate = Collating()
    with ContinuousLoader(DataLoader(data, 4, collate_fn=collate), num_workers=2) as loader:
        told = told_after(loader, data)

    assert "each process would have a copy of its own" in told
    assert collate.batches == 12 * 13
    assert getattr(data, "fetched", 12 * 50) == 12 * 50

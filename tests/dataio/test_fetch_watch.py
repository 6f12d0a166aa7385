"""A fetch that leaves anything behind is seen to, wherever the dataset keeps it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accel.dataio.dataset import walk
from accel.dataio.dataset.fetch_watch import FetchWatch
from accel.dataio.fetching.fetch import fetch_of

CALLS = [0]


def _count_globally(data: Any) -> None:
    CALLS[0] += 1


class Data(Dataset[Any]):
    def __init__(self, leave: Callable[[Any], Any]) -> None:
        self.leave = leave
        self.array = np.zeros(64)
        self.large = np.zeros(walk.MOST_SLOW_BYTES // 32)

    def __getitem__(self, index: int) -> int:
        self.leave(self)
        return index


# Of the kinds of changes that a `DatasetWatch` sees, see test_watch.py.
LEAVES: dict[str, Callable[[Any], Any]] = {
    "array": lambda data: data.array.__setitem__(3, data.array[3] + 1),
    "large array": lambda data: data.large.__setitem__(-1, data.large[-1] + 1),
    "attribute": lambda data: setattr(data, "calls", 1),
    "global list": _count_globally,
}


@pytest.mark.parametrize("where", LEAVES)
def test_what_a_fetch_changes(where: str) -> None:
    data = Data(LEAVES[where])
    watch = FetchWatch(data)
    watch.before()
    data[0]
    watch.after()

    assert watch.finding == "fetching a sample changes the dataset"


def test_a_fetch_that_leaves_nothing() -> None:
    data = Data(lambda data: None)
    watch = FetchWatch(data)
    for index in range(5):
        watch.before()
        data[index]
        watch.after()
        data.array += 1  # the loop's own affair

    assert watch.finding == ""


class Answers(Data):
    """Answers to every name, or to none: what is asked of a dataset must bear it."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.__dict__["answer"] = answer
        super().__init__(lambda data: None)

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["answer"](name)

    @property
    def epoch(self) -> int:
        raise RuntimeError("ask later")

    def __len__(self) -> int:
        return 12


def _refuse(name: str) -> Any:
    raise KeyError(name)


@pytest.mark.parametrize("mode", ["auto", "inline", "threads", "fork"])
@pytest.mark.parametrize("answer", [lambda name: None, _refuse, lambda name: name], ids=["none", "refuses", "anything"])
def test_datasets_that_answer_in_their_own_way(mode: Any, answer: Any) -> None:
    from torch.utils.data import DataLoader

    from accel.dataio.loader import ContinuousLoader

    data = Answers(answer)
    if answer("x") != "x" if answer is not _refuse else True:
        data.__dict__["__getitems__"] = None  # torch itself asks for that one
        with ContinuousLoader(DataLoader(data, 4), mode=mode, num_workers=1) as loader:
            for _ in range(3):
                assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


class Masks:
    """A collate function with a generator of its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __call__(self, samples: list[int]) -> Any:
        return torch.tensor(samples), self.random.random(len(samples))


def test_what_a_collate_function_keeps_is_watched_too() -> None:
    loader = DataLoader(list(range(12)), 4, collate_fn=Masks())
    watch = FetchWatch(fetch_of(loader))
    batches = iter(loader)
    watch.around(lambda: next(batches))

    assert watch.finding == "making a batch changes what the collate function keeps"


def test_a_dataset_that_changes_is_seen_behind_an_array_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays after one that was too large were not looked at any more, and such a dataset was moved."""
    monkeypatch.setattr(walk, "MOST_SLOW_BYTES", 4096)
    monkeypatch.setattr(walk, "MOST_SLOW_ENTRIES", 1000)

    class Counts(Data):
        def __init__(self, leave: Callable[[Any], Any]) -> None:
            self.data = np.zeros(8192)
            self.seen = np.zeros(4)
            self.lists = [[0] for _ in range(walk.MOST_SLOW_ENTRIES + 1)]
            self.known = [0] * 300
            self.leave = leave

    for leave in (_write_seen, _write_known):
        data = Counts(leave)
        watch = FetchWatch(data)
        watch.around(partial(data.__getitem__, 0))
        assert watch.finding == "fetching a sample changes the dataset"


def _write_seen(data: Any) -> None:
    data.seen[0] += 1


def _write_known(data: Any) -> None:
    data.known[299] += 1

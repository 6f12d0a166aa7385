"""Threads may share a dataset only if all it holds is known to be harmless."""

from __future__ import annotations

import functools
import io
import random
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from accel.dataio.dataset.thread_safety import unsafe


class Holds(Dataset[Any]):
    def __init__(self, *things: Any) -> None:
        self.things = things

    def __len__(self) -> int:
        return 1

    def first(self) -> Any:
        return self.things[0]


def with_closure(thing: Any) -> Callable[[], Any]:
    return lambda: thing


HARMLESS = {
    "tensor": torch.ones(3),
    "array": np.ones(3),
    "paths": [Path("a")] * 1000,
    "module": nn.Sequential(nn.Linear(2, 2), nn.Dropout()),
    "function": with_closure([1, 2]),
    "partial": functools.partial(with_closure, {"a": 1}),
    "class": dict,
    "subset": Subset(ConcatDataset([TensorDataset(torch.ones(3))]), [0, 1]),
    "range": range(10),
}
HARMFUL = {
    "file": io.BytesIO(b"abc"),
    "generator": torch.Generator(),
    "random": random.Random(1),
    "numpy_generator": np.random.default_rng(1),
    "iterator": iter([1]),
    "database": sqlite3.connect(":memory:"),
    "objects": np.array([object()]),
    "lock": threading.Lock(),
    "in_closure": with_closure(io.BytesIO()),
    "in_partial": functools.partial(with_closure, io.BytesIO()),
    "in_method": Holds(io.BytesIO()).first,
    "in_dict": {"a": [{"b": iter([1])}]},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_read_by_indexing_alone(name: str) -> None:
    assert unsafe(Holds(HARMLESS[name])) == ""


@pytest.mark.parametrize("name", HARMFUL)
def test_what_has_a_state_of_its_own(name: str) -> None:
    assert ("thing of" if name == "in_closure" else "the dataset.things[0]") in unsafe(Holds(HARMFUL[name]))


def test_a_class_written_in_c_may_hide_anything() -> None:
    class Sneaky(io.BytesIO):
        pass

    assert "is a Sneaky, which is not known to be safe to share between threads" in unsafe(Holds(Sneaky()))


def test_a_dataset_may_say_so_itself() -> None:
    data = Holds(io.BytesIO())
    data.thread_safe = True  # type: ignore[attr-defined]
    assert unsafe(data) == ""
    data.thread_safe = False  # type: ignore[attr-defined]
    assert "the dataset declares" in unsafe(data)


SHARED = random.Random(1)


class NamesAGlobal(Holds):
    def __getitem__(self, index: int) -> Any:
        return SHARED.random()


def test_what_its_code_names_counts() -> None:
    assert "the global SHARED is a Random" in unsafe(NamesAGlobal())


def test_circles() -> None:
    data = Holds([])
    data.things[0].append(data)
    assert unsafe(data) == ""

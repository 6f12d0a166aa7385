"""What a checkpoint may hold: whatever passes is loaded by weights_only=True, the rest is refused with its place."""

from __future__ import annotations

import io
import math
import re
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel.elastic.saving.plain_values import check_plain
from accel.errors import InvalidArgument

ATOMS = st.none() | st.booleans() | st.integers(-(2**2032) + 1, 2**2032 - 1) | st.floats() | st.text()
KEYS = st.text() | st.integers(-(2**70), 2**70)
PLAIN = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.lists(inner).map(tuple),
    max_leaves=8,
)


def through_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


@given(PLAIN)
def test_what_passes_is_loaded_as_it_was(value: Any) -> None:
    check_plain(value)
    assert same(through_torch(value), value)


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.note = "kept"  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor(3),
        torch.empty(0),
        torch.arange(6).reshape(2, 3).T,
        nn.Parameter(torch.ones(2)),
        with_attribute(),
        nn.BatchNorm1d(2).state_dict(),
        Counter([1, 1, 2]),
        OrderedDict(a=1),
        torch.Size([2, 3]),
        [math.inf, -0.0, "\ud800", 2**2032 - 1],
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_and_the_fields_own_dicts_pass(value: Any) -> None:
    check_plain(value)
    assert same(through_torch(value), value)


class Number(int):
    pass


def hostile() -> OrderedDict[str, int]:
    state: Any = OrderedDict(a=1)
    state.extra = print
    return state


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": {1, 2}}, "got a set at state['a']"),
        ({"a": [0, b"x"]}, "got a bytes at state['a'][1]"),
        ({"a": (1j,)}, "got a complex at state['a'][0]"),
        ({"lr": np.float64(0.1)}, "got a numpy.float64 at state['lr']"),
        ({"step": np.int64(1)}, "got a numpy.int64 at state['step']"),
        ({"x": np.ones(2)}, "got a numpy.ndarray at state['x']"),
        ({"x": Number(3)}, "at state['x']"),
        ({"x": print}, "got a builtin_function_or_method at state['x']"),
        ({(1, 2): 3}, "got a tuple at a key of state"),
        ({"x": {1.5: 3}}, "got a float at a key of state['x']"),
        ({"x": torch.float32}, "got a torch.dtype at state['x']"),
        ({"x": 2**2032}, "at most 2032 bits, got 2033 at state['x']"),
        ({"x": torch.ones(2, device="meta")}, "must have values, got one on the meta device at state['x']"),
        ({"x": hostile()}, "got a builtin_function_or_method at state['x'].extra"),
        (nn.Linear(1, 1), "got a torch.nn.modules.linear.Linear at state"),
    ],
)
def test_other_values_are_refused_with_their_place(value: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(text)):
        check_plain(value)


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidArgument, match=r"not be nested deeper than 100 levels.*contains itself"):
        check_plain(loop)


def test_the_deepest_that_passes_is_loaded() -> None:
    value: list[Any] = []
    for _ in range(99):
        value = [value]
    check_plain(value)
    assert through_torch(value) == value

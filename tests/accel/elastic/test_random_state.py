"""Random states as plain values: every stream goes on with the same draws."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.elastic.saving.plain_values import check_plain
from accel.elastic.saving.random_state import (
    numpy_from_plain,
    numpy_to_plain,
    python_from_plain,
    python_to_plain,
    random_state,
    set_random_state,
)
from accel.errors import InvalidArgument


def loaded(value: Any) -> Any:
    check_plain(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def draws() -> list[Any]:
    python = [random.random(), random.gauss(0, 1), random.getrandbits(100)]
    return [*python, np.random.rand(), np.random.randn(), torch.rand(3).tolist(), torch.randn(()).item()]


@given(st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_draws_go_on_bit_for_bit(seed: int, drawn: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(drawn):
        draws()
    random.gauss(0, 1)  # keeps its second number for the next call, as NumPy's does
    np.random.randn()
    state = loaded(random_state())
    expected = [draws() for _ in range(2)]
    set_random_state(state)
    assert [draws() for _ in range(2)] == expected


def test_python_and_numpy_states_are_the_same_after_a_round_trip() -> None:
    random.gauss(0, 1)
    state = random.getstate()
    assert python_from_plain(loaded(python_to_plain(state))) == state
    np.random.randn(3)
    theirs: Any = np.random.get_state(legacy=False)
    ours = numpy_from_plain(loaded(numpy_to_plain(theirs)))
    assert repr(ours) == repr(theirs)
    assert ours["state"]["key"].dtype == np.uint32


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_numpys_other_bit_generators(kind: Any) -> None:
    bits = kind(7)
    generator = np.random.Generator(bits)
    generator.random(3)
    state = loaded(numpy_to_plain(bits.state))
    expected = generator.random(5).tolist()
    bits.state = numpy_from_plain(state)
    assert generator.random(5).tolist() == expected


@pytest.mark.parametrize("part", ["python", "numpy", "torch", "cuda"])
def test_what_is_no_random_state_changes_nothing(part: str) -> None:
    state = random_state()
    wrong = copy.deepcopy(state)
    del wrong[part]
    random.random(), np.random.rand(), torch.rand(1)
    before = random_state()
    with pytest.raises(InvalidArgument, match="must be one that random_state"):
        set_random_state(wrong)
    assert repr(random_state()) == repr(before)
    wrong[part] = {"words": 3}
    if part != "cuda" or torch.cuda.is_available():
        with pytest.raises(InvalidArgument, match="got one that does not fit"):
            set_random_state(wrong)
        assert repr(random_state()) == repr(before)


class FakeCuda:
    """CUDA's random states, on devices that are numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, current: int) -> None:
        self.states = [torch.full((16,), number, dtype=torch.uint8) for number in range(count)]
        for name, value in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: current,
            "get_rng_state_all": lambda: list(self.states),
            "set_rng_state_all": self.set_all,
            "set_rng_state": lambda state: self.states.__setitem__(current, state),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def set_all(self, states: list[torch.Tensor]) -> None:
        self.states = list(states)


def test_cuda_devices_each_get_theirs_and_one_alone_that_of_the_current(monkeypatch: pytest.MonkeyPatch) -> None:
    four = FakeCuda(monkeypatch, 4, current=2)
    state = loaded(random_state())
    four.states = [torch.zeros(16, dtype=torch.uint8)] * 4
    set_random_state(state)
    assert [int(one[0]) for one in four.states] == [0, 1, 2, 3]
    one = FakeCuda(monkeypatch, 1, current=0)
    set_random_state(state)
    assert [int(each[0]) for each in one.states] == [2]


@pytest.mark.gpu
def test_draws_on_a_gpu_go_on() -> None:
    torch.rand(1, device="cuda")
    state = loaded(random_state())
    expected = torch.rand(5, device="cuda")
    set_random_state(state)
    assert torch.equal(torch.rand(5, device="cuda"), expected)

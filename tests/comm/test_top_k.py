"""The k largest magnitudes: those that a full sort finds, whatever the values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.comm.dgc import largest

# One element, less than a block, a block and its neighbours, several with a rest, and enough for samples.
SIZES = [1, 2, 63, 64, 65, 257, 1000, 16_384, 70_001]
SHARES = [1e-4, 1 / 300, 1 / 200, 0.02, 0.25, 0.9, 1.0]


def check(values: torch.Tensor, count: int) -> None:
    """Compare magnitudes found with those of a sort; positions must be different and lie inside."""
    before = values.clone()
    found = largest(values, count)
    assert torch.equal(values.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))
    assert found.dtype == torch.int64
    assert found.unique().numel() == found.numel()
    assert found.numel() == 0 or (found.min() >= 0 and found.max() < values.numel())
    magnitudes = values.abs()
    counted = ~(magnitudes < torch.finfo(values.dtype).tiny)
    assert found.numel() == min(count, int(counted.sum()))
    want = magnitudes[counted].sort(descending=True).values[: found.numel()]
    assert torch.equal(magnitudes[found].sort(descending=True).values.nan_to_num(), want.nan_to_num())
    assert torch.equal(magnitudes[found].isnan().sum(), want.isnan().sum())


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("size", SIZES)
def test_normal_values(size: int, share: float, dtype: torch.dtype) -> None:
    values = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    check(values, max(int(size * share), 1))


def patterns(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    random = torch.randn(size, generator=generator)
    rows = torch.zeros(size)
    rows[size // 3 : size // 3 + size // 10 + 1] = 1.0
    return {
        "zeros": torch.zeros(size),
        "equal": torch.full((size,), -2.5),
        "ties": (random * 2).round(),
        "few": torch.where(torch.rand(size, generator=generator) < 0.0005, random, 0.0),
        "in one place": rows * random,
        "outliers": torch.where(torch.rand(size, generator=generator) < 0.001, random * 1e30, random),
        "denormal": random * 1e-40,
        "some denormal": torch.where(random > 0, random * 1e-40, random),
        "ramp": torch.arange(size, dtype=torch.float32),
        "not finite": torch.where(random > 2, float("inf"), torch.where(random < -2, float("nan"), random)),
        "all nan": torch.full((size,), float("nan")),
        "nan among zeros": torch.where(torch.arange(size) == size // 2, float("nan"), 0.0),
        "one nan": torch.where(torch.arange(size) == size // 2, float("nan"), random),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("pattern", patterns(8))
@pytest.mark.parametrize("size", SIZES)
def test_awkward_values(size: int, pattern: str) -> None:
    values = patterns(size)[pattern]
    for share in SHARES:
        check(values, max(int(size * share), 1))


@given(
    st.lists(st.floats(width=32, allow_subnormal=True) | st.sampled_from([0.0, 1.0, -1.0]), min_size=1, max_size=300),
    st.integers(1, 320),
    st.integers(1, 40),
)
def test_any_values(values: list[float], count: int, repeats: int) -> None:
    check(torch.tensor(values * repeats, dtype=torch.float32), count)


@pytest.mark.parametrize(("size", "count"), [(0, 3), (5, 0)])
def test_nothing_of_nothing(size: int, count: int) -> None:
    assert largest(torch.ones(size), count).numel() == 0

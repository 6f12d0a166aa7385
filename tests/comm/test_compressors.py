"""What each compressor does to one rank's values, without a group."""

from __future__ import annotations

import pickle

import pytest
import torch

from accel.comm.compressor import Exact, Quantised
from accel.comm.half import Half
from accel.comm.int8 import Int8
from accel.comm.one_bit import OneBit

# Blocks that sizes below fill, half fill and don't reach.
KINDS = [Half(), Half(torch.float16), Int8(64), OneBit(64), Int8(1024), OneBit(8)]
# Nothing, one, part of a block, whole ones, more than one tile of 131,072 with a rest.
SIZES = [0, 1, 7, 8, 63, 64, 65, 1000, (1 << 17) + 100]


def both_ways(kind: Quantised, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    encoded = torch.full((kind.encoded_bytes(values.numel()),), 255, dtype=torch.uint8)
    lost = torch.full_like(values, float("nan"))
    kind.encode(values, encoded, lost)
    decoded = torch.full_like(values, float("nan"))
    kind.decode(encoded, decoded)
    return decoded, lost


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoded_and_lost_are_the_values(kind: Quantised, size: int, dtype: torch.dtype) -> None:
    values = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    before = values.clone()
    decoded, lost = both_ways(kind, values)
    assert torch.equal(values, before)
    # One rounding of the difference.
    assert ((decoded + lost - values).abs() <= 2 * torch.finfo(dtype).eps * (values.abs() + lost.abs())).all()
    total = values.clone()
    encoded = torch.empty(kind.encoded_bytes(size), dtype=torch.uint8)
    kind.encode(values, encoded, None)
    kind.decode(encoded, total, add=True)
    torch.testing.assert_close(total, values + decoded)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 64, 199])
def test_what_is_not_finite_stays_so_and_harms_its_block_alone(kind: Quantised, bad: float, place: int) -> None:
    values = torch.ones(200)
    values[place] = bad
    decoded, _ = both_ways(kind, values)
    assert not torch.isfinite(decoded[place])
    whole = max(kind.block, 1)
    outside = torch.arange(200) // whole != place // whole
    assert torch.isfinite(decoded[outside]).all()


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-38, 3e38, -65_000.0])
def test_ends_of_the_range_lose_nothing_to_the_scale(kind: Quantised, value: float) -> None:
    if kind.__class__ is Half and kind.dtype == torch.float16 and abs(value) > 65_504:  # type: ignore[attr-defined]
        pytest.skip("float16 ends at 65,504, as documented")
    values = torch.full((100,), value)
    decoded, lost = both_ways(kind, values)
    if isinstance(kind, OneBit) and value == 3e38:
        return  # the sum over a block overflows: the step is void
    assert torch.isfinite(decoded).all()
    torch.testing.assert_close(decoded + lost, values)


@pytest.mark.parametrize(("kind", "most"), [(Int8(), 1.004), (OneBit(), 4 / 28), (Half(), 2.0), (Exact(), 4.0)])
def test_bytes_per_element(kind: Int8, most: float) -> None:
    assert kind.bytes_per_element() <= most


@pytest.mark.parametrize("kind", [*KINDS, Exact()], ids=repr)
def test_compressors_pickle_and_tell_their_settings(kind: Quantised) -> None:
    assert repr(pickle.loads(pickle.dumps(kind))) == repr(kind)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Half(torch.float32), "dtype must be torch.float16 or torch.bfloat16, got torch.float32"),
        (lambda: Int8(4), "block must be from 8"),
        (lambda: OneBit(12), "multiple of 8"),
        (lambda: OneBit(0), "multiple of 8"),
        (lambda: OneBit(exact_below=-1), "exact_below must be a whole number ≥ 0, got -1"),
        (lambda: OneBit(start_step=1.5), "start_step must be a whole number ≥ 0, got 1.5"),
    ],
)
def test_bad_settings_are_refused(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("kind", [OneBit(8), Int8(8), Half()], ids=lambda kind: type(kind).__name__)
def test_negative_zeros_lose_nothing(kind: Quantised) -> None:
    values = torch.tensor([-0.0, 0.0, 1.0, -2.0] * 6)
    encoded, lost, decoded = torch.empty(kind.encoded_bytes(24), dtype=torch.uint8), *torch.empty(2, 24)
    kind.encode(values, encoded, lost)
    kind.decode(encoded, decoded)
    torch.testing.assert_close(decoded + lost, values, rtol=0, atol=1e-6)

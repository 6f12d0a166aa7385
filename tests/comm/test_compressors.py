"""What each compressor does to one rank's values, without a group."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.comm.compressor import Compressor, Exact, Quantised
from accel.comm.dgc import DGC
from accel.comm.half import Half
from accel.comm.int8 import Int8
from accel.comm.one_bit import OneBit
from accel.comm.powersgd import PowerSGD

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


@pytest.mark.parametrize(("kind", "most"), [(Int8(), 1.004), (OneBit(), 4 / 28), (Half(), 2.0)])
def test_bytes_per_element(kind: Quantised, most: float) -> None:
    assert kind.encoded_bytes(1 << 20) / (1 << 20) <= most


@pytest.mark.parametrize(
    ("kind", "told", "fields"),
    [
        (Exact(), "Exact()", ()),
        (Half(), "Half(dtype=torch.bfloat16)", ()),
        (Int8(64), "Int8(block=64)", ()),
        (
            OneBit(64, momentum=True, start_step=3),
            "OneBit(block=64, exact_below=1024, momentum=True, start_step=3)",
            ("velocity",),
        ),
        (OneBit(), "OneBit(block=256, exact_below=1024, momentum=False, start_step=0)", ()),
        (
            DGC(0.01, max_grad_norm=2.0, warmup=(0.5,), warmup_steps=3),
            "DGC(exact_below=1024, masking=False, max_grad_norm=2.0, momentum=True, ratio=0.01, warmup=(0.5,), "
            "warmup_steps=3)",
            ("velocity",),
        ),
        (PowerSGD(2), "PowerSGD(alternate=False, min_compression=2.0, rank=2, seed=0, start_step=0)", ()),
        (
            PowerSGD({(4, 4): 1, (3, 3): 2}),
            "PowerSGD(alternate=False, min_compression=2.0, rank={(3, 3): 2, (4, 4): 1}, seed=0, start_step=0)",
            (),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Compressor) else "",
)
def test_compressors_pickle_and_tell_their_settings(kind: Compressor, told: str, fields: tuple[str, ...]) -> None:
    again = pickle.loads(pickle.dumps(kind))
    assert repr(again) == repr(kind) == told
    assert again.fields == kind.fields == fields


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Half(torch.float32), "dtype must be torch.float16 or torch.bfloat16, got torch.float32"),
        (lambda: Int8(4), "block must be from 8"),
        (lambda: OneBit(12), "multiple of 8"),
        (lambda: OneBit(0), "multiple of 8"),
        (lambda: OneBit(exact_below=-1), "exact_below must be a whole number ≥ 0, got -1"),
        (lambda: OneBit(start_step=1.5), "start_step must be a whole number ≥ 0, got 1.5"),
        (lambda: DGC(0), r"must be in \(0, 1\], got 0"),
        (lambda: DGC(1.5), "got 1.5"),
        (lambda: DGC(float("nan")), "got nan"),
        (lambda: DGC(warmup=(0.5, 2)), "got 2"),
        (lambda: DGC(max_grad_norm=0), "max_grad_norm must be positive, got 0"),
        (lambda: DGC(warmup_steps=-1), "got -1 and 1024"),
        (lambda: PowerSGD(0), "rank must be a whole number from 1, or by shape from 0, got 0; use Exact"),
        (lambda: PowerSGD(2.0), "got 2.0"),
        (lambda: PowerSGD(True), "got True"),
        (lambda: PowerSGD(torch.Size.numel), "or by shape from 0, got <method"),
        (lambda: PowerSGD({(3, 3): -1}), "got -1"),
        (lambda: PowerSGD(start_step=-1), "start_step must be a whole number of steps from 0, got -1"),
        (lambda: PowerSGD(min_compression=-0.5), "min_compression must be 0 or more, got -0.5"),
        (lambda: PowerSGD(min_compression=float("nan")), "got nan"),
        (lambda: PowerSGD(seed=-3), "seed must be a whole number from 0, got -3"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("kind", [OneBit(8), Int8(8), Half()], ids=lambda kind: type(kind).__name__)
def test_negative_zeros_lose_nothing(kind: Quantised) -> None:
    values = torch.tensor([-0.0, 0.0, 1.0, -2.0] * 6)
    encoded, lost, decoded = torch.empty(kind.encoded_bytes(24), dtype=torch.uint8), *torch.empty(2, 24)
    kind.encode(values, encoded, lost)
    kind.decode(encoded, decoded)
    torch.testing.assert_close(decoded + lost, values, rtol=0, atol=1e-6)

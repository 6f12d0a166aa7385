"""DGC: dense SGD at ratio 1, the published algorithm below it, what is remembered, and momentum handed over."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from accel.comm.compression.dgc_pack import Pack, ParameterRange
from accel.comm.dgc import DGC
from accel.comm.ranks.small_sums import TINY_BYTES
from tests.comm import dgc_cases
from tests.comm.few import few
from tests.comm.ranks import run_ranks


@pytest.mark.slow
def test_ratio_one_is_dense_sgd_with_momentum() -> None:
    for found in run_ranks(dgc_cases.as_dense, 4, per_host=2):
        assert len(found) == 8
        # float64: 6 steps of sums in another order.
        assert max(found.values()) < 1e-13, found


@few(dgc_cases.PUBLISHED, ("nesterov", "warm-up"))
def test_small_ratios_are_the_published_algorithm(names: tuple[str, ...]) -> None:
    for found in run_ranks(dgc_cases.as_published, 3, names):
        assert tuple(found) == names
        for name, one in found.items():
            assert one["error"] < 1e-13, name
            assert one["same"], name
            assert one["buckets"] >= 4


@few(dgc_cases.LAWS, ("rebuilt, views", "float16"))
def test_what_was_decoded_and_what_is_left_are_the_sum_of_velocities(names: tuple[str, ...]) -> None:
    # Halves round what is decoded, and their gradients differ more from each other.
    bounds = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}
    for found in run_ranks(dgc_cases.law, 4, names, per_host=2):
        assert tuple(found) == names
        for name, one in found.items():
            assert one["law"] < bounds.get(name, 1e-13), name
            # Four ranks, four steps, 1 % each, and one element more of each tensor or its slices.
            assert one["share"] < 0.25, name
            assert one["same"], name
            assert one["buckets"] >= 3, name


@few(dgc_cases.VOID, ("sparse, flat", "sparse, hosts"))
def test_a_void_step_arrives_and_leaves_velocity_and_residual_alone(names: tuple[str, ...]) -> None:
    for found in run_ranks(dgc_cases.void_step, 4, names, per_host=2):
        assert tuple(found) == names
        for what, one in found.items():
            assert one == {"arrived": True, "untouched": True, "recovers": True, "moved": True}, what


def test_accumulated_passes_are_one_step() -> None:
    for found in run_ranks(dgc_cases.no_sync, 3):
        assert found["error"] < 1e-13
        assert found["same"]


def test_momentum_is_applied_once_for_each_step() -> None:
    for found in run_ranks(dgc_cases.without_a_step, 2):
        assert found["finite"].startswith("ValueError: with its momentum taken over, the optimizer must make a step")
        assert found["finite"].endswith("accumulate gradients under ddp.no_sync()")
        assert found["void"]
        assert found["joined"] == 6


def test_momentum_goes_back_to_weights_as_they_lie_in_memory() -> None:
    for found in run_ranks(dgc_cases.laid_out, 2):
        assert found.keys() == {"conv.weight", "conv.bias", "turned"}
        assert max(found.values()) < 1e-15, found


def test_momentum_comes_and_goes_back() -> None:
    for found in run_ranks(dgc_cases.handed_over, 3):
        for one in found.values():
            assert one["error"] < 1e-13
            assert one["options"]
            assert one["left"] == 0
            assert one["gradient kept"]
            assert "was not handed over" in one["asks again"]


def test_bad_hand_overs_are_refused() -> None:
    for found in run_ranks(dgc_cases.refusals, 2):
        assert "take_momentum(state, optimizer) first, or use DGC(momentum=False)" in found["not taken"]
        assert found["adam"] == (
            "ValueError: the momentum of torch.optim.SGD alone can be taken over, got Adam; use DGC(momentum=False) "
            "with others"
        )
        assert "dampening=0.1" in found["dampening"]
        assert "fused=True" in found["fused"]
        assert "got one of shape (2, 3) that is not" in found["another model"]
        assert "has taken an optimizer's momentum already" in found["twice"]
        assert "takes no closure" in found["closure"]
        assert "must have a compressor with momentum" in found["without"]
        assert found["adam trains"] == "True"


# Without ranks


@pytest.mark.parametrize(
    ("step", "ratio"), [(1, 0.25), (10, 0.25), (11, 0.0625), (21, 0.015625), (31, 0.004), (41, 0.001), (9999, 0.001)]
)
def test_warm_up_goes_down_in_stages(step: int, ratio: float) -> None:
    assert DGC(0.001, warmup_steps=10).ratio_at(step) == ratio
    assert DGC(0.001).ratio_at(step) == 0.001
    assert DGC(0.05, warmup_steps=10).ratio_at(step) == max(ratio, 0.05)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ratio": 0}, r"must be in \(0, 1\], got 0"),
        ({"ratio": 1.5}, "got 1.5"),
        ({"ratio": float("nan")}, "got nan"),
        ({"warmup": (0.5, 2)}, "got 2"),
        ({"warmup_steps": -1}, "got -1 and 1024"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DGC(**settings)


def test_it_pickles_and_tells_its_settings() -> None:
    one = DGC(0.01, warmup_steps=3)
    again = pickle.loads(pickle.dumps(one))
    assert repr(again) == repr(one)
    assert repr(DGC(0.01)) != repr(one)
    assert again.fields == ("velocity",)
    assert DGC(momentum=False).fields == ()
    assert DGC().bytes_per_element() == 0.008


class Peers:
    """A channel to ranks whose packs are known."""

    rank, ranks = 0, (0, 1)
    size = 2

    def __init__(self, other: torch.Tensor) -> None:
        self.other = other
        self.reduced = 0

    def all_gather(self, own: torch.Tensor, out: list[torch.Tensor]) -> None:
        out[0].copy_(own)
        out[1].copy_(self.other)

    def all_reduce(self, values: torch.Tensor) -> None:
        self.reduced += 1
        values *= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dense", [0, 1, 7, TINY_BYTES])
def test_packs_add_up_by_position(dtype: torch.dtype, dense: int) -> None:
    parts = [
        ParameterRange("a", 0, 50, 3),
        ParameterRange("b", 50, 50 + dense, 0),
        ParameterRange("c", 50 + dense, 61 + dense, 2),
    ]
    values = torch.randn(61 + dense, dtype=dtype)
    packs = []
    for rank in (0, 1):
        pack = Pack.empty(values, parts, 2)
        filled = pack.put(0, torch.tensor([4, 49, 0][: 3 - rank]), values[:50], 0)  # rank 1 fills two entries of five
        if rank == 0:
            pack.put(filled, torch.tensor([10]), values[50 + dense :], 50 + dense)
        pack.used[0] = 1
        pack.put_dense(values, parts)
        packs.append(pack)
    want = torch.zeros_like(values)
    want[[4, 49]] = 2 * values[[4, 49]]
    want[0], want[-1] = values[0], values[-1]
    want[50 : 50 + dense] = 2 * values[50 : 50 + dense]
    peers = Peers(packs[1].raw)
    assert packs[0].raw.shape == packs[1].raw.shape
    assert packs[0].gather(values, parts, peers).tolist() == [1, 0, 0]  # type: ignore[arg-type]
    assert torch.equal(values, want)
    assert peers.reduced == (dense == TINY_BYTES)

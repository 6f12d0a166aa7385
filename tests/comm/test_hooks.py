"""What hooks compute: sums, residuals, void steps, DDP's options, resuming; on four ranks, as two hosts of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.comm import cases
from tests.comm.few import few
from tests.comm.ranks import run_ranks
from tests.conftest import Once

# Of one encoding of values and one of their sum: half a step of bfloat16 and of float16, half of 1/127 of the largest.
# A 1-bit step keeps the direction at best; error feedback makes up for it.
FIRST_ERROR = {"exact": 1e-6, "fp16": 2**-10, "bf16": 2**-7, "int8": 2 / 127, "1-bit": 1.2, "1-bit twice": 1.4}
FIRST_ERROR |= dict.fromkeys(("PowerSGD", "ACP-SGD", "DGC"), 1.0)


# Three kinds by default; `make slow` runs the others.
FEW = ("int8", "1-bit twice", "PowerSGD")
OTHERS = ("exact", "fp16", "bf16", "1-bit", "ACP-SGD", "DGC")
FEEDBACK = few(cases.COMPRESSORS, ("1-bit twice", "PowerSGD"))


@pytest.fixture
def laws(once: Once, name: str) -> list[dict[Any, Any]]:
    names, which = (FEW, "few") if name in FEW else (OTHERS, "other")
    return once(f"laws of {which} hooks", lambda: run_ranks(cases.laws, 4, names, per_host=2))


def test_all_compressors_are_run() -> None:
    assert {*FEW, *OTHERS} == cases.COMPRESSORS.keys()


@pytest.mark.parametrize("hierarchical", [False, True], ids=["flat", "hosts"])
@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
class TestLaws:
    def test_four_buckets_and_more_are_the_same_bits_on_all_ranks(
        self, laws: list[dict[Any, Any]], name: str, hierarchical: bool
    ) -> None:
        for found in laws:
            for dtype in (torch.float32, torch.float64):
                assert found[name, hierarchical, dtype]["buckets"] >= 4
                assert found[name, hierarchical, dtype]["same"]

    def test_applied_and_residual_add_up_to_the_sum_of_gradients(
        self, laws: list[dict[Any, Any]], name: str, hierarchical: bool
    ) -> None:
        # Over three steps of twelve tensors, four ranks: roundings of the sums, in the dtype of the gradients. Without
        # a residual (exact) the law is that the sum is right.
        for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
            assert laws[0][name, hierarchical, dtype]["law"] < bound
        if name != "exact":
            assert laws[0][name, hierarchical, torch.float64]["residual"] > 1e-6

    def test_first_step_is_as_near_as_the_encoding_is_fine(
        self, laws: list[dict[Any, Any]], name: str, hierarchical: bool
    ) -> None:
        assert laws[0][name, hierarchical, torch.float64]["first error"] < FIRST_ERROR[name]


@FEEDBACK
def test_residual_of_a_parameter_waits_while_no_rank_uses_it(names: tuple[str, ...]) -> None:
    for found in run_ranks(cases.laws_unused, 4, names, per_host=2):
        assert len(found) == 2 * len(names)
        for (name, hierarchical), one in found.items():
            assert one["law"] < 1e-13, (name, hierarchical)
            kept = {"kept": True, "residual": name != "exact", "same": True}
            assert {key: one[key] for key in kept} == kept, (name, hierarchical)


@pytest.mark.slow
def test_signs_after_a_dense_start() -> None:
    for found in run_ranks(cases.dense_start, 4, per_host=2):
        for errors in found.values():
            assert max(errors[:2]) < 1e-13
            assert min(errors[2:]) > 0.01


@FEEDBACK
def test_a_void_step_arrives_and_leaves_the_residual_alone(names: tuple[str, ...]) -> None:
    for found in run_ranks(cases.void_step, 4, names, per_host=2):
        assert len(found) == 2 * len(names)
        for what, one in found.items():
            assert one == {"arrived": True, "untouched": True, "recovers": True}, what


@few(cases.MODES, ("static graph, views", "unused", "no_sync"))
def test_options_and_dtypes_of_ddp(names: tuple[str, ...]) -> None:
    bounds = {"float16": 2**-9, "bfloat16": 2**-6}
    for found in run_ranks(cases.modes, 4, names, per_host=2):
        assert len(found) == 2 * len(names)
        for what, one in found.items():
            half = 2**-7 if "Half" in what else 1e-6
            assert one["error"] < max(half, bounds.get(what.partition(",")[0], 0)), what
            assert one["same"], what


@few(cases.RESUMED, ("1-bit, hosts", "PowerSGD, hosts"))
def test_resuming_equals_not_stopping(names: tuple[str, ...]) -> None:
    for rank, found in enumerate(run_ranks(cases.resume, 4, names, per_host=2)):
        assert tuple(found) == names
        for what, one in found.items():
            assert one["same bits"], what
            assert one["pickled"], what
            assert one["residual"] > 0
            assert one["steps"] == 6
            if rank < 2:
                assert one["law on two"] < 1e-5, what


@pytest.mark.parametrize(
    ("world", "per_host"),
    [
        (6, [3]),
        pytest.param(6, [2], marks=pytest.mark.slow),
        pytest.param(12, [1, 2, 3, 4, 6, 12], marks=pytest.mark.slow),
        pytest.param(16, [1, 2, 4, 8, 16], marks=pytest.mark.slow),
    ],
)
def test_by_hosts_equals_flat_for_every_shape(world: int, per_host: list[int]) -> None:
    for found in run_ranks(cases.shapes_of_hosts, world, per_host):
        assert len(found) == 2 * len(per_host)
        for (count, name), one in found.items():
            assert one["hosts"] == world // count
            assert one["same"]
            assert one["error"] < (1e-6 if name == "exact" or count == world else 2 / 127)


def test_one_host_alone_loses_nothing() -> None:
    for found in run_ranks(cases.one_host, 2, per_host=2):
        assert len(found) == len(cases.COMPRESSORS)
        for name, one in found.items():
            assert one["error"] < 1e-14, name
            assert one["residual"] == 0, name


def test_a_state_that_is_bound_to_other_hosts_takes_its_residuals_along() -> None:
    for found in run_ranks(cases.rebound, 4, ("int8", "ACP-SGD"), per_host=2):
        for name, one in found.items():
            assert one["law"] < 1e-13, name
            assert one["residual"] > 0, name
            assert one["same"], name


def test_one_rank_alone_gets_its_own_gradients() -> None:
    (found,) = run_ranks(cases.shapes_of_hosts, 1, [1])
    assert [one["error"] for one in found.values()] == [0.0, 0.0]


def test_future_chains_and_a_dropped_state_ends_its_threads() -> None:
    for found in run_ranks(cases.chained, 2):
        assert found["error"] < 1e-5
        assert found["alive"]
        assert not any(found["alive"])


def test_a_state_is_made_when_every_rank_has_connected() -> None:
    """It may be closed at once: that cut off ranks that were still connecting."""
    found = run_ranks(cases.late_rank, 3)
    assert all(ready >= found[1][0] > 0 for _, ready in found)

"""Strategies of the model with several ranks: all switch together, weights stay equal, no fault leaves one waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config

from accel.dataio.passes.proxy import Fetching
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies.base import why_not
from accel.strategies.torch_compile import TorchCompile
from tests.accel import collective_cases as cases
from tests.comm.ranks import run_ranks
from tests.conftest import Once

COMPILES = pytest.mark.skipif(
    not hasattr(functorch_config, "force_non_lazy_backward_lowering"),
    reason="this torch can't compile a block's backward half ahead, so that sharded models aren't compiled",
)

SLOW = pytest.mark.slow
COMPILED: dict[str, Any] = {"torch_compile": "whole model"}
BLOCKS: dict[str, Any] = {"torch_compile": "blocks"}
PLANS: dict[str, tuple[dict[str, Any] | None, float]] = {
    "plain": (None, 0.0),
    # Captured and run as they are, graphs compute the same bits.
    "whole model": (COMPILED, 0.0),
    "blocks": (BLOCKS, 0.0),
    "channels_last": ({"channels_last": None}, 1e-4),
    "fused_optimizer": ({"fused_optimizer": "fused"}, 1e-4),
    # 40 steps on other roundings of 8 bits: a mistake of a factor in a gradient is off by more than ten times that.
    "autocast_bf16": ({"autocast_bf16": None}, 5e-2),
    "amp_o2": ({"amp_o2": None}, 5e-2),
}
Ranks = list[dict[str, Any]]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=0, atol=tolerance, msg=name)


def trained(found: Ranks) -> list[dict[str, torch.Tensor]]:
    """Return the parameters of each rank; running statistics are each rank's own."""
    return [{name: w for name, w in rank["weights"].items() if "running" not in name} for rank in found]


@pytest.fixture(params=[2, pytest.param(4, marks=SLOW)])
def under(request: pytest.FixtureRequest, once: Once) -> Callable[[str], Ranks]:
    """Return what the ranks found under a plan."""
    world = request.param

    def found(name: str) -> Ranks:
        which = [(plan, cases.plainly) for plan, _ in PLANS.values()]
        by_rank = once(f"collective, {world}", lambda: run_ranks(cases.many, world, which))
        return [rank[list(PLANS).index(name)] for rank in by_rank]

    return found


@pytest.mark.parametrize("name", [name for name in PLANS if name != "plain"])
def test_a_plan_is_on_on_all_ranks_and_their_weights_stay_equal(under: Callable[[str], Ranks], name: str) -> None:
    (plan, tolerance), found, plain = PLANS[name], under(name), under("plain")
    assert plan is not None
    for rank in found:
        assert rank["failed"] == ""
        assert rank["on"] == rank["still"] == list(plan)
    assert {status for status, _ in found[0]["rows"].values()} == {"kept"}
    for weights, expected in zip(trained(found), trained(plain), strict=True):
        assert_equal(weights, trained(found)[0])
        assert_equal(weights, expected, tolerance)


@pytest.fixture
def faults(once: Once) -> Callable[[str], Ranks]:
    """Return what two ranks found where something goes wrong, or is special, on one."""
    which: dict[str, tuple[Any, ...]] = {
        "accumulated": (COMPILED, cases.plainly, cases.wrapped, 2),
        "accumulated plainly": (None, cases.plainly, cases.wrapped, 2),
        "slow to compile": (COMPILED, cases.slowly),
        "no room": (COMPILED, cases.without_room),
        "another torch": ({}, cases.with_another_torch),
        "stages": ({}, cases.plainly, cases.as_stages),
        "sharded": ({"fused_optimizer": "foreach"}, cases.plainly, cases.sharded),
        "sharded plainly": (None, cases.plainly, cases.sharded),
        "spread": ({"fused_optimizer": "foreach", **COMPILED}, cases.plainly, cases.spread),
        "spread plainly": (None, cases.plainly, cases.spread),
        "sharded blocks": (BLOCKS, cases.with_aot, cases.sharded),
        "sharded blocks, accumulated": (BLOCKS, cases.with_aot, cases.sharded, 2),
        "sharded, accumulated plainly": (None, cases.plainly, cases.sharded, 2),
        "sharded, slow to compile": (BLOCKS, cases.slowly, cases.sharded),
        "sharded, no room": (BLOCKS, cases.without_room, cases.sharded),
        "sharded, failing": (BLOCKS, cases.failing_to_compile, cases.sharded),
        "sharded in bfloat16": ({"autocast_bf16": None}, cases.plainly, cases.sharded),
        "unfit for shards": ({"fused_optimizer": "fused"}, cases.plainly, cases.sharded),
    }

    def found(name: str) -> Ranks:
        by_rank = once("collective, faults", lambda: run_ranks(cases.many, 2, list(which.values())))
        return [rank[list(which).index(name)] for rank in by_rank]

    return found


def test_gradients_are_accumulated_without_an_exchange_as_in_the_plain_loop(faults: Callable[[str], Ranks]) -> None:
    for rank, plain in zip(faults("accumulated"), faults("accumulated plainly"), strict=True):
        assert rank["on"] == ["torch_compile"]
        assert_equal(rank["weights"], plain["weights"])


def test_a_rank_that_compiles_for_longer_is_waited_for(faults: Callable[[str], Ranks]) -> None:
    for rank in faults("slow to compile"):
        assert rank["failed"] == ""
        assert rank["still"] == ["torch_compile"]


def test_what_one_rank_has_no_room_for_is_on_on_none(faults: Callable[[str], Ranks]) -> None:
    found = faults("no room")
    assert [rank["on"] for rank in found] == [[], []]
    assert found[0]["rows"]["torch_compile"] == (
        "not tried",
        "the guard could compare nothing: there is no room to compare: no room",
    )


def test_ranks_with_other_versions_of_torch_train_plainly(faults: Callable[[str], Ranks]) -> None:
    for rank in faults("another torch"):
        assert rank["failed"].startswith("rank 1 has torch 2.13.1, and rank 0 torch 2.13.0; all must have the same")
        assert rank["ended"] == ""


def test_the_stages_of_a_pipeline_are_left_as_they_are(faults: Callable[[str], Ranks]) -> None:
    for rank in faults("stages"):
        assert rank["failed"].startswith("rank 1 has the model Sequential (")
        assert rank["failed"].endswith("so a pipeline's stages are left as they are")
        assert rank["ended"] == ""


def test_the_optimizer_of_a_sharded_model_takes_the_foreach_path(faults: Callable[[str], Ranks]) -> None:
    """torch 2.13 has no fused SGD for DTensors: the guard's replay of the update finds that out before a step does."""
    for rank, plain in zip(faults("sharded"), faults("sharded plainly"), strict=True):
        assert rank["still"] == ["fused_optimizer"]
        assert_equal(rank["weights"], plain["weights"], 1e-4)
    for rank in faults("unfit for shards"):
        assert rank["on"] == []
        assert rank["failed"] == rank["ended"] == ""


@pytest.mark.parametrize(
    ("name", "plainly", "tolerance"),
    [
        pytest.param("sharded blocks", "sharded plainly", 1e-5, marks=COMPILES),
        pytest.param("sharded blocks, accumulated", "sharded, accumulated plainly", 1e-5, marks=COMPILES),
        pytest.param("sharded, slow to compile", "sharded plainly", 0.0, marks=COMPILES),
        ("sharded in bfloat16", "sharded plainly", 5e-2),
    ],
)
def test_what_acts_on_a_sharded_model_is_compared_on_all_ranks_and_kept(
    faults: Callable[[str], Ranks], name: str, plainly: str, tolerance: float
) -> None:
    for rank, plain in zip(faults(name), faults(plainly), strict=True):
        assert rank["failed"] == rank["ended"] == ""
        assert len(rank["still"]) == 1
        assert_equal(rank["weights"], plain["weights"], tolerance)
    (row,) = faults(name)[0]["rows"].values()
    assert row[0] == "kept"


@COMPILES
@pytest.mark.parametrize(
    ("name", "why"), [("sharded, no room", "OutOfMemoryError: no room"), ("sharded, failing", "BackendCompilerFailed")]
)
def test_a_rank_whose_compiled_block_fails_stays_in_step_and_the_strategy_goes_everywhere(
    faults: Callable[[str], Ranks], name: str, why: str
) -> None:
    for rank, plain in zip(faults(name), faults("sharded plainly"), strict=True):
        assert rank["failed"] == rank["ended"] == ""
        assert rank["still"] == []
        assert_equal(rank["weights"], plain["weights"])
    status, said = faults(name)[0]["rows"]["torch_compile"]
    assert status == "not tried"
    assert said.startswith(f"the guard could compare nothing: it raised {why}")


@COMPILES
def test_a_sharded_model_is_saved_and_loaded_as_without_accel(tmp_path: Path) -> None:
    for rank in run_ranks(cases.checkpointed, 2, str(tmp_path)):
        assert rank["on"] == ["fused_optimizer", "torch_compile"], rank["rows"]
        assert rank["same keys"]
        assert_equal(rank["weights"], rank["loaded"], 1e-5)


def test_a_tensor_parallel_model_is_left_whole_and_says_so(faults: Callable[[str], Ranks]) -> None:
    for rank, plain in zip(faults("spread"), faults("spread plainly"), strict=True):
        assert rank["failed"] == rank["ended"] == ""
        assert_equal(rank["weights"], plain["weights"], 1e-4)
    why = "the model is sharded (FSDP, tensor parallel), which replays can't compare"
    assert faults("spread")[0]["rows"]["torch_compile"] == ("not applicable", why)


def test_a_model_on_several_devices_is_left_whole_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    run = Run(model, [], [], Gate(model, []), Fetching())
    assert why_not(TorchCompile(), run) == "the model is spread over cpu, meta, and is left whole"


def test_loaders_under_ranks_deal_each_its_shard_in_the_plain_order() -> None:
    plans: list[dict[str, Any] | None] = [None, {"loader_workers": "threads=1"}, {"sample_cache": None}]
    for plain, *fed in run_ranks(cases.fed_by_each, 2, plans):
        for plan, found in zip(plans[1:], fed, strict=True):
            assert found["failed"] == ""
            assert found["on"] == list(plan or ()), found["rows"]
            assert found["came"] == plain["came"]
            assert_equal(found["weights"], plain["weights"])


def test_where_a_rank_dies_as_it_compiles_the_others_get_the_error_of_the_plain_loop() -> None:
    found = run_ranks(cases.train, 2, COMPILED, cases.dying, meet=False)
    assert found[1] == 3
    assert "Connection" in found[0]["ended"]
    assert found[0]["seconds"] < 30


SEEDS = [1, 6, 15]
"""One of each kind but those that end a rank."""


@COMPILES
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed in SEEDS else SLOW) for seed in range(20)])
def test_whatever_befalls_a_rank_no_other_hangs_and_each_says_one_sentence(seed: int, once: Once) -> None:
    kind = cases.KINDS[seed % 4]
    if seed in SEEDS:
        of_all = once("collective, schedules", lambda: run_ranks(cases.schedules, 2, SEEDS, timeout_s=200))
        found = [rank[SEEDS.index(seed)] for rank in of_all]
    else:
        found = run_ranks(cases.schedule, 2, seed, meet=kind != "killed", timeout_s=120)
    left = [rank for rank in found if isinstance(rank, dict)]
    assert len(left) == 2 - (kind == "killed"), found
    for rank in left:
        assert rank["seconds"] < 30
        assert len(rank["told"]) < 2, rank["told"]
        assert rank["compiled"] or kind in ("killed", "stopped")
        assert all("\n" not in told for told in rank["told"])
        assert bool(rank["ended"]) == (kind == "killed"), rank["ended"]
    if kind != "killed":
        assert_equal(*trained(left))

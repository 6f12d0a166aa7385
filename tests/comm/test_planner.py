"""A plan that changes between steps: DDP's own bits while it is off, equal replicas, nothing lost, and off for good."""

from __future__ import annotations

from typing import Any

import pytest

from accel.comm.catalogue import CATALOGUE
from tests.comm import selector_cases as cases
from tests.comm.few import few
from tests.comm.ranks import run_ranks


def test_off_is_ddps_own_all_reduce_to_the_bit() -> None:
    for found in run_ranks(cases.off_is_ddps_own, 2):
        assert len(found) == 8
        assert all(found.values()), found


@pytest.mark.parametrize(("world", "ways"), [(2, 6), pytest.param(4, 13, marks=pytest.mark.slow)])
def test_each_way_is_the_hook_of_its_own_state(world: int, ways: int) -> None:
    for found in run_ranks(cases.every_way, world, per_host=max(world // 2, 1)):
        assert len(found) == ways
        assert all(one == {"as its own state": True, "same on all ranks": True} for one in found.values()), found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_after_each_change_replicas_are_equal_and_nothing_is_lost(world: int) -> None:
    for found in run_ranks(cases.back_and_forth, world, per_host=world // 2):
        assert found["same"]
        # Of some 14 to 18 steps in float32; half precision alone rounds what is never fed back.
        assert found["law"] < 2**-8
        assert found["residual"] > 0
        assert found["states"] == 1
        assert found["finite"]


@few(CATALOGUE, ("dgc 1%", "powersgd 4", "1-bit"))
def test_residuals_of_another_scheme_are_sent_or_wait_while_no_rank_uses_a_parameter(names: tuple[str, ...]) -> None:
    names = tuple(name for name in names if name not in ("exact", "half"))
    for by_hosts in (False, True):  # of one host: nothing is compressed
        for found in run_ranks(cases.follows, 2, names, by_hosts, per_host=2):
            for name, one in found.items():
                assert one.pop("law") < 1e-5, name  # of roundings of float32
                assert one == {"kept": True, "some": True, "same": True}, (name, by_hosts)


def test_complex_gradients_are_ddps_own() -> None:
    ranks = run_ranks(cases.complex_beside_real, 4, per_host=2)
    for found in ranks:
        assert found["error"] < 1e-6
        assert found["same"]
        assert found["kept"]  # residuals of real ones, by an infinity among the complex
    assert any(found["some"] for found in ranks)


def test_a_planner_is_saved_and_pickled() -> None:
    for found in run_ranks(cases.saved_and_moved, 2):
        assert found == {"pickled": True, "loaded": True, "steps": 4}


def test_the_hook_comes_off_and_goes_on_again() -> None:
    for found in run_ranks(cases.taken_off, 2):
        for name, one in found.items():
            assert one["same"], name
            assert one["law"] < 1e-3, name
            # A static graph is more than a new reducer knows: its hook stays, switched off.
            kept = name == "static"
            assert (one["off"], one["hooks"], one["steps seen"]) == (not kept, int(kept), 6 if kept else 2), name


def test_what_cannot_be_is_refused() -> None:
    found: list[dict[str, Any]] = run_ranks(cases.refusals, 3)
    for one in found:
        assert "must be a DistributedDataParallel module, got Given" in one["no ddp"]
        assert "must have no communication hook yet" in one["hooked"]
        assert "schemes must be of the catalogue (exact, half, int8" in one["unknown way"]
        assert "must be bound first" in one["closed"]
        assert "must be a CommState or an AutoComm, got NoneType" in one["no state"]
        assert one["watch"] == "ValueError: watch must be at least 1 step, got 0"
        assert "allow must be one of" in one["allow"]
    assert "must have all 3 ranks" in found[0]["part"]

"""States bound to DDP modules with a group, ignored parameters or flags of their own, and to groups that came anew."""

from __future__ import annotations

from pathlib import Path

from tests.comm import binding_cases as cases
from tests.comm.ranks import run_ranks


def test_gradients_and_momentum_go_over_ddps_own_group() -> None:
    for rank, found in enumerate(run_ranks(cases.group_of_ddp, 3)):
        if rank == 2:
            assert found == {}
            continue
        assert found["other group"] == (
            "ValueError: process_group must be of the ranks that DDP reduces over, [0, 1], got one of [0, 1, 2]; leave "
            "it out"
        )
        assert found["error"] < 1e-6  # a sum of two in float32
        assert found["momentum"] < 1e-15


def test_a_module_that_leaves_buckets_out_is_refused() -> None:
    reason = "DDP must call the hook for every bucket of a step, got skip_all_reduce_unused_params=True"
    for found in run_ranks(cases.refusals, 2):
        assert found == {
            "state": f"ValueError: {reason}; leave it out of the module, or CommState",
            "planner": f"ValueError: {reason}",
            "accel.optimize": reason,
        }


def test_parameters_that_ddp_ignores_may_differ_between_ranks() -> None:
    for found in run_ranks(cases.ignored, 2):
        assert found == {"module": "nothing raised", "wrapped": "nothing raised", "same": True}


def test_groups_that_come_anew_know_nothing_of_those_before(tmp_path: Path) -> None:
    """By the group's name, which comes again, a rank that had been in one before looked for the others elsewhere."""
    for found in run_ranks(cases.groups_anew, 2, str(tmp_path)):
        assert found == {"hooks": "nothing raised", "FSDP2": "nothing raised"}

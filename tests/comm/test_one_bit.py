"""Signs with the optimizer's momentum: dense SGD where all is sent, the law where it is not, and what is remembered."""

from __future__ import annotations

import pickle

import pytest

from accel.comm.one_bit import OneBit
from tests.comm import one_bit_cases as cases
from tests.comm.few import few
from tests.comm.ranks import run_ranks


@pytest.mark.slow
def test_dense_steps_are_those_of_sgd_with_momentum() -> None:
    for found in run_ranks(cases.as_dense, 4, per_host=2):
        assert len(found) == 6
        # float64: 6 steps of sums in another order.
        assert max(found.values()) < 1e-13, found


@few(cases.WAYS, ("hosts",))
def test_what_was_decoded_and_what_is_left_are_the_sum_of_velocities(names: tuple[str, ...]) -> None:
    for found in run_ranks(cases.law, 4, names, per_host=2):
        assert tuple(found) == names
        for way, one in found.items():
            # Magnitudes of blocks are float32, and so is what they lost of the sum.
            assert one["law"] < 1e-13, (way, one)
            assert one["coarse"] >= 2
            assert one["same"], way


@few(cases.WAYS, ("hosts",))
def test_a_void_step_arrives_and_leaves_velocity_and_residual_alone(names: tuple[str, ...]) -> None:
    for found in run_ranks(cases.void_step, 4, names, per_host=2):
        assert tuple(found) == names
        for way, one in found.items():
            assert one == {"arrived": True, "untouched": True, "recovers": True, "moved": True}, way


@pytest.mark.slow
def test_a_parameter_that_no_rank_used_stands_still() -> None:
    for found in run_ranks(cases.unused, 4, per_host=2):
        assert len(found) == 9
        for what, one in found.items():
            assert one == {"stood": True, "kept": True, "same": True, "went on": True}, what


@pytest.mark.slow
def test_resuming_equals_not_stopping() -> None:
    for found in run_ranks(cases.resume, 4, per_host=2):
        assert all(one["same bits"] for one in found.values()), found


@pytest.mark.slow
def test_memory_does_not_depend_on_the_loss_scale() -> None:
    # Scales are powers of 2: nothing rounds.
    assert max(run_ranks(cases.scaled, 4, per_host=2)) < 1e-15


def test_a_small_parameter_of_another_dtype_crosses_hosts() -> None:
    for found in run_ranks(cases.mixed, 4, per_host=2):
        assert found == {"layer.weight": True, "layer.bias": True, "gain": True}


def test_it_pickles_and_tells_its_settings() -> None:
    one = OneBit(64, momentum=True, start_step=3)
    again = pickle.loads(pickle.dumps(one))
    assert repr(again) == repr(one) == "OneBit(block=64, exact_below=1024, momentum=True, start_step=3)"
    assert again.fields == ("velocity",)
    assert OneBit().fields == ()

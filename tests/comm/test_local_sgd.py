"""Post-local SGD against DDP and against the algorithm as published, on two ranks and on two hosts of two."""

from __future__ import annotations

import pytest

from tests.comm import local_sgd_cases as cases
from tests.comm import local_sgd_parts_cases as parts
from tests.comm.ranks import run_ranks

# float64, a dozen steps of a small network: sums over ranks in another order.
ROUNDING = 1e-12
FLAT_FIRST = pytest.mark.parametrize(
    ("world", "per_host"),
    [pytest.param(2, 1, id="2 ranks"), pytest.param(4, 2, marks=pytest.mark.slow, id="2 hosts of 2")],
)


@FLAT_FIRST
def test_averaging_at_every_step_is_dense_sgd(world: int, per_host: int) -> None:
    for found in run_ranks(cases.as_dense, world, per_host, per_host=per_host):
        assert len(found) == 3
        for what, error in found.items():
            assert error < ROUNDING, what


@pytest.mark.parametrize(
    ("world", "per_host", "names"),
    [
        pytest.param(2, 1, tuple(cases.PUBLISHED), id="2 ranks"),
        pytest.param(4, 2, ("own momentum",), id="2 hosts of 2"),
        pytest.param(4, 2, tuple(cases.PUBLISHED), id="2 hosts of 2, all", marks=pytest.mark.slow),
    ],
)
def test_every_four_steps_is_the_published_algorithm(world: int, per_host: int, names: tuple[str, ...]) -> None:
    for found in run_ranks(cases.as_published, world, per_host, names, per_host=per_host):
        twice = [name for name in names if per_host > 1 and name in cases.BY_RANK]
        assert len(found) == len(names) + len(twice)
        for what, one in found.items():
            assert one["error"] < ROUNDING, what
            assert one["same"], what
            assert one["apart"], what
            assert one["hierarchical"] == (world == 4)


@pytest.mark.slow
def test_three_ranks_on_one_host_and_one_each() -> None:
    for per_host in (1, 3):
        for found in run_ranks(cases.as_published, 3, per_host, tuple(cases.PUBLISHED), per_host=per_host):
            assert all(one["error"] < ROUNDING and one["same"] for one in found.values())


def test_ranks_that_skip_different_steps_unseen_are_told() -> None:
    for rank, said in enumerate(run_ranks(cases.drift, 2)):
        mine, theirs = ((3, 3), (3, 4)) if rank == 0 else ((3, 4), (3, 3))
        assert said == (
            "ValueError: ranks must come to an averaging after as many steps and backward passes, got "
            f"{mine[0]} and {mine[1]} here and {theirs[0]} and {theirs[1]} on rank {1 - rank}; where a GradScaler "
            "skips steps of single ranks, train in bfloat16, or with accel.amp"
        )


@FLAT_FIRST
def test_resuming_equals_not_stopping(world: int, per_host: int) -> None:
    for found in run_ranks(cases.resume, world, per_host, per_host=per_host):
        assert len(found) == 1 + per_host
        assert all(found.values()), found


def test_closing_averages_and_gives_back_what_was_there() -> None:
    for rank, found in enumerate(run_ranks(cases.ends, 2)):
        for name in ("own", "state"):
            assert found[name] == {
                "phase": (True, False),
                "apart": True,
                "closed": True,
                "dense again": True,
                "steps": 3,
                "hooks": 0 if name == "own" else 1,
                "buffers": True,
                "left": 0,
            }
        assert found["error"] == ("KeyError: 'of the user'" if rank == 0 else "RuntimeError: of another user")


@pytest.mark.parametrize(
    ("world", "per_host", "names"),
    [
        # Moments, counts of steps that differ, and a state that has no mean.
        pytest.param(2, 1, ["momentum", "fused adam", "codes"], id="2 ranks"),
        pytest.param(3, 1, list(cases.CLOSED), marks=pytest.mark.slow, id="3 ranks"),
        pytest.param(4, 2, list(cases.CLOSED), marks=pytest.mark.slow, id="2 hosts of 2"),
    ],
)
def test_ranks_stay_the_same_under_ddp_alone_after_closing(world: int, per_host: int, names: list[str]) -> None:
    for found in run_ranks(cases.closes, world, per_host, names, per_host=per_host):
        assert list(found) == names
        for name, one in found.items():
            assert one == {"apart": True, "closed": True, "buffers": True, "trained on": True}, name


def test_closing_with_a_state_that_is_missing_or_unlike() -> None:
    for found in run_ranks(cases.closes_without_state, 2):
        assert found["none"] == ("nothing raised", True)
        said, _ = found["other"]
        assert said == (
            "ValueError: ranks must have the same optimizer state, got torch.float32 of shape (3,) and torch.float64 "
            "of shape (37, 12) as 'momentum_buffer' of 'first.weight'; make the optimizer alike on every rank, and "
            "load checkpoints on all or on none"
        )


@pytest.mark.parametrize(
    ("hosts", "per_host"),
    [pytest.param(2, 1, marks=pytest.mark.slow), (2, 2), pytest.param(2, 3, marks=pytest.mark.slow)],
)
def test_bytes_are_those_of_the_formula(hosts: int, per_host: int) -> None:
    world = hosts * per_host
    ranks = run_ranks(cases.traffic, world, per_host, per_host=per_host)

    def of_a_host(what: str, kind: str) -> list[float]:
        return [sum(one[what][kind] for one in ranks[h * per_host : (h + 1) * per_host]) for h in range(hosts)]

    for within, momentum, copies in (("host", False, 1), ("rank", True, 2)):
        for uplink in of_a_host(f"{within}, {momentum}, averaging", "between"):
            assert uplink == pytest.approx(copies * 2 * (hosts - 1) / hosts, rel=0.01)
        for uplink in of_a_host(f"{within}, {momentum}, dense", "between"):
            assert uplink == pytest.approx(2 * (world - 1) / world, rel=0.01)
        for uplink in of_a_host(f"{within}, {momentum}, local", "between"):
            assert uplink < 1e-3  # a barrier
        for inside in of_a_host(f"{within}, {momentum}, local", "within"):
            expected = 2 * (per_host - 1) if within == "host" else 0
            assert inside == pytest.approx(expected, rel=0.01, abs=1e-3)


REFUSED = {
    "start_step": "start_step must be at least 0, got -1",
    "every": "every must be at least 1 step, got 0",
    "within": 'within must be "host" or "rank", got \'node\'',
    "no DDP": "LocalSGD needs a DistributedDataParallel module, got Net; sharded weights differ",
    "no optimizer": "optimizer must be a torch.optim.Optimizer, got str",
    "dense": "dense must be a CommState, got str",
    "foreign": "parameters must all be of the DDP module, got one of shape () that is not",
    "missing": "must have all parameters that require gradients, got none of 'gain'",
    "settings differ": "all ranks must have the same every, got 2 on rank 0 and 3 on rank 1; pass the same to LocalSGD",
    "complex": "LocalSGD averages dense, real floating point, got torch.complex64 in 'phase'",
    "DGC": "DGC with momentum takes it from the optimizer, which local steps need",
    "signs": "OneBit with momentum takes it from the optimizer, which local steps need",
    "zero": "ZeroRedundancyOptimizer can't take local steps",
    "hooked": "must have no communication hook yet; pass its CommState as dense= instead",
    "version": "the state's version must be 1, got None",
    "state differs": "ranks must have the same parameters and optimizer state at an averaging, got others on rank",
}


def test_what_cannot_work_is_refused() -> None:
    for found in run_ranks(cases.refusals, 2):
        assert found.keys() == REFUSED.keys()
        for what, text in REFUSED.items():
            assert found[what].startswith("ValueError: "), (what, found[what])
            assert text in found[what], (what, found[what])


def test_master_weights_are_averaged_in_place_of_what_they_round_to() -> None:
    for found in run_ranks(parts.with_masters, 2):
        assert found.keys() == parts.WITH_MASTERS.keys()
        for name, one in found.items():
            assert one["count"] >= 5, name
            assert one["apart"], name
            # Sums of two in float32, of weights below 2.
            assert one["error"] < 2**-22, name
            assert one["rounded"], name
            # A step goes on from the mean: had the rounding been taken over, weights would move by 2⁻⁹ of their size.
            assert 0 < one["next step"] < 2e-4, name
            assert one["closed"], name
            assert one["trained on"], name


def test_master_weights_of_a_layer_that_one_rank_has_not_used() -> None:
    assert run_ranks(parts.unused_by_one, 2) == [(4, True)] * 2


def test_a_parameter_that_is_frozen_between_two_averagings_is_the_same_on_all_ranks() -> None:
    for found in run_ranks(parts.frozen_between, 2):
        assert found.keys() == parts.ENDS.keys()
        for how, one in found.items():
            assert one == {"apart": True, "same": True, "frozen": True}, how


def test_what_ddp_was_told_to_ignore_stays_each_ranks_own() -> None:
    for rank, found in enumerate(run_ranks(parts.ignored, 2)):
        assert found == {"own": True, "counted": 10 * rank + 2, "others": True, "momentum": True}


def test_a_decorated_model_with_a_loss_scale_takes_local_steps() -> None:
    for found in run_ranks(parts.loss_scale, 2):
        assert found["before"] == [512.0, 256.0]
        assert found["finite"] and found["same"]

"""Faults: every rank gets an error with rank and cause in time, no thread is left, nothing hangs."""

from __future__ import annotations

import pytest

from tests.comm import cases
from tests.comm.ranks import run_ranks
from tests.conftest import Once


@pytest.fixture(scope="module")
def refusals(once: Once) -> list[dict[str, str]]:
    return once("refusals of hooks", lambda: run_ranks(cases.refusals, 3))


@pytest.mark.parametrize(
    ("what", "start", "part"),
    [
        ("twice", "RuntimeError", "can only be called once"),
        ("closed", "ValueError", "must be bound first"),
        ("no state", "ValueError", "must be a CommState or an AutoComm, got NoneType"),
        ("another model", "ValueError", "pass the module that DDP wraps"),
        ("compressor", "ValueError", "compressor must be a Compressor, got 'int8'"),
        ("feedback", "ValueError", "error_feedback=True needs a compressor that uses it, got Exact()"),
        ("timeout", "ValueError", "timeout must be positive"),
        ("no parameters", "ValueError", "must have parameters, got none"),
        ("sparse", "ValueError", "gradients must be dense, got a sparse one of 'weight'"),
        ("complex", "ValueError", "must be real floating point, got torch.complex64 of 'weight'"),
        ("settings differ", "ValueError", "all ranks must have the same compressor, got Half("),
        ("models differ", "ValueError", "all ranks must have the same parameters' names, shapes and dtypes"),
        ("uneven", "ValueError", "as many ranks on each host, got 1 on host 0, 2 on host 1"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(refusals: list[dict[str, str]], what: str, start: str, part: str) -> None:
    for found in refusals:
        assert found[what].startswith(start), found[what]
        assert part in found[what]
        if start == "ValueError":
            assert "\n" not in found[what]


def test_rank_outside_of_the_group_is_refused(refusals: list[dict[str, str]]) -> None:
    assert refusals[0]["outside"] == "nothing raised"
    assert refusals[2]["outside"].startswith("ValueError: rank 2 is not in process_group")


def test_rank_that_makes_no_state_is_named(refusals: list[dict[str, str]]) -> None:
    for found in refusals[1:]:
        assert "waits for rank 0, which made no CommState within 1 s" in found["no show"]
        assert "waits for rank 0, which made no Planner within 1 s" in found["no planner"]


@pytest.mark.parametrize("hierarchical", [False, True], ids=["flat", "hosts"])
def test_rank_that_dies_is_named_on_all_others(hierarchical: bool) -> None:
    found = run_ranks(cases.dies, 4, hierarchical, per_host=2, meet=False)
    assert found.pop(1) == 3
    for one in found:
        assert one["said"].startswith("CommError: rank ")
        assert "because rank 1 has ended" in one["said"]
        assert one["again"] == one["said"]
        assert one["seconds"] < cases.WAIT.total_seconds()
        assert one["closing"] < cases.WAIT.total_seconds()


def test_rank_with_other_buckets_is_named_on_all_ranks() -> None:
    for rank, one in enumerate(run_ranks(cases.different_buckets, 3, meet=False)):
        assert one["said"].startswith(f"CommError: rank {rank} stopped at step 1, bucket 0")
        assert "all ranks must have the same buckets" in one["said"]
        assert one["seconds"] < cases.WAIT.total_seconds()


def test_rank_that_hangs_is_named_while_it_hangs() -> None:
    found = run_ranks(cases.hangs, 3, meet=False)
    for one in (found[0], found[2]):
        assert "because rank 1 has ended, hangs outside of communication, or is cut off: it gave" in one["said"]
    assert found[1]["said"].startswith("CommError")


def test_compressor_that_raises_on_one_rank_is_told_to_all() -> None:
    for rank, one in enumerate(run_ranks(cases.compressor_fails, 3, meet=False)):
        assert "no room for the codes" in one["said"]
        assert ("because rank 1 failed at" in one["said"]) == (rank != 1)
        assert one["seconds"] < cases.WAIT.total_seconds()

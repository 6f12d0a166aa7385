"""Two ranks under DistributedDataParallel: one plan, the same bits as the plain run, and no rank left waiting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.accel.loops import assert_same

ROOT = Path(__file__).parents[2]
RANKS = (0, 1)
TIMEOUT_S = 200


def train_on_two_ranks(scenario: str, folder: Path, cache: Path | None = None) -> list[dict[str, Any]]:
    """Run both ranks of a scenario and return what each saved; a rank that waits for ever fails the test.

    With `cache`, each rank has a cache folder of its own in it.
    """
    arguments = ["-m", "tests.accel.ddp_worker", scenario, str(folder)]
    variables = [
        {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "ACCEL_CACHE": "0" if cache is None else str(cache / str(rank))}
        for rank in RANKS
    ]
    ranks = [warm.Running(arguments, cwd=ROOT, environment=own) for own in variables]
    try:
        ended = [rank.wait(TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [done.stdout + done.stderr for done in ended]
    for done, output in zip(ended, outputs, strict=True):
        assert done.returncode == 0, output
    assert "accel: " not in outputs[1], "rank 0 alone prints"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in RANKS]


def assert_same_bits(found: list[dict[str, Any]]) -> None:
    """Each rank's weights, buffers, momentum and random state are the plain run's; weights agree across ranks."""
    for saved in found:
        assert saved["plain"]["steps"] == saved["accelerated"]["steps"]
        assert_same(saved["accelerated"]["state"], saved["plain"]["state"])
    one, other = (saved["accelerated"]["state"] for saved in found)
    weights = [name for name in one if name.endswith(("weight", "bias"))]
    assert len(weights) == 6
    assert_same({name: one[name] for name in weights}, {name: other[name] for name in weights})
    assert not torch.equal(one["random"], other["random"])  # they did draw different dropout


def rows(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(found[0]["accelerated"]["report"])["rows"]}


def assert_plan(found: list[dict[str, Any]], plan: dict[str, Any]) -> None:
    for saved in found:
        assert saved["accelerated"]["plan"] == plan
        assert saved["accelerated"]["active"] == plan
        assert saved["accelerated"]["on"] == bool(plan)


@pytest.mark.parametrize("scenario", [pytest.param("before the wrap", marks=pytest.mark.slow), "wrapped"])
def test_both_ranks_take_one_plan_and_keep_the_bits(tmp_path: Path, scenario: str) -> None:
    found = train_on_two_ranks(scenario, tmp_path)
    assert_plan(found, {"quick": None})
    assert_same_bits(found)
    reports = [json.loads(saved["accelerated"]["report"]) for saved in found]
    assert reports[0]["machine"]["world_size"] == 2
    assert reports[0]["state"] == "done"
    assert any("rank 0 decides and holds the report, this is rank 1" in unseen for unseen in reports[1]["unseen"])


def test_a_strategy_that_fails_on_one_rank_is_dropped_on_both(tmp_path: Path) -> None:
    found = train_on_two_ranks("fails on one rank", tmp_path)
    assert_plan(found, {"quick": None})
    assert_same_bits(found)
    assert rows(found)["fragile"]["status"] == "undone"
    assert "no such device on this rank" in rows(found)["fragile"]["why"]


def test_a_strategy_that_is_wrong_on_one_rank_is_dropped_on_both(tmp_path: Path) -> None:
    found = train_on_two_ranks("wrong on one rank", tmp_path)
    assert_plan(found, {})
    assert_same_bits(found)
    assert rows(found)["diverging"]["status"] == "undone"
    assert rows(found)["diverging"]["why"].startswith("wrong: ")


@pytest.mark.slow
def test_the_first_rank_remembers_for_all(tmp_path: Path) -> None:
    found = []
    for number in ("first", "second"):
        (tmp_path / number).mkdir()
        found.append(train_on_two_ranks("wrapped", tmp_path / number, tmp_path / "cache"))
        assert_plan(found[-1], {"quick": None})
        assert_same_bits(found[-1])
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["0"]
    report = json.loads(found[1][0]["accelerated"]["report"])
    assert report["remembered"].endswith("checked again: kept")
    assert found[1][0]["accelerated"]["steps"] < found[0][0]["accelerated"]["steps"]


@pytest.mark.slow
def test_ranks_with_batches_of_different_sizes_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """They must end each action at the same step, whatever each takes for an odd batch."""
    found = train_on_two_ranks("uneven batches", tmp_path)
    assert_plan(found, {"quick": None})
    assert_same_bits(found)

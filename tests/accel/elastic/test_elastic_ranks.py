"""Real ranks: SIGTERM on one stops all at one step, and others go on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from accel.elastic.saving.bucket_order import BucketOrder
from tests.accel.elastic import elastic_ranks
from tests.comm.ranks import run_ranks
from tests.process_group import KINDS as PARALLEL

JOINED = ["batch_size", "tail", "seed"]
KINDS = ["none", "stops", "evaluates", "join"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two ranks return from one function after the other, by name and rank."""
    folder = tmp_path_factory.mktemp("two")
    return told(
        {
            **{f"accumulated, {kind}": (elastic_ranks.accumulates_as_one_batch, kind) for kind in PARALLEL},
            "left out, the same": (elastic_ranks.one_rank_leaves_steps_out, True),
            "left out, another": (elastic_ranks.one_rank_leaves_steps_out, False),
            "buckets": (elastic_ranks.buckets_put_back,),
            "slow exchange": (elastic_ranks.optimized_accumulates,),
            "little memory, in a call": (elastic_ranks.one_rank_has_less_memory, False),
            "little memory, before": (elastic_ranks.one_rank_has_less_memory, True),
            "unlike": (elastic_ranks.one_rank_is_unlike, list(UNLIKE), folder / "unlike"),
            **{f"joined, {odd}": (elastic_ranks.one_rank_has_joined, odd, folder / odd) for odd in JOINED},
            "by a list": (elastic_ranks.dealt_by_a_list, folder / "list", 2),
            "by a list, resumed": (elastic_ranks.dealt_by_a_list, folder / "list", -1),
        }
    )


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The same of functions in which a rank waits for the other."""
    folder = tmp_path_factory.mktemp("waiting")
    return told(
        {
            "late 0": (elastic_ranks.late, folder / "late 0", 0),
            "late 1": (elastic_ranks.late, folder / "late 1", 1),
            "writes slowly": (elastic_ranks.rank_0_writes_slowly, folder / "slow"),
            "1 has left": (elastic_ranks.one_has_left, folder / "1 has left", 1),
            "0 has left": (elastic_ranks.one_has_left, folder / "0 has left", 0),
            **{kind: (elastic_ranks.odd, kind) for kind in KINDS},
        }
    )


def told(calls: dict[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    ranks = run_ranks(elastic_ranks.in_turn, 2, calls, timeout_s=240)
    return {name: [rank[name] for rank in ranks] for name in calls}


UNLIKE = {
    "batch_size": "batch_size 4 on rank 0 and 8 on rank 1",
    "an ElasticSampler": "batch_size 4 on rank 0 and 8 on rank 1",
    "a BatchSampler": "batch_size 4 on rank 0 and 8 on rank 1",
    "drop_last": "drop_last False on rank 0 and True on rank 1",
    "tail": "tail fill on rank 0 and drop on rank 1",
    "shuffle": "shuffle True on rank 0 and False on rank 1",
    "seed": "seed 0 on rank 0 and 1 on rank 1",
    "samples": "samples 24 on rank 0 and 48 on rank 1",
    "max_batch_size": "max_batch_size 64 on rank 0 and 32 on rank 1",
    "scaling_rule": "scaling_rule None on rank 0 and Linear on rank 1",
    "checkpoint": "checkpoint True on rank 0 and False on rank 1",
    "nothing": "",
}
"""By what rank 1 passes another value of, what all are told."""


def test_two_ranks_stop_together_and_three_go_on(tmp_path: Path) -> None:
    stopped = run_ranks(elastic_ranks.until_terminated, 2, tmp_path, timeout_s=120)
    assert stopped[0]["step"] == stopped[1]["step"] >= elastic_ranks.SIGNAL_AT
    assert stopped[0]["step"] < 499
    assert stopped[0]["draw"] != stopped[1]["draw"]
    resumed = run_ranks(elastic_ranks.resumed, 3, tmp_path, timeout_s=120)
    for rank in range(3):
        assert resumed[rank]["step"] == stopped[0]["step"]
        assert resumed[rank]["weights"] == stopped[0]["weights"]
    assert [rank["draw"] for rank in resumed[:2]] == [rank["draw"] for rank in stopped]
    assert [rank["notes"] for rank in resumed[:2]] == [[], []]
    assert resumed[2]["notes"] == [
        "rank 2 keeps its own random state: the checkpoint has those of 2 ranks, and none for it."
    ]
    assert resumed[2]["draw"] not in (resumed[0]["draw"], resumed[1]["draw"])


def test_a_growing_batch_on_two_ranks_and_then_on_three_has_each_sample_once_an_epoch(tmp_path: Path) -> None:
    first = run_ranks(elastic_ranks.optimized, 2, tmp_path, 60, timeout_s=120)
    second = run_ranks(elastic_ranks.optimized, 3, tmp_path, -1, timeout_s=120)

    for run in (first, second):
        assert all(rank["weights"] == run[0]["weights"] for rank in run)
        assert [rank["note"] for rank in run] == [""] * len(run)
        sizes = [{epoch: [len(step) for step in steps] for epoch, steps in rank["taken"].items()} for rank in run]
        for steps in zip(*(rank.get(0, []) for rank in sizes), strict=True):
            assert max(steps) - min(steps) <= 1  # all ranks change their batch at the same step
    assert max(len(step) for step in first[0]["taken"][0]) > 4
    # Learning rates refer to the batch that the training began with, not to one that follows the number of ranks.
    assert {rank["base"] for rank in (*first, *second)} == {8}
    for epoch in range(elastic_ranks.EPOCHS):
        seen = [index for rank in (*first, *second) for step in rank["taken"].get(epoch, []) for index in step]
        assert sorted(seen) == list(range(elastic_ranks.SAMPLES))


@pytest.mark.parametrize(("known", "why"), [("in a call", "they do not fit into memory"), ("before", "too much")])
def test_no_rank_takes_a_batch_that_one_of_them_has_no_memory_for(
    two: dict[str, list[Any]], known: str, why: str
) -> None:
    ranks = two[f"little memory, {known}"]
    assert [rank["note"] for rank in ranks] == ["", ""]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert [max(rank["taken"]) for rank in ranks] == [4, 4]
    assert f"samples are too many: {why}" in " ".join(ranks[0]["why"])


@pytest.mark.parametrize("kind", PARALLEL)
def test_accumulated_batches_are_exchanged_once_and_are_as_one(two: dict[str, list[Any]], kind: str) -> None:
    for rank in two[f"accumulated, {kind}"]:
        assert rank["weights"] == pytest.approx(rank["expected"], rel=1e-9)
        assert rank["exchanges"] == rank["plainly"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("kind", PARALLEL)
def test_steps_and_their_noise_are_counted_where_the_exchange_is_put_off(kind: str, micro_steps: int) -> None:
    """No decision is taken twice, and what is measured is the same on all ranks."""
    first, second = run_ranks(elastic_ranks.optimized_puts_off, 2, kind, micro_steps)
    assert (first["note"], second["note"]) == ("", "")
    assert first["weights"] == second["weights"]
    assert first["updates"] == first["counted"] == second["updates"]
    assert (first["by_loop"], first["base"]) == (micro_steps, 8 * micro_steps)
    assert sorted(first["taken"] + second["taken"]) == list(range(2400))
    assert first["measured"] > 10
    assert (first["measured"], first["estimate"]) == (second["measured"], second["estimate"])


@pytest.mark.parametrize("optimizer", ["the same", "another"])
def test_a_rank_that_leaves_a_step_out_by_itself_does_not_hold_up_the_others(
    two: dict[str, list[Any]], optimizer: str
) -> None:
    ranks = two[f"left out, {optimizer}"]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert all("backward pass that no batch" in rank["refusal"] for rank in ranks)


def test_where_the_exchange_takes_long_what_does_not_fit_is_accumulated(two: dict[str, list[Any]]) -> None:
    ranks = two["slow exchange"]
    assert [rank["note"] for rank in ranks] == ["", ""]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert sorted(ranks[0]["taken"] + ranks[1]["taken"]) == list(range(4000))
    assert max(rank["most"] for rank in ranks) == 8
    assert "accumulated over" in " ".join(ranks[0]["why"])
    assert ranks[0]["steps"] == ranks[1]["steps"] < 200  # 250 of 16 samples would be as many as fit at once


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_rank_that_is_late_once_does_not_end_checkpoints(waiting: dict[str, list[Any]], late_rank: int) -> None:
    for rank in waiting[f"late {late_rank}"]:
        assert rank["steps"] == elastic_ranks.LATE_STEPS
        (warned,) = rank["warned"]
        assert f"at step {elastic_ranks.PAUSE_AT + 1} rank " in warned
        assert warned.endswith("no checkpoint is saved until it has come")
        (said,) = rank["said"]
        assert said.startswith("all ranks have come: checkpoints are saved again from step")
        assert rank["saved"] == elastic_ranks.ASK_AT + 1


def test_no_rank_ends_before_rank_0_has_written(waiting: dict[str, list[Any]]) -> None:
    """An agent ends all ranks of a job soon after the first of them."""
    ranks = waiting["writes slowly"]
    assert len(ranks[0]["written"]) == 1 and not ranks[1]["written"]
    assert min(rank["ended"] for rank in ranks) >= ranks[0]["written"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_part_hold_up_no_loop_whose_batch_may_grow(waiting: dict[str, list[Any]], kind: str) -> None:
    """A rank that stops for long, one that evaluates alone, and one that ends its epoch earlier under `join()`."""
    ranks = waiting[kind]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert {rank["batch"] for rank in ranks} <= {4, *range(5, 33)}
    assert ranks[0]["batch"] == ranks[1]["batch"]
    pause_s = 0.0 if kind in ("none", "join") else elastic_ranks.PAUSE_S  # that the exchange of gradients waits for
    assert max(rank["longest"] for rank in ranks) < pause_s + 3.0
    told = [sentence for rank in ranks for sentence in rank["told"]]
    if kind == "none":
        assert told == [] and ranks[0]["batch"] > 4
        assert [rank["note"] for rank in ranks] == ["", ""]
    else:
        assert len(told) <= 4 and all(len(sentence) < 400 for sentence in told)
    if kind != "join":
        for epoch in range(2):
            seen = [index for rank in ranks for at, step in rank["taken"] if at == epoch for index in step]
            assert sorted(seen) == list(range(8 * elastic_ranks.ODD_STEPS))


def test_ranks_that_would_deal_the_samples_in_different_ways_are_refused_alike(two: dict[str, list[Any]]) -> None:
    """They were taken: after a resume some samples came twice and others never, and learning rates drifted apart."""
    sentences, others = two["unlike"]
    assert sentences == others
    for sentence, what in zip(sentences, UNLIKE.values(), strict=True):
        start = f"loader and settings must be the same on all ranks, got {what}; "
        assert start in sentence if what else not sentence
    assert "ElasticSampler(..., batch_size=[one for each rank])" in sentences[0]


@pytest.mark.parametrize("odd", JOINED)
def test_a_process_that_joins_deals_as_the_others_do(two: dict[str, list[Any]], odd: str) -> None:
    """A script may divide its batch by the number of ranks, which was another one when the others began."""
    ranks = two[f"joined, {odd}"]
    assert [(rank["sizes"], rank["tail"]) for rank in ranks] == [((4, 4), "fill")] * 2
    assert sorted(ranks[0]["taken"] + ranks[1]["taken"]) == list(range(24))


def test_batches_of_a_size_for_each_rank_have_each_sample_once_after_a_resume(two: dict[str, list[Any]]) -> None:
    first, second = two["by a list"], two["by a list, resumed"]
    assert [[len(step) for step in rank] for rank in first] == [[4, 4], [8, 8]]
    assert sorted(index for rank in (*first, *second) for step in rank for index in step) == list(range(60))


def test_a_checkpoint_at_the_end_of_a_script_ends_no_rank_where_another_has_left(
    waiting: dict[str, list[Any]],
) -> None:
    """It raised on the rank that was left, at the end of a training that was good."""
    leading, _ = waiting["1 has left"]
    (line,) = leading
    assert line.startswith("no checkpoint was saved at step 4: rank 0 waits for rank 1")
    assert waiting["0 has left"] == [[], []]


# The layout of DDP's buckets in a resumed training: with three ranks the bits of a sum depend on it.


def test_three_ranks_lay_out_their_buckets_as_saved_and_nothing_else_changes() -> None:
    for rank in run_ranks(elastic_ranks.buckets_put_back, 3, timeout_s=120):
        *before, order = rank["before"]
        assert order == {"order": []}
        assert list(rank["after"]) == before
        assert rank["gradients"] == [12.0, None, None, None]
        assert rank["order"] == [2, 0, 3, 1]


def test_two_ranks_and_a_model_without_buckets_need_no_order(two: dict[str, list[Any]]) -> None:
    assert [rank["order"] for rank in two["buckets"]] == [[3, 2, 1, 0]] * 2
    order = BucketOrder(nn.Linear(2, 1))
    assert order.state_dict() == {"order": []}
    order.load_state_dict({"order": [1, 0]})

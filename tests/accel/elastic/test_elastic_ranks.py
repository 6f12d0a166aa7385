"""Real ranks: SIGTERM on one stops all at one step, and others go on from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accel.elastic import elastic_ranks
from tests.comm.ranks import run_ranks
from tests.process_group import KINDS


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


@pytest.mark.parametrize(
    ("is_asked", "why"), [(False, "they do not fit into memory"), (True, "too much")], ids=["in a call", "before"]
)
def test_no_rank_takes_a_batch_that_one_of_them_has_no_memory_for(is_asked: bool, why: str) -> None:
    ranks = run_ranks(elastic_ranks.one_rank_has_less_memory, 2, is_asked, timeout_s=120)
    assert [rank["note"] for rank in ranks] == ["", ""]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert [max(rank["taken"]) for rank in ranks] == [4, 4]
    assert f"samples are too many: {why}" in " ".join(ranks[0]["why"])


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_batches_are_exchanged_once_and_are_as_one(kind: str) -> None:
    for rank in run_ranks(elastic_ranks.accumulates_as_one_batch, 2, kind, timeout_s=120):
        assert rank["weights"] == pytest.approx(rank["expected"], rel=1e-9)
        assert rank["exchanges"] == rank["plainly"]


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_their_noise_are_counted_where_the_exchange_is_put_off(kind: str, micro_steps: int) -> None:
    """No decision is taken twice, and what is measured is the same on all ranks."""
    first, second = run_ranks(elastic_ranks.optimized_puts_off, 2, kind, micro_steps, timeout_s=120)
    assert (first["note"], second["note"]) == ("", "")
    assert first["weights"] == second["weights"]
    assert first["updates"] == first["counted"] == second["updates"]
    assert (first["by_loop"], first["base"]) == (micro_steps, 8 * micro_steps)
    assert sorted(first["taken"] + second["taken"]) == list(range(2400))
    assert first["measured"] > 10
    assert (first["measured"], first["estimate"]) == (second["measured"], second["estimate"])


@pytest.mark.parametrize("same", [True, False], ids=["the same optimizer", "another one"])
def test_a_rank_that_leaves_a_step_out_by_itself_does_not_hold_up_the_others(same: bool) -> None:
    ranks = run_ranks(elastic_ranks.one_rank_leaves_steps_out, 2, same, timeout_s=60)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert all("backward pass that no batch" in rank["refusal"] for rank in ranks)


def test_where_the_exchange_takes_long_what_does_not_fit_is_accumulated() -> None:
    ranks = run_ranks(elastic_ranks.optimized_accumulates, 2, timeout_s=120)
    assert [rank["note"] for rank in ranks] == ["", ""]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert sorted(ranks[0]["taken"] + ranks[1]["taken"]) == list(range(4000))
    assert max(rank["most"] for rank in ranks) == 8
    assert "accumulated over" in " ".join(ranks[0]["why"])
    assert ranks[0]["steps"] == ranks[1]["steps"] < 200  # 250 of 16 samples would be as many as fit at once


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_rank_that_is_late_once_does_not_end_checkpoints(tmp_path: Path, late_rank: int) -> None:
    for rank in run_ranks(elastic_ranks.late, 2, tmp_path, late_rank, timeout_s=120):
        assert rank["steps"] == elastic_ranks.LATE_STEPS
        (warned,) = rank["warned"]
        assert f"at step {elastic_ranks.PAUSE_AT + 1} rank " in warned
        assert warned.endswith("no checkpoint is saved until it has come")
        (said,) = rank["said"]
        assert said.startswith("all ranks have come: checkpoints are saved again from step")
        assert rank["saved"] == elastic_ranks.ASK_AT + 1


def test_no_rank_ends_before_rank_0_has_written(tmp_path: Path) -> None:
    """An agent ends all ranks of a job soon after the first of them."""
    ranks = run_ranks(elastic_ranks.rank_0_writes_slowly, 2, tmp_path, timeout_s=60)
    assert len(ranks[0]["written"]) == 1 and not ranks[1]["written"]
    assert min(rank["ended"] for rank in ranks) >= ranks[0]["written"][0]


@pytest.mark.parametrize("kind", ["none", "stops", "evaluates", "join"])
def test_ranks_that_part_hold_up_no_loop_whose_batch_may_grow(kind: str) -> None:
    """A rank that stops for long, one that evaluates alone, and one that ends its epoch earlier under `join()`."""
    ranks = run_ranks(elastic_ranks.odd, 2, kind, timeout_s=120)
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


def test_ranks_that_would_deal_the_samples_in_different_ways_are_refused_alike(tmp_path: Path) -> None:
    """They were taken: after a resume some samples came twice and others never, and learning rates drifted apart."""
    differing = {
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
    told = run_ranks(elastic_ranks.one_rank_is_unlike, 2, list(differing), tmp_path, timeout_s=120)
    assert told[0] == told[1]
    for sentence, what in zip(told[0], differing.values(), strict=True):
        assert (
            (f"loader and settings must be the same on all ranks, got {what}; " in sentence) if what else not sentence
        )
    assert "ElasticSampler(..., batch_size=[one for each rank])" in told[0][0]


@pytest.mark.parametrize("odd", ["batch_size", "tail", "seed"])
def test_a_process_that_joins_deals_as_the_others_do(tmp_path: Path, odd: str) -> None:
    """A script may divide its batch by the number of ranks, which was another one when the others began."""
    ranks = run_ranks(elastic_ranks.one_rank_has_joined, 2, odd, tmp_path, timeout_s=120)
    assert [(rank["sizes"], rank["tail"]) for rank in ranks] == [((4, 4), "fill")] * 2
    assert sorted(ranks[0]["taken"] + ranks[1]["taken"]) == list(range(24))


def test_batches_of_a_size_for_each_rank_have_each_sample_once_after_a_resume(tmp_path: Path) -> None:
    first = run_ranks(elastic_ranks.dealt_by_a_list, 2, tmp_path, 2, timeout_s=120)
    second = run_ranks(elastic_ranks.dealt_by_a_list, 2, tmp_path, -1, timeout_s=120)
    assert [[len(step) for step in rank] for rank in first] == [[4, 4], [8, 8]]
    assert sorted(index for rank in (*first, *second) for step in rank for index in step) == list(range(60))


def test_a_checkpoint_at_the_end_of_a_script_ends_no_rank_where_another_has_left(tmp_path: Path) -> None:
    """It raised on the rank that was left, at the end of a training that was good."""
    leading, _ = run_ranks(elastic_ranks.one_has_left, 2, tmp_path / "one", 1, timeout_s=120)
    (line,) = leading
    assert line.startswith("no checkpoint was saved at step 4: rank 0 waits for rank 1")
    assert run_ranks(elastic_ranks.one_has_left, 2, tmp_path / "other", 0, timeout_s=120) == [[], []]

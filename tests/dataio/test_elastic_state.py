"""What the elastic sampler saves, and what it refuses: states and arguments that would deliver a sample twice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from accel.dataio.elastic_sampler import ElasticSampler


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("length", [10, 10**9])
def test_state_is_small_and_json(length: int) -> None:
    sampler = ElasticSampler(length, batch_size=4, seed=2**63 - 1)
    next(sampler.consumed(sampler))
    assert len(json.dumps(sampler.state_dict())) < 150
    assert sampler.state_dict() == {
        "version": 1,
        "length": length,
        "seed": 2**63 - 1,
        "shuffle": True,
        "order": "feistel",
        "epoch": 0,
        "position": 4,
    }


def test_set_epoch_at_the_head_of_the_loop_keeps_a_loaded_position() -> None:
    sampler = ElasticSampler(10, batch_size=4)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "position": 8})
    sampler.set_epoch(3)
    assert (sampler.position, len(sampler)) == (8, 1)
    sampler.set_epoch(4)
    assert (sampler.position, len(sampler)) == (0, 3)


def test_a_loop_may_set_the_epoch_itself() -> None:
    sampler, other = (ElasticSampler(10, batch_size=4) for _ in range(2))
    sampler.epoch = 3
    other.set_epoch(3)
    assert sampler.state_dict() == other.state_dict()
    assert list(sampler.consumed(sampler)) == list(other.consumed(other))
    assert (sampler.epoch, sampler.position) == (4, 0)


def test_a_state_from_the_last_batch_goes_on_with_the_next_epoch() -> None:
    sampler = ElasticSampler(10, batch_size=4)
    sampler.set_epoch(0, 10)
    assert list(sampler.consumed(sampler)) == []
    assert (sampler.epoch, len(sampler)) == (1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 11}, "it has length 11, this sampler 10; make the sampler with the same length"),
        ({"seed": 1}, "it has seed 1, this sampler 0"),
        ({"order": "torch"}, "it has order 'torch', this sampler 'feistel'"),
        ({"shuffle": False}, "it has shuffle False, this sampler True"),
        ({"version": 2}, "a state must have version 1, got 2"),
        ({"position": 11}, "position must be from 0 to 10, got 11"),
        ({"epoch": -1}, "epoch must be a whole number, at least 0, got -1"),
    ],
)
def test_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    sampler = ElasticSampler(10, batch_size=4)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})


def test_state_of_batches_that_nobody_counted_is_refused() -> None:
    sampler = ElasticSampler(10, batch_size=4)
    next(iter(DataLoader(Numbers(10), batch_sampler=sampler)))
    with pytest.raises(RuntimeError, match=r"got 1 dealt and none counted; iterate over sampler\.consumed"):
        sampler.state_dict()
    sampler.advance()
    assert sampler.state_dict()["position"] == 4


def test_batch_of_another_sampler_is_refused() -> None:
    sampler = ElasticSampler(10, batch_size=4)
    with pytest.raises(RuntimeError, match="only batches that this sampler dealt can be counted"):
        next(sampler.consumed(DataLoader(Numbers(10))))


def test_loader_out_of_order_is_refused() -> None:
    sampler = ElasticSampler(10, batch_size=4)
    with pytest.raises(ValueError, match="batches must come in order to be counted"):
        sampler.consumed(DataLoader(Numbers(10), batch_sampler=sampler, num_workers=1, in_order=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_or_length": -1}, "length must be at least 0, got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1 on every rank, got 0"),
        ({"batch_size": [1, 2, 3]}, "one for each of the 2 ranks, got 3"),
        ({"rank": 2}, "rank must be at least 0 and less than num_replicas=2, got 2"),
        ({"rank": None}, "rank must be given without a process group, got None for num_replicas=2"),
        ({"num_replicas": 0, "rank": 0}, "less than num_replicas=0, got 0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"order": "random"}, "order must be 'feistel' or 'torch', got 'random'"),
        ({"tail": "cut"}, "tail must be one of .*, got 'cut'"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"dataset_or_length": 10, "batch_size": 4, "num_replicas": 2, "rank": 0, **options}
    with pytest.raises(ValueError, match=message):
        ElasticSampler(**given)

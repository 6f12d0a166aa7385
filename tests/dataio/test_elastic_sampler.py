"""Each sample once per epoch, on every rank equally many steps, while ranks and batch sizes change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.sampling.round_robin import RoundRobin, Tail, world


class Numbers(Dataset[int]):
    """Sample i is i. Deep enough to be sent to workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def ranks(length: int, sizes: list[int], **options: Any) -> list[ElasticSampler]:
    return [
        ElasticSampler(length, batch_size=sizes, num_replicas=len(sizes), rank=rank, **options)
        for rank in range(len(sizes))
    ]


def steps(samplers: list[ElasticSampler]) -> Iterator[list[list[int]]]:
    """Yield the batches of all ranks, step by step; ranks that don't end together are an error."""
    return zip(*(sampler.consumed(sampler) for sampler in samplers), strict=True)  # type: ignore[arg-type]


def flat(taken: Any) -> list[int]:
    return [index for step in taken for batch in step for index in batch]


# Sizes 0 and 1, fewer samples than ranks, and enough for several steps of the largest world.
LENGTHS = st.integers(0, 120)
# From one rank to more than there may be samples; batches of 1 leave ranks empty, unequal ones are dealt in turn.
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=9) | st.builds(
    lambda size, world: [size] * world, st.integers(1, 9), st.integers(1, 9)
)
CHANGES = st.lists(st.tuples(SIZES, st.integers(0, 4)), min_size=1, max_size=6)
ORDERS = st.sampled_from(["feistel", "torch"])


# Exactly once


@given(LENGTHS, CHANGES, SIZES, st.integers(0, 3), ORDERS)
@example(0, [([2, 2], 1)], [3], 0, "feistel")
@example(3, [([1] * 8, 0)], [1] * 8, 0, "feistel")
def test_each_sample_comes_once_whatever_changes(
    length: int, changes: list[tuple[list[int], int]], last: list[int], epoch: int, order: str
) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for sizes, many in [*changes, (last, 10_000)]:
        samplers = ranks(length, sizes, order=order, tail="uneven", seed=5)
        for sampler in samplers:
            sampler.set_epoch(epoch)
            if state is not None:
                sampler.load_state_dict(state)
        # The first `many` steps, or fewer if the epoch ends: then a state taken in the loop is that of its end.
        for step in islice(steps(samplers), many):
            assert all(len(batch) <= size for batch, size in zip(step, sizes, strict=True))
            seen += flat([step])
            states = [sampler.state_dict() for sampler in samplers]
            assert all(each == states[0] for each in states)
            state = json.loads(json.dumps(states[0]))
    assert sorted(seen) == list(range(length))


@given(LENGTHS, SIZES, SIZES, st.sampled_from(["pad", "drop"]))
def test_padding_repeats_and_dropping_leaves_out_fewer_than_one_per_rank(
    length: int, old: list[int], new: list[int], tail: Tail
) -> None:
    first = ranks(length, old, tail=tail)
    seen = flat(islice(steps(first), 1))
    fresh = sum(sampler.fresh for sampler in first)
    second = ranks(length, new, tail=tail)
    for sampler in second:
        sampler.set_epoch(0, min(len(seen), length))
    for step in steps(second):
        seen += flat([step])
        fresh += sum(sampler.fresh for sampler in second)
        counts = [len(batch) for batch in step]
        assert counts == [min(size, max(counts)) for size in new]  # equally many, but for smaller batches
        assert all(counts)
    if tail == "pad":
        assert set(seen) == set(range(length))
        assert len(seen) - length < max(len(old), len(new))
        assert fresh == length
    else:
        assert len(set(seen)) == len(seen) > length - max(len(old), len(new))


def test_every_position_can_be_resumed() -> None:
    order = flat(steps(ranks(37, [1])))
    for position in range(38):
        for sizes in ([1], [4, 4], [3, 1, 5], [2] * 40):
            samplers = ranks(37, sizes, tail="uneven")
            for sampler in samplers:
                sampler.set_epoch(0, position)
            assert sorted(flat(steps(samplers))) == sorted(order[position:])


def test_fill_leaves_no_rank_empty_wherever_an_epoch_is_resumed() -> None:
    order = flat(steps(ranks(37, [1])))
    for position in range(37):
        for sizes in ([1], [4, 4], [1, 1, 1], [3, 1, 5], [2] * 40):
            samplers = ranks(37, sizes, tail="fill")
            seen: list[int] = []
            for sampler in samplers:
                sampler.set_epoch(0, position)
            for step in steps(samplers):
                assert min(map(len, step)) >= 1
                fresh = [sampler.fresh for sampler in samplers]
                left = 37 - position - len(seen)
                assert sum(map(len, step)) - sum(fresh) == max(0, len(sizes) - left)
                seen += [index for batch, number in zip(step, fresh, strict=True) for index in batch[:number]]
            assert sorted(seen) == sorted(order[position:])


@given(st.integers(0, 400), SIZES, st.sampled_from(["pad", "drop", "uneven", "fill"]), st.booleans())
def test_len_is_the_number_of_steps_on_every_rank(length: int, sizes: list[int], tail: Tail, drop_last: bool) -> None:
    samplers = ranks(length, sizes, tail=tail, drop_last=drop_last)
    expected = len(samplers[0])
    for done, step in enumerate(steps(samplers), start=1):
        assert [len(sampler) for sampler in samplers] == [expected - done] * len(samplers)
        if drop_last:
            assert [len(batch) for batch in step] == sizes
    assert all(sampler.epoch == 1 for sampler in samplers)


@given(st.integers(2, 300), st.integers(2, 9), st.integers(2, 6))
def test_uneven_leaves_no_rank_empty_where_there_are_enough(length: int, world_size: int, size: int) -> None:
    for step in steps(ranks(length, [size] * world_size, tail="uneven")):
        counts = [len(batch) for batch in step]
        assert max(counts) - min(counts) <= 1
        assert min(counts) >= 1 or length < world_size


@given(LENGTHS.filter(bool), SIZES, st.sampled_from(["pad", "drop", "uneven", "fill"]))
def test_weighted_mean_over_ranks_is_the_mean_of_the_step(length: int, sizes: list[int], tail: Tail) -> None:
    samplers = ranks(length, sizes, tail=tail)
    for step in steps(samplers):
        heads = [batch[: sampler.fresh] for batch, sampler in zip(step, samplers, strict=True)]
        means = [sum(head) / max(len(head), 1) * each.weight for head, each in zip(heads, samplers, strict=True)]
        assert sum(means) / len(sizes) == pytest.approx(np.mean([index for head in heads for index in head]))


@given(SIZES, st.integers(1, 40), st.integers(0, 20), SIZES, st.sampled_from(["pad", "drop", "uneven", "fill"]))
def test_indices_computed_at_once_are_those_computed_step_by_step(
    sizes: list[int], block: int, step: int, other: list[int], tail: Tail
) -> None:
    def epoch(block: int) -> list[list[list[int]]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("accel.dataio.sampling.ledger._BLOCK", block)
            samplers = ranks(150, sizes, tail=tail)
            for sampler in samplers:
                sampler.set_batch_size((other * len(sizes))[: len(sizes)], delay=step)
            return list(steps(samplers))

    assert epoch(block) == epoch(1)


# The order


@pytest.mark.parametrize("order", ["feistel", "torch"])
def test_order_follows_from_seed_and_epoch(order: str) -> None:
    def epoch(seed: int, number: int) -> list[int]:
        samplers = ranks(5000, [8, 8], order=order, seed=seed)
        for sampler in samplers:
            sampler.set_epoch(number)
        return flat(steps(samplers))

    assert epoch(1, 3) == epoch(1, 3)
    assert len({tuple(epoch(*key)) for key in [(1, 3), (1, 4), (2, 4)]}) == 3


def test_without_shuffle_the_order_is_the_datasets() -> None:
    assert flat(steps(ranks(11, [2, 2], shuffle=False, tail="uneven"))) == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9]


@pytest.mark.sample(4)
@pytest.mark.parametrize("length", [1, 3, 37, 64, 70, 101])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_torch_order_equals_distributed_sampler(length: int, world_size: int) -> None:
    for rank, leave_out, drop_last, shuffle in product(range(world_size), *[(False, True)] * 3):
        theirs = DistributedSampler(Numbers(length), world_size, rank, shuffle, seed=7, drop_last=leave_out)
        theirs.set_epoch(2)
        plain = DataLoader(Numbers(length), batch_size=4, sampler=theirs, drop_last=drop_last)
        ours = ElasticSampler(
            Numbers(length),
            batch_size=4,
            num_replicas=world_size,
            rank=rank,
            shuffle=shuffle,
            seed=7,
            drop_last=drop_last,
            order="torch",
            tail="drop" if leave_out else "pad",
        )
        ours.set_epoch(2)
        assert len(ours) == len(plain)
        loader = DataLoader(Numbers(length), batch_sampler=ours)
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in plain]


# With a DataLoader


@pytest.mark.parametrize("workers", [0, 2])
def test_position_counts_what_the_loop_took(workers: int) -> None:
    sampler = ElasticSampler(Numbers(100), batch_size=5, num_replicas=2, rank=1)
    loader = DataLoader(Numbers(100), batch_sampler=sampler, num_workers=workers)
    seen = []
    for number, batch in enumerate(sampler.consumed(loader), start=1):
        seen += batch.tolist()
        assert sampler.position == sampler.state_dict()["position"] == 10 * number
        assert len(sampler) == 10 - number
        if number == 3:
            break
    state = sampler.state_dict()
    other = ElasticSampler(Numbers(100), batch_size=10, num_replicas=1, rank=0)
    other.load_state_dict(state)
    rest = flat([[batch.tolist() for batch in other.consumed(DataLoader(Numbers(100), batch_sampler=other))]])
    assert len(rest) == 70
    assert not set(seen) & set(rest)
    # After the break the same loader goes on where the loop was, then to the next epoch.
    assert len(list(sampler.consumed(loader))) == 7
    assert (sampler.epoch, sampler.position) == (1, 0)
    assert len(list(sampler.consumed(loader))) == 10


def test_persistent_workers_go_on_after_a_break() -> None:
    sampler = ElasticSampler(Numbers(60), batch_size=4)
    loader = DataLoader(Numbers(60), batch_sampler=sampler, num_workers=2, persistent_workers=True)
    seen = []
    for many in (2, 5, 100):
        seen += [batch.tolist() for batch in islice(sampler.consumed(loader), many)]
    assert sorted(flat([seen])) == list(range(60))


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_size_changes_on_all_ranks_at_once(workers: int) -> None:
    samplers = ranks(200, [4, 4], tail="uneven")
    loaders = [DataLoader(Numbers(200), batch_sampler=sampler, num_workers=workers) for sampler in samplers]
    passes = [iter(each.consumed(loader)) for each, loader in zip(samplers, loaders, strict=True)]
    sizes, seen = [], []
    for number, batches in enumerate(zip(*passes, strict=True)):
        sizes.append([len(batch) for batch in batches])
        seen += [index for batch in batches for index in batch.tolist()]
        if number == 1:
            for sampler in samplers:
                sampler.set_batch_size([9, 3], delay=5)
        assert len({len(sampler) for sampler in samplers}) == 1
    assert sizes[:10] == [[4, 4]] * 7 + [[9, 3]] * 3
    assert sorted(seen) == list(range(200))


def test_batch_size_changes_with_the_next_batch_without_workers() -> None:
    sampler = ElasticSampler(20, batch_size=4)
    sizes = []
    for batch in sampler.consumed(DataLoader(range(20), batch_sampler=sampler)):  # type: ignore[arg-type]
        sizes.append(len(batch))
        sampler.set_batch_size(len(sizes) + 4)
    assert sizes == [4, 5, 6, 5]


def test_batch_size_cannot_change_in_batches_that_are_dealt() -> None:
    sampler = ElasticSampler(100, batch_size=4)
    loader = DataLoader(Numbers(100), batch_sampler=sampler, num_workers=2)
    passes = sampler.consumed(loader)
    next(passes)
    with pytest.raises(ValueError, match="delay must be at least the 4 batches dealt ahead already, got 1"):
        sampler.set_batch_size(8, delay=1)
    passes.close()  # type: ignore[attr-defined]
    sampler.set_batch_size(8)
    assert len(next(iter(sampler))) == 8


def test_restart_keeps_the_step_at_which_the_batch_size_changes() -> None:
    ahead, behind = ranks(100, [5, 5], tail="uneven")
    for sampler, dealt in ((ahead, 8), (behind, 1)):  # as if their workers ran ahead unequally far
        sampler.set_batch_size(10, delay=3)
        stream = iter(sampler)
        list(islice(stream, dealt))
        sampler.advance()
    seen = flat(steps([ahead, behind]))
    assert len(seen) == len(set(seen)) == 90


# A pass within another one


def test_a_batch_may_be_counted_later_than_it_is_delivered() -> None:
    sampler = ElasticSampler(20, batch_size=4, shuffle=False)
    ledger, outer = sampler.ledger, iter(sampler)
    dealt = ledger.begun_last
    assert [next(outer) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    first, second = ledger.deliver(dealt), ledger.deliver(dealt)
    assert (sampler.position, ledger.steps_left, sampler.fresh, ledger.dealt_ahead) == (0, 5, 4, 3)
    sampler.count(first.place)
    assert (sampler.position, ledger.steps_left, ledger.dealt_ahead) == (4, 4, 2)
    assert sampler.state_dict()["position"] == 4
    inner = iter(sampler)  # it begins with what was not counted
    assert next(inner) == [4, 5, 6, 7]
    assert ledger.deliver(ledger.begun_last).place == second.place
    sampler.count(ledger.deliver(dealt).place)
    assert (sampler.position, ledger.place.taken) == (12, 3)
    sampler.count(second.place)
    assert (sampler.position, ledger.place.taken) == (8, 2)


# What the elastic sampler saves, and what it refuses: states and arguments that would deliver a sample twice


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


# Places of a step go to ranks like cards, and no rank takes itself for the only one


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_a_step_is_dealt_like_cards(sizes: list[int]) -> None:
    piles: list[list[int]] = [[] for _ in sizes]
    place = 0
    while any(len(pile) < size for pile, size in zip(piles, sizes, strict=True)):
        for pile, size in zip(piles, sizes, strict=True):
            if len(pile) < size:
                pile.append(place)
                place += 1
    assert [RoundRobin(sizes, rank, "pad").mine(place).tolist() for rank in range(len(sizes))] == piles


def test_a_rank_does_not_take_itself_for_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world() == (1, 0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"got None and WORLD_SIZE=4; call torch\.distributed\.init"):
        world()


@given(st.integers(1, 6), st.integers(4, 9), st.integers(0, 200), st.sampled_from(["uneven", "fill"]))
def test_no_rank_has_a_single_sample_in_a_step_where_there_are_enough(
    ranks: int, size: int, more: int, tail: Tail
) -> None:
    left = length = 2 * ranks + more
    deals = [RoundRobin([size] * ranks, rank, tail, least=2) for rank in range(ranks)]
    steps = deals[0].steps(length)
    for _ in range(steps):
        counts = [deal.count(deal.width(left)) for deal in deals]
        assert 2 <= min(counts) <= max(counts) <= size
        left -= sum(counts)
    assert left == 0


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 60))
def test_batches_too_small_for_that_are_dealt_as_without(ranks: int, size: int, length: int) -> None:
    left = length
    deals = [RoundRobin([size] * ranks, rank, "uneven", least=2) for rank in range(ranks)]
    plain = RoundRobin([size] * ranks, 0, "uneven")
    assert deals[0].steps(length) == plain.steps(length)
    while width := deals[0].width(left):
        counts = [deal.count(width) for deal in deals]
        assert sum(counts) == width and max(counts) <= size
        assert min(counts) >= 1 or length < 2 * ranks or size == 1
        left -= width
    assert left == 0

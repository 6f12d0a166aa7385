"""An epoch that is resumed again and again, by other numbers of ranks and batch sizes, brings each sample once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.loader import ContinuousLoader
from tests.dataio.numbers import Numbers, indices, run, same, saved_and_loaded, seeded
from tests.sampling import examples

# One run: ranks, batch size (None: the loader makes no batches), steps until it is interrupted. 0 steps: at once.
RUN = st.tuples(st.integers(1, 4), st.integers(1, 6) | st.none(), st.integers(0, 5))
# No sample, fewer than ranks, and enough for several steps of every run.
LENGTHS = st.integers(1, 110)


def loaders(length: int, ranks: int, batch_size: int | None, drop_last: bool) -> list[ContinuousLoader]:
    data = Numbers(length)
    samplers = [DistributedSampler(data, ranks, rank, seed=3, drop_last=drop_last) for rank in range(ranks)]
    return [ContinuousLoader(DataLoader(data, batch_size, sampler=each), mode="inline") for each in samplers]


def samples(batch: Tensor) -> list[int]:
    return indices(batch.reshape(-1, 3))


def resumed(length: int, runs: list[tuple[int, int | None, int]], drop_last: bool) -> Iterator[list[list[int]]]:
    """Yield the batches of all ranks, step by step and run after run; ranks that don't end together are an error."""
    state: dict[str, Any] | None = None
    for ranks, batch_size, steps in runs:
        running = loaders(length, ranks, batch_size, drop_last)
        for loader in running:
            if state is not None:
                loader.load_state_dict(state)
            loader.set_epoch(2)
        for batches in islice(zip(*running, strict=True), steps):
            states = [saved_and_loaded(loader.state_dict()) for loader in running]
            assert all(each["begun"]["dealt"] == states[0]["begun"]["dealt"] for each in states)
            state = states[-1]
            yield [samples(batch) for batch in batches]


@settings(max_examples=examples(40))
@given(LENGTHS, st.lists(RUN, max_size=4), st.tuples(st.integers(1, 4), st.integers(1, 6), st.just(1000)))
@example(101, [(3, 4, 5), (2, 5, 3)], (2, 5, 1000))
@example(101, [(3, 4, 5), (2, 5, 3)], (3, 4, 1000))
def test_each_sample_comes_however_often_the_ranks_change(
    length: int, runs: list[tuple[int, int | None, int]], last: tuple[int, int, int]
) -> None:
    seen = [i for step in resumed(length, [*runs, last], drop_last=False) for batch in step for i in batch]

    assert set(seen) == set(range(length))
    assert len(seen) - length < max(ranks for ranks, _, _ in [*runs, last])  # repeats even out the last step's ranks


@settings(max_examples=examples(40))
@given(LENGTHS, st.lists(RUN, max_size=4), st.tuples(st.integers(1, 4), st.integers(1, 6), st.just(1000)))
def test_dropping_leaves_out_fewer_than_one_per_rank(
    length: int, runs: list[tuple[int, int | None, int]], last: tuple[int, int, int]
) -> None:
    seen = [i for step in resumed(length, [*runs, last], drop_last=True) for batch in step for i in batch]

    assert len(set(seen)) == len(seen) > length - max(ranks for ranks, _, _ in [*runs, last])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [4, None])
def test_interruptions_change_nothing_where_the_ranks_stay(drop_last: bool, batch_size: int | None) -> None:
    whole = list(resumed(50, [(3, batch_size, 1000)], drop_last))

    assert list(resumed(50, [(3, batch_size, 2), (3, batch_size, 1), (3, batch_size, 1000)], drop_last)) == whole


def test_augmentation_goes_on_with_the_number_of_the_batch() -> None:
    data = Numbers(51)  # its samples hold a random number each

    def make(batch_size: int) -> ContinuousLoader:
        sampler = DistributedSampler(data, 1, 0)
        loader = DataLoader(data, batch_size, sampler=sampler, generator=seeded())
        return ContinuousLoader(loader, mode="fork", num_workers=1)

    def interrupted(batch_sizes: list[int], then: int) -> list[Tensor]:
        state = None
        for batch_size in batch_sizes:
            with make(batch_size) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                next(iter(loader))
                state = loader.state_dict()
        with make(then) as loader:
            assert state is not None
            loader.load_state_dict(state)
            return run(loader, 1)[0]

    whole = interrupted([2, 5], 5)
    assert len(whole) == 9  # 51 - 2 - 5 samples
    assert same([interrupted([2, 5, 5], 5)], [whole[1:]])


# Other samplers


def distributed(data: Numbers) -> DataLoader[Any]:
    return DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0))


def shuffled(data: Numbers) -> DataLoader[Any]:
    return DataLoader(data, 4, shuffle=True)


def in_order(data: Numbers) -> DataLoader[Any]:
    return DataLoader(data, 4)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (shuffled, distributed, "taken with, a RandomSampler; this loader has a DistributedSampler"),
        (distributed, shuffled, "taken with, a DistributedSampler; this loader has a RandomSampler"),
        (in_order, shuffled, "taken with, a SequentialSampler; this loader has a RandomSampler"),
    ],
)
def test_a_place_in_another_samplers_order_is_refused(old: Any, new: Any, words: str) -> None:
    loader = ContinuousLoader(old(Numbers()), mode="inline")
    next(iter(loader))
    other = ContinuousLoader(new(Numbers()), mode="inline")

    with pytest.raises(ValueError, match=words):
        other.load_state_dict(loader.state_dict())
    run(loader, 1)
    other.load_state_dict(loader.state_dict())  # between two epochs there is no order to go on with
    assert len(run(other, 1)[0]) == len(other)


@pytest.mark.parametrize("sizes", [[4, 10, 3], [4, None, 7], [None, 5, 5]], ids=str)
def test_batches_of_another_size_go_on_in_a_shuffled_order(sizes: list[int | None]) -> None:
    def make(size: int | None) -> ContinuousLoader:
        sampler = RandomSampler(Numbers(), generator=seeded())
        return ContinuousLoader(DataLoader(Numbers(), size, sampler=sampler), mode="inline")

    whole = [i for batch in make(4) for i in samples(batch)]
    seen, state = [], None
    for size in sizes:
        loader = make(size)
        if state is not None:
            loader.load_state_dict(state)
        for batch in islice(loader, 2 if size != sizes[-1] else None):
            seen += samples(batch)
            state = loader.state_dict()

    assert seen == whole

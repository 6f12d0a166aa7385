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

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.loader import ContinuousLoader
from tests.dataio.numbers import ENGINES, Numbers, indices, run, same, saved_and_loaded, seeded
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


# A continuous loader's state goes on in the middle of an epoch, with other workers, ranks and ways to make batches


# By default from each to the loop's own thread, from there to each, and to its own kind.
CHANGES = [
    pytest.param(
        first,
        then,
        marks=[] if ("inline", 1) in (first, then) or first == then != ("fork", 1) else pytest.mark.slow,
        id=f"{first[0]}{first[1]}-then_{then[0]}{then[1]}",
    )
    for first in ENGINES
    for then in ENGINES
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("at", [0, 1, 7, 12, 13], ids=lambda at: f"after_{at}")
@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_going_on_in_the_middle_of_an_epoch(first: tuple[str, int], then: tuple[str, int], at: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(), 4, shuffle=True, generator=seeded())

    plain = run(make(), 4)
    with ContinuousLoader(make(), mode=first[0], num_workers=first[1]) as loader:  # type: ignore[arg-type]
        run(loader, 1)
        batches = iter(loader)
        for _ in range(at):
            next(batches)
        if at == 13:
            assert next(batches, None) is None
        state = saved_and_loaded(loader.state_dict())
    with ContinuousLoader(make(), mode=then[0], num_workers=then[1]) as other:  # type: ignore[arg-type]
        other.load_state_dict(state)
        assert other.state_dict().keys() == state.keys()
        rest = run(other, 2)

    expected = plain[1:3] if at == 0 else [plain[1][at:], plain[2]] if at < 13 else plain[2:4]
    assert same(rest, expected)


def test_setting_another_epoch_after_loading_begins_that_epoch() -> None:
    data = Numbers()
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader = ContinuousLoader(DataLoader(data, 4, sampler=sampler), mode="inline")
    loader.set_epoch(3)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(4)

    assert len(run(loader, 1)[0]) == 13


def test_an_elastic_sampler_keeps_the_place_itself(engine: dict[str, Any]) -> None:
    def make() -> tuple[ElasticSampler, ContinuousLoader]:
        sampler = ElasticSampler(Numbers(), batch_size=4, num_replicas=1, rank=0)
        return sampler, ContinuousLoader(DataLoader(Numbers(), batch_sampler=sampler), **engine)

    sampler, loader = make()
    seen = []
    for count, batch in enumerate(loader):
        seen += indices(batch)
        if count == 5:
            break
    assert sampler.position == 24
    state = saved_and_loaded(loader.state_dict())
    loader.close()
    sampler, loader = make()
    loader.load_state_dict(state)
    seen += [i for batch in loader for i in indices(batch)]

    assert sorted(seen) == list(range(50))
    assert sampler.epoch == 1
    loader.close()


def test_an_elastic_samplers_pass_that_is_begun_anew_in_the_same_variable(engine: dict[str, Any]) -> None:
    sampler = ElasticSampler(Numbers(), batch_size=4, num_replicas=1, rank=0)
    seen = []
    with ContinuousLoader(DataLoader(Numbers(), batch_sampler=sampler), **engine) as loader:
        for steps in (3, 4, 6):
            batches = iter(loader)  # the pass before ends only now that this one has begun
            seen += [i for _ in range(steps) for i in indices(next(batches))]

    assert sorted(seen) == list(range(50))


def test_a_loop_that_iterates_what_its_elastic_sampler_consumed(engine: dict[str, Any]) -> None:
    sampler = ElasticSampler(Numbers(), batch_size=4, num_replicas=1, rank=0)
    with ContinuousLoader(DataLoader(Numbers(), batch_sampler=sampler), **engine) as loader:
        for _ in range(2):
            assert sorted(i for batch in sampler.consumed(loader) for i in indices(batch)) == list(range(50))

    assert sampler.epoch == 2


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda state: {}, "version 2, got None"),
        (lambda state: [], "version 2, got 'list'"),
        (lambda state: state | {"length": 7}, "had 7 samples; this one has 50"),
        (lambda state: state | {"begun": state["begun"] | {"random": []}}, "generators"),
        (lambda state: state | {"begun": state["begun"] | {"sampler": {"sampler": 1}}}, "same samplers"),
    ],
)
def test_states_that_do_not_fit(spoil: Any, words: str) -> None:
    loader = ContinuousLoader(DataLoader(Numbers(), 4), mode="inline")
    next(iter(loader))
    with pytest.raises(ValueError, match=words):
        loader.load_state_dict(spoil(loader.state_dict()))

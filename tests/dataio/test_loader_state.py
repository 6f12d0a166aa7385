"""A continuous loader's state goes on in the middle of an epoch, with other workers, ranks and ways to make batches."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import (
    DataLoader,
)
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.loader import ContinuousLoader
from tests.dataio.numbers import ENGINES, Numbers, indices, run, same, saved_and_loaded, seeded

# -- state -----------------------------------------------------------------------------------------------------------


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


def test_augmentation_goes_on_as_it_would_have() -> None:
    def make() -> ContinuousLoader:
        return ContinuousLoader(
            DataLoader(Numbers(51), 4, shuffle=True, generator=seeded()), mode="fork", num_workers=2, prefetch_factor=3
        )

    with make() as loader:
        whole = run(loader, 1)[0]
    with make() as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        assert same(run(loader, 1), [whole[5:]])


@pytest.mark.sample(4)
@pytest.mark.parametrize("old_ranks", [1, 3])
@pytest.mark.parametrize("new_ranks", [1, 2, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_going_on_with_another_number_of_ranks(old_ranks: int, new_ranks: int, drop_last: bool) -> None:
    data = Numbers(101)

    def make(rank: int, ranks: int, batch: int) -> ContinuousLoader:
        sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, seed=3, drop_last=drop_last)
        return ContinuousLoader(DataLoader(data, batch, sampler=sampler), mode="inline")

    seen: list[int] = []
    for rank in range(old_ranks):
        loader = make(rank, old_ranks, 4)
        loader.set_epoch(2)
        for count, batch in enumerate(loader):
            seen += indices(batch)
            state = loader.state_dict()
            if count == 4:
                break
    lengths = []
    for rank in range(new_ranks):
        loader = make(rank, new_ranks, 5)
        loader.load_state_dict(state)
        loader.set_epoch(2)
        rest = [i for batch in loader for i in indices(batch)]
        lengths.append(len(rest))
        seen += rest

    assert len(set(lengths)) == 1
    whole = (101 // (old_ranks if new_ranks == old_ranks else new_ranks)) if drop_last else 0
    assert len(set(seen)) == 101 if not drop_last else len(set(seen)) >= whole
    # Repeats only even out the ranks; with drop_last there are none.
    assert len(seen) - len(set(seen)) < max(old_ranks, new_ranks)
    if drop_last:
        assert len(seen) == len(set(seen)) > 101 - old_ranks - new_ranks


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

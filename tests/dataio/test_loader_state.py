"""A continuous loader's state goes on in the middle of an epoch, with other workers, ranks and ways to make batches."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.loader import ContinuousLoader
from tests.dataio.numbers import ENGINES, Numbers, indices, run, same, saved_and_loaded, seeded

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

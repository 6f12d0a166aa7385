"""Our own batch samplers under a continuous loader: the plain loader's order, made ahead, and a place to go on from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.length_balance import LengthBalancedBatchSampler
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes.prefetch import PrefetchAcrossEpochs
from tests.dataio.numbers import Numbers, indices, run, saved_and_loaded
from tests.sampling import examples

LENGTHS = [1 + 7 * i % 13 for i in range(50)]
# How a loop sets the epoch: at each one's head, never, or with a jump as a resumed run makes it.
NUMBERS = {"each": lambda epoch: epoch, "none": None, "jump": lambda epoch: epoch + 5 * (epoch > 1)}
SETTING = pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS.keys())
STOPS = pytest.mark.parametrize("stops", [[None] * 4, [3, None, 0, None], [None, 2, None, 1]], ids=str)


def balanced() -> DataLoader[Any]:
    sampler = LengthBalancedBatchSampler(LENGTHS, max_tokens=30, num_replicas=2, rank=1, seed=4)
    return DataLoader(Numbers(), batch_sampler=sampler)


def passes(loader: Any, stops: list[int | None], number: Any, first: int = 0) -> list[list[list[int]]]:
    """Iterate one epoch after the other, each left after its number of batches, and return the samples of each."""
    seen = []
    for epoch, stop in enumerate(stops, first):
        if number is not None:
            loader.batch_sampler.set_epoch(number(epoch))
        seen.append([indices(batch) for batch in (run(loader, 1, stop=stop)[0])])
    return seen


# Batches balanced by length


@pytest.mark.sample(4)
@SETTING
@STOPS
def test_balanced_batches_are_the_plain_loaders(engine: dict[str, Any], stops: list[int | None], number: Any) -> None:
    with ContinuousLoader(balanced(), **engine) as loader:
        assert passes(loader, stops, number) == passes(balanced(), stops, number)


@pytest.mark.sample(4)
@SETTING
@pytest.mark.parametrize("at", [0, 2, -1], ids=lambda at: f"after_{at}")
@pytest.mark.parametrize("stops", [[], [None], [3], [None, 4], [None, None]], ids=str)
def test_balanced_batches_go_on(stops: list[int | None], at: int, number: Any) -> None:
    """A state from the middle of a later epoch, after whole epochs and such that were left early."""
    whole = passes(balanced(), [*stops, None, None], number)
    at %= len(whole[-1]) + 1
    with ContinuousLoader(balanced(), mode="threads", num_workers=2) as loader:
        passes(loader, stops, number)
        if number is not None:
            loader.set_epoch(number(len(stops)))
        batches = iter(loader)
        for _ in range(at):
            next(batches)
        state = saved_and_loaded(loader.state_dict())
    with ContinuousLoader(balanced(), mode="threads", num_workers=2) as loader:
        loader.load_state_dict(state)
        rest = passes(loader, [None, None], number, first=len(stops))

    assert rest == [whole[-2][at:], whole[-1]]


def test_a_balanced_samplers_own_state_is_where_the_pass_begins() -> None:
    whole = passes(balanced(), [None], None)[0]
    for steps in (2, len(whole)):
        plain = balanced()
        sampler: Any = plain.batch_sampler
        sampler.load_state_dict(sampler.state_dict(step=steps))
        loader = ContinuousLoader(plain, mode="inline")
        assert loader.state_dict()["begun"]["sampler"]["batch_sampler"]["step"] == steps
        assert passes(loader, [None, None], None) == [whole[steps:], whole]


# Batches for a number of ranks that changes


def elastic(**options: Any) -> DataLoader[Any]:
    given = {"batch_size": 4, "num_replicas": 2, "rank": 1, "seed": 4} | options
    return DataLoader(Numbers(), batch_sampler=ElasticSampler(Numbers(), **given))


class Counted:
    """The plain loader as an elastic sampler wants it iterated."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.batch_sampler: Any = loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        return self.batch_sampler.consumed(self.loader)  # type: ignore[no-any-return]


@pytest.mark.sample(4)
@SETTING
@STOPS
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_elastic_batches_are_the_plain_loaders(
    engine: dict[str, Any], stops: list[int | None], number: Any, tail: str
) -> None:
    with ContinuousLoader(elastic(tail=tail), **engine) as loader:
        assert passes(loader, stops, number) == passes(Counted(elastic(tail=tail)), stops, number)


@pytest.mark.parametrize("told", [1, 6, 7], ids=lambda step: f"told_after_{step}")
@pytest.mark.parametrize("holds", [7, 9], ids=lambda step: f"holds_after_{step}")
def test_the_batch_size_changes_where_it_does_with_the_plain_loader(told: int, holds: int) -> None:
    def sizes(loader: Any) -> list[int]:
        found: list[int] = []
        for _ in range(3):  # epochs of 7 steps
            for batch in loader:
                found.append(len(batch))
                if len(found) == told:
                    loader.batch_sampler.set_batch_size(3, delay=holds - told)
        return found

    with ContinuousLoader(elastic(), mode="threads", num_workers=2) as loader:
        assert sizes(loader) == sizes(Counted(elastic()))


# Samples; then for each run ranks, batch size, and steps until it is interrupted.
RUN = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(0, 9))


@settings(max_examples=examples(30))
@given(st.integers(1, 60), st.lists(RUN, max_size=4), RUN)
def test_each_sample_comes_once_per_epoch_whatever_the_runs(
    length: int, runs: list[tuple[int, int, int]], last: tuple[int, int, int]
) -> None:
    seen: dict[int, list[int]] = {}
    state = None
    for ranks, size, steps in [*runs, (*last[:2], 1000)]:
        options: dict[str, Any] = {"batch_size": size, "num_replicas": ranks, "seed": 5, "tail": "uneven"}
        samplers = [ElasticSampler(length, rank=rank, **options) for rank in range(ranks)]
        data: Any = range(length)
        plain = [DataLoader(data, batch_sampler=each, collate_fn=list) for each in samplers]
        loaders = [ContinuousLoader(each, mode="threads", num_workers=1) for each in plain]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for batches in islice(chain.from_iterable(zip(*loaders, strict=True) for _ in range(2)), steps):
            state = saved_and_loaded(loaders[-1].state_dict())
            seen.setdefault(samplers[0].epoch, []).extend(chain.from_iterable(batches))
        for loader in loaders:
            loader.close()

    assert all(sorted(samples) == list(range(length)) for samples in seen.values())
    assert len(seen) >= 2


# Made ahead


@pytest.mark.parametrize(
    ("make", "number"),
    [(balanced, "each"), (elastic, "each"), (elastic, "none")],
    ids=["balanced", "elastic", "elastic_by_itself"],
)
def test_epochs_are_made_ahead(monkeypatch: pytest.MonkeyPatch, make: Any, number: str) -> None:
    gone_on: list[bool] = []
    resume = PrefetchAcrossEpochs.resume
    monkeypatch.setattr(PrefetchAcrossEpochs, "resume", lambda self: gone_on.append(resume(self)) or gone_on[-1])
    with ContinuousLoader(make(), mode="threads", num_workers=2) as loader:
        passes(loader, [None] * 4, NUMBERS[number])
        assert loader._core._continuous.guesses.failed == 0  # type: ignore[union-attr]

    assert gone_on == [False, True, True, True]


@pytest.mark.parametrize("make", [balanced, elastic], ids=["balanced", "elastic"])
def test_peeking_leaves_the_sampler_as_it_is(make: Any) -> None:
    sampler = make().batch_sampler
    lists = iter(sampler)
    next(lists)
    if isinstance(sampler, ElasticSampler):
        assert sampler.peek_epoch(1) is None  # nothing counts what the loop takes
        sampler.advance()
    state, random = sampler.state_dict(), torch.get_rng_state()
    peeked = sampler.peek_epoch(1)
    ahead = list(islice(peeked.lists, 3))
    assert sampler.state_dict() == state
    assert torch.equal(torch.get_rng_state(), random)
    assert not peeked.holds()

    rest = list(lists)
    if isinstance(sampler, ElasticSampler):
        for _ in rest:
            sampler.advance()
    sampler.set_epoch(1)
    assert peeked.holds()
    peeked.begin()
    following = make().batch_sampler
    following.set_epoch(1)
    assert [*ahead, *peeked.lists] == list(following)
    if isinstance(sampler, LengthBalancedBatchSampler):
        assert sampler.state_dict() == following.state_dict()


def test_a_state_loaded_into_the_sampler_is_not_passed_over() -> None:
    with ContinuousLoader(balanced(), mode="threads", num_workers=2) as loader:
        sampler: Any = loader.batch_sampler
        whole = passes(loader, [None, None], NUMBERS["each"])[1]
        sampler.load_state_dict(sampler.state_dict(step=2) | {"epoch": 2})
        rest = passes(loader, [None], None)[0]

    assert len(rest) == len(whole) - 2

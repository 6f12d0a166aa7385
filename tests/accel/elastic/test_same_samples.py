"""An elastic loader trains the samples that the plain loader would, whatever its batch size is meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

import accel
from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic.batch_size import loader as batch_loader
from accel.elastic.running import save_checkpoint
from tests.accel.elastic.batch_loops import PLAIN, Clock, Numbered, as_rank, batch_run, known_noise, nothing, train
from tests.accel.elastic.test_batch_loader import batches_of


def steps(samplers: list[ElasticSampler]) -> Iterator[list[list[int]]]:
    """Yield what is no repeat of each rank's batches, step by step; ranks that don't end together are an error."""
    for step in zip(*(sampler.consumed(sampler) for sampler in samplers), strict=True):  # type: ignore[arg-type]
        yield [batch[: sampler.fresh] for batch, sampler in zip(step, samplers, strict=True)]


def elastic(loaders: list[DataLoader[Any]]) -> list[ElasticSampler]:
    """Return the samplers of the ranks' elastic loaders."""
    samplers: list[ElasticSampler] = []
    for rank, loader in enumerate(loaders):
        with as_rank(rank, len(loaders)):
            samplers.append(batches_of(batch_loader.elastic_loader(loader)))
    return samplers


# Fewer samples than ranks, and enough for many steps of the least batch.
LENGTHS = st.integers(1, 150)
CHANGES = st.dictionaries(st.integers(0, 12), st.integers(1, 40), max_size=4)


@given(
    LENGTHS,
    st.integers(1, 9),
    st.integers(1, 4),
    CHANGES,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sets(st.integers(0, 12), max_size=2),
)
@example(1003, 8, 1, {4: 16, 8: 32, 12: 64, 16: 128}, True, False, False, set())  # left out 107, and not 3
@example(7, 4, 2, {}, True, False, False, set())  # all 7, whose plain loader repeats one of them
@example(41, 8, 2, {0: 10}, False, True, True, {1})
def test_an_epoch_has_the_samples_of_the_plain_loader(
    n: int,
    batch: int,
    ranks: int,
    changes: dict[int, int],
    drop_last: bool,
    drops_uneven: bool,
    given_batches: bool,
    stops: set[int],
) -> None:
    """With any batch sizes, on one rank or several, stopped and resumed within the epoch or not."""

    def loader(rank: int, epoch: int = 0) -> DataLoader[Any]:
        sampler: Any = DistributedSampler(range(n), ranks, rank, seed=3, drop_last=drops_uneven)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        own: dict[str, Any] = {"batch_size": batch, "sampler": sampler, "drop_last": drop_last}
        if given_batches:
            own = {"batch_sampler": BatchSampler(sampler, batch, drop_last)}
        return DataLoader(range(n), **own)  # type: ignore[arg-type]

    samplers, now = elastic([loader(rank) for rank in range(ranks)]), batch
    for epoch in range(2):
        plain = {index for rank in range(ranks) for part in loader(rank, epoch) for index in part.tolist()}
        seen, step, over = list[int](), 0, not plain
        while not over:
            over = True
            for parts in steps(samplers):
                seen += [index for part in parts for index in part]
                step += 1
                if step in changes:
                    now = max(batch, changes[step])
                    for sampler in samplers:
                        sampler.set_batch_size(now)
                if step in stops and samplers[0].ledger.steps_left:
                    state, over = samplers[0].state_dict(), False
                    break
            if not over:
                stops = stops - {step}
                samplers = elastic([loader(rank) for rank in range(ranks)])
                for sampler in samplers:
                    sampler.load_state_dict(state)
                    if changes:  # as a training does whose batch may change
                        sampler.set_batch_size(now)
        if drop_last or drops_uneven:
            assert set(seen) == plain
        else:
            assert set(seen) == set(range(n))
        assert len(seen) == len(set(seen))
        if not plain:
            break


def ahead(sampler: ElasticSampler, batches: int) -> Iterator[list[int]]:
    """Yield what is no repeat of the batches of a rank whose workers have dealt so many more meanwhile."""
    dealt, ready = iter(sampler), deque[list[int]]()
    while True:
        ready.extend(islice(dealt, batches + 1 - len(ready)))
        if not ready:
            return
        sampler.advance()
        yield ready.popleft()[: sampler.fresh]


@given(LENGTHS, st.integers(1, 9), st.lists(st.integers(0, 5), min_size=1, max_size=3), CHANGES, st.booleans())
def test_so_it_has_where_workers_run_ahead_unequally_far(
    n: int, batch: int, aheads: list[int], changes: dict[int, int], drops_uneven: bool
) -> None:
    ranks = len(aheads)
    orders = [DistributedSampler(range(n), ranks, rank, drop_last=drops_uneven) for rank in range(ranks)]  # type: ignore[arg-type]
    loaders = [DataLoader(range(n), batch, sampler=order, drop_last=True) for order in orders]  # type: ignore[arg-type]
    samplers = elastic(loaders)
    seen: list[int] = []
    for step, parts in enumerate(zip(*map(ahead, samplers, aheads), strict=True)):
        seen += [index for part in parts for index in part]
        if step in changes:
            for sampler in samplers:
                sampler.set_batch_size(changes[step], delay=max(aheads))
    assert set(seen) == {index for loader in loaders for part in loader for index in part.tolist()}
    assert len(seen) == len(set(seen))


@given(LENGTHS, st.integers(1, 9), st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.integers(0, 8))
def test_other_ranks_go_on_with_full_batches_and_leave_out_less_than_a_step(
    n: int, batch: int, ranks: int, other_batch: int, other_ranks: int, stop: int
) -> None:
    """A fixed batch under drop_last has its size in each step, also of an epoch that other ranks go on with."""

    def made(batch: int, ranks: int) -> list[ElasticSampler]:
        return elastic(
            [
                DataLoader(range(n), batch, sampler=DistributedSampler(range(n), ranks, rank), drop_last=True)  # type: ignore[arg-type]
                for rank in range(ranks)
            ]
        )

    first, second = made(batch, ranks), made(other_batch, other_ranks)
    seen = [index for parts in islice(steps(first), stop) for part in parts for index in part]
    state = first[0].state_dict()
    for sampler in second:
        sampler.load_state_dict(state)
    if state["epoch"] == 0:
        batches = zip(*(sampler.consumed(sampler) for sampler in second), strict=True)  # type: ignore[arg-type]
        for step in batches:
            assert {len(part) for part in step} == {other_batch}
            seen += [index for part, each in zip(step, second, strict=True) for index in part[: each.fresh]]
        assert n - len(seen) < other_batch * other_ranks
    assert len(seen) == len(set(seen))


@given(st.integers(20, 400), st.integers(2, 9), st.integers(1, 3), st.integers(10, 60), st.booleans())
def test_where_short_batches_are_left_out_those_of_another_size_are_not_short(
    n: int, batch: int, ranks: int, grown: int, drops_uneven: bool
) -> None:
    """Batch norm, or a loss over pairs, may need them as large as the loader's own."""
    samplers = elastic(
        [
            DataLoader(
                range(n),  # type: ignore[arg-type]
                batch,
                sampler=DistributedSampler(range(n), ranks, rank, drop_last=drops_uneven),  # type: ignore[arg-type]
                drop_last=True,
            )
            for rank in range(ranks)
        ]
    )
    for sampler in samplers:
        sampler.set_batch_size(grown)
    sizes = [len(part) for step in zip(*samplers, strict=True) for part in step]
    assert max(sizes, default=0) <= grown
    assert len(samplers[0]) == len(sizes) // ranks
    if len(sizes) > ranks:  # the last two share what is not enough for both
        assert min(sizes) >= min(batch, grown // 2)


Make = Callable[[Any], Any]


class _NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.sample(3)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "order",
    [
        SequentialSampler,
        RandomSampler,
        lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(5)),
        lambda data: DistributedSampler(data, 1, 0, shuffle=False),
        lambda data: DistributedSampler(data, 1, 0, drop_last=True),
    ],
    ids=["sequential", "random", "seeded", "distributed", "distributed, drop_last"],
)
@pytest.mark.parametrize("options", [{"max_batch_size": 32}, {"checkpoint": True}], ids=["batch", "checkpoint"])
def test_torchs_own_batch_sampler_gives_size_order_and_drop_last(
    order: Make, drop_last: bool, options: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """It was a TypeError: a loader that is given a batch sampler has no batch size."""
    known_noise(monkeypatch, 5000.0)
    data = Numbered(403)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader: Any = DataLoader(data, batch_sampler=BatchSampler(order(data), 4, drop_last))
    if "checkpoint" in options:
        options = {"checkpoint": tmp_path}
    model, loader, optimizer = accel.optimize(  # type: ignore[assignment]
        model, loader, optimizer, elastic=accel.Elastic(**options), **PLAIN
    )
    assert loader.batch_sampler.batch_size == 4
    for epoch in range(2):
        loader.batch_sampler.sampler.set_epoch(epoch)
        taken = train(model, loader, optimizer, clock, nothing)
        samples = [index for batch in taken for index in batch]
        assert len(samples) == len(set(samples)) == (400 if drop_last else 403)
        is_ordered = isinstance(order(data), SequentialSampler) or not getattr(order(data), "shuffle", True)
        assert (samples == sorted(samples)) is is_ordered
        if "checkpoint" in options:
            assert {len(batch) for batch in taken[:-1]} == {4}
    accel.undo(model)


def test_samples_are_those_that_the_sampler_counts() -> None:
    """It may be of a part of the dataset, and a dataset with such a sampler needs no length."""
    part = DataLoader(range(100), batch_size=4, sampler=RandomSampler(range(10)))  # type: ignore[arg-type]
    assert sorted(index for batch in batches_of(batch_loader.elastic_loader(part)) for index in batch) == list(
        range(10)
    )
    own = DataLoader(_NoLength(), batch_size=4, sampler=SequentialSampler(range(10)))
    assert len(batch_loader.elastic_loader(own)) == 3


@pytest.mark.parametrize("own", [False, True], ids=["a plain loader", "an ElasticSampler"])
def test_a_growing_batch_leaves_out_what_the_loaders_own_would(
    own: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_noise(monkeypatch, 5000.0)
    data = Numbered(1003)
    options: Any = {"batch_size": 8, "shuffle": True, "drop_last": True}
    if own:
        options = {"batch_sampler": ElasticSampler(data, batch_size=8, drop_last=True)}
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    made = accel.optimize(
        model, DataLoader(data, **options), optimizer, elastic=accel.Elastic(max_batch_size=128), **PLAIN
    )
    epochs = [train(*made, clock, nothing) for _ in range(4)]
    batch = batch_run(model)._sampler.batch_sizes
    accel.undo(model)

    assert batch == (128,)
    for taken in epochs:
        samples = [index for batch in taken for index in batch]
        assert len(samples) == len(set(samples)) == 1000
        assert min(map(len, taken)) >= 8


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{"max_batch_size": 128}, {}], ids=["growing", "fixed"])
@pytest.mark.parametrize("kind", ["a plain loader", "a BatchSampler", "over a DistributedSampler", "an ElasticSampler"])
def test_so_it_does_in_an_epoch_that_is_resumed(
    kind: str, options: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    known_noise(monkeypatch, 5000.0)
    data = Numbered(1003)
    given: dict[str, Any] = {
        "a plain loader": {"batch_size": 8, "shuffle": True, "drop_last": True},
        "a BatchSampler": {"batch_sampler": BatchSampler(RandomSampler(data), 8, True)},
        "over a DistributedSampler": {"batch_sampler": BatchSampler(DistributedSampler(data, 1, 0), 8, True)},
        "an ElasticSampler": {"batch_sampler": ElasticSampler(data, batch_size=8, drop_last=True)},
    }[kind]
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(3)}
    for stop in (30, 3, 200, None):  # steps of each run
        torch.manual_seed(stop or 0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        made = accel.optimize(
            model, DataLoader(data, **given), optimizer, elastic=accel.Elastic(checkpoint=tmp_path, **options), **PLAIN
        )
        sampler, steps = made[1].batch_sampler, 0
        while sampler.epoch < 3 and steps != stop:
            for x, y, index in made[1]:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                clock.now += 1e-3 + len(x) * clock.sample_s
                optimizer.step()
                seen[sampler.epoch] += index.tolist()
                steps += 1
                if steps == stop:
                    break
        save_checkpoint(model)
        accel.undo(model)
    assert {epoch: len(samples) for epoch, samples in seen.items()} == dict.fromkeys(range(3), 1000)
    assert all(len(set(samples)) == 1000 for samples in seen.values())

"""A loader whose batch size changes within an epoch: each sample once, and all else as in the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import accel
from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.loader import ContinuousLoader
from accel.elastic.batch_size.loader import EpochBatches, elastic_loader
from accel.errors import InvalidArgument
from tests.accel.elastic.batch_loops import PLAIN
from tests.accel.elastic.test_sample_position import followed, train
from tests.sampling import examples


def batches_of(loader: DataLoader[Any]) -> EpochBatches:
    assert isinstance(loader.batch_sampler, EpochBatches)
    return loader.batch_sampler


@given(
    n=st.integers(1, 60),
    first=st.integers(1, 9),
    changes=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 20)), max_size=4),
    shuffle=st.booleans(),
    workers_run_ahead=st.integers(0, 3),
)
def test_each_epoch_has_each_sample_once_whatever_the_batch_sizes(
    n: int, first: int, changes: list[tuple[int, int]], shuffle: bool, workers_run_ahead: int
) -> None:
    loader = elastic_loader(DataLoader(range(n), batch_size=first, shuffle=shuffle))
    sampler = batches_of(loader)
    wanted = dict(changes)
    for _ in range(2):
        seen: list[int] = []
        for step, batch in enumerate(sampler.consumed(loader)):
            seen += batch.tolist()
            if step in wanted:
                sampler.set_batch_size(wanted[step], delay=sampler.ledger.dealt_ahead + workers_run_ahead)
        assert sorted(seen) == list(range(n))
        assert shuffle or seen == list(range(n))


def test_its_length_is_that_of_the_epoch_also_in_its_midst() -> None:
    loader = elastic_loader(DataLoader(range(100), batch_size=10))
    lengths = []
    for step, _ in enumerate(batches_of(loader).consumed(loader)):
        lengths.append(len(loader))
        if step == 3:
            batches_of(loader).set_batch_size(30)

    assert lengths == [10] * 4 + [6] * 2
    assert len(loader) == 4  # of the next epoch, in batches of 30


def test_the_loader_itself_is_left_alone_and_its_settings_are_taken_over() -> None:
    generator = torch.Generator().manual_seed(5)
    plain = DataLoader(range(20), batch_size=4, shuffle=True, drop_last=True, collate_fn=list, generator=generator)
    loader = elastic_loader(plain)

    assert type(plain.batch_sampler) is BatchSampler
    assert type(plain.sampler) is RandomSampler
    assert (loader.collate_fn, loader.drop_last, loader.dataset) == (list, True, plain.dataset)
    assert loader.sampler is loader.batch_sampler
    assert batches_of(loader).seed == 5
    assert batches_of(loader).drop_last
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(5).get_state())  # nothing drawn


def test_workers_serve_it() -> None:
    loader = elastic_loader(DataLoader(range(40), batch_size=4, num_workers=2))
    seen, sizes = [], []
    for batch in batches_of(loader).consumed(loader):
        seen += batch.tolist()
        sizes.append(len(batch))
        if len(sizes) == 1:
            batches_of(loader).set_batch_size(9)

    assert seen == list(range(40))
    assert sizes[-2:] == [9, 3] or 9 in sizes
    assert sizes[0] == 4


def test_a_loader_that_is_elastic_already_comes_back() -> None:
    plain = DataLoader(range(20), batch_sampler=ElasticSampler(20, batch_size=3))
    assert elastic_loader(plain) is plain
    assert elastic_loader(elastic_loader(DataLoader(range(9)))).batch_size == 1


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class _Own(DataLoader[Any]):
    pass


class _OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(range(8), 4, num_workers=1, in_order=False), r"in_order=False"),
        ([1, 2], "this is a list, not a torch"),
        (DataLoader(_Stream()), "its dataset is iterable"),
        (DataLoader(range(3), batch_size=None), "makes no batches"),
        (DataLoader(range(3), batch_sampler=[[0, 1], [2]]), "a batch sampler of its own, a list"),
        (DataLoader(range(3), batch_sampler=_OwnBatches(range(3), 2, False)), "a batch sampler of its own, a _OwnB"),
        (DataLoader(range(3), batch_sampler=BatchSampler([2, 0], 2, False)), "its order is that of a list"),
        (
            DataLoader(range(3), batch_sampler=BatchSampler(RandomSampler(range(3), num_samples=7), 2, False)),
            "another number",
        ),
        (DataLoader(range(3), batch_sampler=BatchSampler(BatchSampler(range(3), 1, False), 2, False)), "of a BatchSam"),
        (_Own(range(3)), "this is a _Own, a subclass"),
        (ContinuousLoader(DataLoader(range(3))), "this is a ContinuousLoader"),
        (DataLoader(range(3), sampler=WeightedRandomSampler([1.0, 2.0], 3)), "that of a WeightedRandomSampler"),
        (DataLoader(range(3), sampler=RandomSampler(range(3), replacement=True)), "draws with replacement"),
        (DataLoader(range(3), sampler=RandomSampler(range(3), num_samples=2)), "another number"),
        (DataLoader(range(6), sampler=DistributedSampler(range(6), 2, 1)), "is rank 1 of 2, this process 0 of 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_loader_that_keeps_its_batch_size_is_refused(loader: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as error:
        elastic_loader(loader)
    assert "batch_sampler=accel.ElasticSampler" in str(error.value)


def test_a_distributed_sampler_hands_over_seed_and_order() -> None:
    sampler = DistributedSampler(range(10), 1, 0, seed=3)
    plain = DataLoader(range(10), batch_size=4, sampler=sampler)
    loader = elastic_loader(plain)

    assert [b.tolist() for b in batches_of(loader).consumed(loader)] == [b.tolist() for b in plain]
    sampler.set_epoch(1)
    assert [b.tolist() for b in batches_of(loader).consumed(loader)] == [b.tolist() for b in plain]


@pytest.mark.parametrize(
    ("n", "batch", "expected"), [(40, 13, [13, 13, 7, 7]), (41, 8, [8] * 4 + [5, 4]), (9, 8, [5, 4])]
)
def test_no_step_is_left_with_a_single_sample(n: int, batch: int, expected: list[int]) -> None:
    """Batch norm raises at one, in the loop, where the loader's own batch never leaves that."""
    loader = elastic_loader(DataLoader(range(n), batch_size=8))  # type: ignore[arg-type]
    batches_of(loader).set_batch_size(batch)
    assert len(loader) == len(expected)
    assert [len(each) for each in batches_of(loader).consumed(loader)] == expected


# A ContinuousLoader, which by itself counts what an ElasticSampler deals


def elastic(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(40.0)), batch_sampler=ElasticSampler(40, batch_size=4), **options)


def trained(loader: DataLoader[Any], stops: list[int | None]) -> list[Any]:
    """Train on a followed loader, each pass up to a step or to its end; return batches and where the sampler was."""
    sampler: Any = loader.batch_sampler
    seen: list[Any] = []
    proxy = followed(sampler, elastic_loader(loader))
    for stop in stops:
        for step, (batch,) in enumerate(proxy):
            train(proxy)
            seen.append((batch.tolist(), sampler.epoch, sampler.position))
            if step == stop:
                break
    return seen


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from([{"mode": "inline"}, {"mode": "threads", "num_workers": 2}, {"mode": "inline", "device": "cpu"}]),
    st.lists(st.none() | st.integers(0, 9), max_size=4),
)
@example({"mode": "inline", "device": "cpu"}, [9, None])  # the pass left at its end was kept alive, and counted on
def test_batches_of_a_continuous_loader_are_counted_once(options: Any, stops: list[int | None]) -> None:
    """They were counted twice: an error at the second one, or a position that ran at double speed."""
    with ContinuousLoader(elastic(), **options) as loader:
        assert trained(loader, stops) == trained(elastic(), stops)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_continuous_loader_stays_the_users(workers: int, tmp_path: Path) -> None:
    """With workers of the wrapped loader a second one was made around it, which `close` did not reach."""
    model: nn.Module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with ContinuousLoader(elastic(num_workers=workers), mode="fork", num_workers=1) as own:
        assert elastic_loader(own) is own
        model, loader, optimizer = accel.optimize(
            model, own, optimizer, elastic=accel.Elastic(checkpoint=tmp_path), **PLAIN
        )
        positions = []
        for (x,) in loader:
            model(x[:, None]).sum().backward()
            optimizer.step()
            positions.append(own.batch_sampler.position)  # type: ignore[union-attr]
        accel.undo(model)
        assert positions == list(range(4, 41, 4))
        assert own.worker_processes == 1
    assert own.worker_processes == 0

"""A continuous loader must serve what the wrapped loader would, in its order, however batches are made."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes.movable import movable
from tests.dataio.numbers import Numbers, indices, run, same, saved_and_loaded, seeded
from tests.sampling import examples

# -- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("draws", [False, True], ids=["quiet", "draws"])
def test_torchs_own_random_state_is_shared_with_the_loop(engine: dict[str, Any], draws: bool) -> None:
    def epochs(wrap: bool) -> tuple[list[list[int]], Tensor]:
        torch.manual_seed(5)
        loader: Any = DataLoader(Numbers(), 4, shuffle=True)
        if wrap:
            loader = ContinuousLoader(loader, **engine)
        seen = []
        for _ in range(4):
            for batch in loader:
                seen.append(indices(batch))
                if draws:
                    torch.rand(1)
        return seen, torch.get_rng_state()

    (plain, state), (moved, moved_state) = epochs(False), epochs(True)

    assert moved == plain
    assert torch.equal(moved_state, state)


@pytest.mark.sample(3)
@pytest.mark.parametrize("told", ["each", "never", "twos"])
@pytest.mark.parametrize("rank", [0, 2])
def test_distributed_sampler(engine: dict[str, Any], told: str, rank: int) -> None:
    def make() -> tuple[Any, Any]:
        data = Numbers()
        sampler = DistributedSampler(data, num_replicas=3, rank=rank, seed=7)
        step = {"each": 1, "twos": 2, "never": 0}[told]
        return DataLoader(data, 4, sampler=sampler), lambda epoch: sampler.set_epoch(epoch * step)

    plain_loader, plain_epoch = make()
    wrapped, set_epoch = make()
    with ContinuousLoader(wrapped, **engine) as loader:
        assert same(run(loader, 4, set_epoch=set_epoch), run(plain_loader, 4, set_epoch=plain_epoch))


class EveryOther(Sampler[int]):
    """A sampler that the loader knows nothing of, and that draws as it goes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        for index in range(0, self.length, 2):
            yield index + int(torch.randint(2, (1,)))

    def __len__(self) -> int:
        return self.length // 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["own", "weighted", "replacement", "batch", "sequential", "no_batches", "drop_last"])
def test_samplers_of_all_kinds(engine: dict[str, Any], kind: str) -> None:
    def make() -> DataLoader[Any]:
        data = Numbers()
        if kind == "own":
            return DataLoader(data, 4, sampler=EveryOther(50))
        if kind == "weighted":
            return DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 50, 30, generator=seeded()))
        if kind == "replacement":
            return DataLoader(data, 4, sampler=RandomSampler(data, replacement=True, num_samples=70))
        if kind == "batch":
            return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, generator=seeded()), 7, True))
        if kind == "no_batches":
            return DataLoader(data, batch_size=None, shuffle=True, generator=seeded())
        return DataLoader(data, 4, drop_last=kind == "drop_last", collate_fn=torch.stack)

    torch.manual_seed(1)
    plain = run(make(), 3)
    torch.manual_seed(1)
    with ContinuousLoader(make(), **engine) as loader:
        moved = run(loader, 3)

    assert same(moved, plain)


@settings(max_examples=examples(40), deadline=None)
@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 9),
    workers=st.integers(1, 3),
    prefetch=st.integers(1, 4),
    stops=st.lists(st.one_of(st.none(), st.integers(0, 8)), min_size=1, max_size=5),
    drop_last=st.booleans(),
)
def test_any_pattern_of_epochs(
    length: int, batch: int, workers: int, prefetch: int, stops: list[int | None], drop_last: bool
) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(length), batch, shuffle=True, drop_last=drop_last, generator=seeded())

    plain, wrapped = make(), make()
    with ContinuousLoader(wrapped, mode="threads", num_workers=workers, prefetch_factor=prefetch) as loader:
        for stop in stops:
            assert same(run(loader, 1, stop=stop), run(plain, 1, stop=stop))


def test_persistent_workers_draw_their_seed_once(engine: dict[str, Any]) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(), 4, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True)

    with ContinuousLoader(make(), **engine) as loader:
        assert same(run(loader, 3), run(make(), 3))


# -- several passes at once ------------------------------------------------------------------------------------------


# -- the dataset's epoch ---------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("through", ["loader", "dataset", "attribute"])
def test_the_datasets_epoch_reaches_live_workers(engine: dict[str, Any], through: str) -> None:
    data = Numbers()
    with ContinuousLoader(DataLoader(data, 4, shuffle=True, generator=seeded()), **engine) as loader:

        def tell(epoch: int) -> None:
            if through == "loader":
                loader.set_epoch(epoch)
            elif through == "dataset":
                data.set_epoch(epoch)
            else:
                data.epoch = epoch

        seen = run(loader, 5, set_epoch=tell)

    assert [{float(value) for batch in epoch for value in batch[:, 1]} for epoch in seen] == [
        {float(e)} for e in range(5)
    ]


def test_threads_make_nothing_ahead_from_a_dataset_that_will_move() -> None:
    data = Numbers()
    with ContinuousLoader(DataLoader(data, 4), mode="threads", num_workers=1) as loader:
        seen = run(loader, 6, set_epoch=data.set_epoch)
        continuous = loader._core._continuous
        assert continuous is not None

        assert [float(epoch[0][0, 1]) for epoch in seen] == [0, 1, 2, 3, 4, 5]
        # They would read it as it is before it moves. The first move could not be known.
        assert continuous.guesses.failed == 1


def test_a_change_that_can_not_be_sent_starts_the_workers_anew() -> None:
    class Table(Numbers):
        def __init__(self) -> None:
            super().__init__(8)
            self.table = torch.zeros(8)

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([float(index), float(self.table[index])])

    data = Table()
    with ContinuousLoader(DataLoader(data, 4), mode="fork", num_workers=2) as loader:
        run(loader, 1)
        data.table += 3
        again = run(loader, 1)

    assert torch.cat(again[0])[:, 1].tolist() == [3.0] * 8


# -- augmentation ----------------------------------------------------------------------------------------------------


def test_random_numbers_do_not_depend_on_how_batches_are_made() -> None:
    def augmented(mode: Any, workers: int) -> tuple[list[list[Tensor]], Tensor]:
        torch.manual_seed(9)
        with ContinuousLoader(DataLoader(Numbers(51), 4, shuffle=True), mode=mode, num_workers=workers) as loader:
            return run(loader, 3), torch.get_rng_state()

    (inline, state), *others = [augmented("inline", 1), augmented("fork", 1), augmented("fork", 3)]

    assert len({float(value) for epoch in inline for batch in epoch for value in batch[:, 2]}) == 3 * 51
    for seen, end in others:
        assert same(seen, inline)
        assert torch.equal(end, state)


# -- what it is ------------------------------------------------------------------------------------------------------


def test_it_is_a_data_loader_with_the_same_parts() -> None:
    plain = DataLoader(Numbers(), 4, shuffle=True, drop_last=True)
    loader = ContinuousLoader(plain, mode="inline")

    assert isinstance(loader, DataLoader)
    assert len(loader) == len(plain)
    assert loader.dataset is plain.dataset
    assert loader.sampler is plain.sampler
    assert loader.batch_size == 4
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        loader.batch_size = 5


def test_a_pickled_loader_is_one_with_the_same_options() -> None:
    copy = pickle.loads(pickle.dumps(ContinuousLoader(DataLoader(Numbers(), 4), mode="threads", num_workers=3)))

    assert copy.setting == "threads(3)"
    assert next(indices(batch) for batch in copy) == [0, 1, 2, 3]
    copy.close()


class Counting(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(20.0)[:, None])


def test_an_iterable_dataset_is_passed_through() -> None:
    loader = ContinuousLoader(DataLoader(Counting(), 4))
    batches = iter(loader)
    seen = [next(batches), next(batches)]
    state = saved_and_loaded(loader.state_dict())
    assert "left as it is: its dataset is iterable" in loader.explain()
    other = ContinuousLoader(DataLoader(Counting(), 4))
    other.load_state_dict(state)

    assert torch.cat([*seen, *other])[:, 0].tolist() == list(range(20))
    with pytest.raises(ValueError, match="mode='fork' needs a map-style loader"):
        ContinuousLoader(DataLoader(Counting(), 4), mode="fork")


def test_a_device_gets_each_batch_and_the_state_counts_those_handed_over(engine: dict[str, Any]) -> None:
    with ContinuousLoader(DataLoader(Numbers(), 4), device="cpu", **engine) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        assert state["served"] == 3
        assert len(list(batches)) == 10
        assert loader.state_dict()["finished"]
        assert next(batches, None) is None
        loader.load_state_dict(state)
        assert [i for batch in loader for i in indices(batch)] == list(range(12, 50))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mode": "fast"}, ValueError, "mode must be one of auto, inline"),
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1, got 0"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be at least 1, got 0"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ContinuousLoader(DataLoader(Numbers(), 4), **options)


class Filters(DataLoader[Any]):
    """Looks over its batches by an iterator of its own, as those of graph libraries do."""

    def _get_iterator(self) -> Any:
        return (batch + 1 for batch in super()._get_iterator())


def test_a_loader_with_an_iterator_of_its_own_is_passed_through() -> None:
    plain = Filters(Numbers(12), 4)
    assert "Filters overrides _get_iterator" in movable(plain)
    with ContinuousLoader(plain) as loader:
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in plain]
        assert "Filters overrides _get_iterator" in loader.explain()


def test_what_can_not_be_wrapped() -> None:
    with pytest.raises(TypeError, match=r"wraps a torch\.utils\.data\.DataLoader, got list"):
        ContinuousLoader([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ContinuousLoader already"):
        ContinuousLoader(ContinuousLoader(DataLoader(Numbers(), 4)))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pass_in_inference_mode_does_not_make_the_next_epochs_batches_so(workers: int) -> None:
    """They can't be saved for a backward pass, which torch said in the user's call of the model."""
    model = torch.nn.Linear(2, 1)
    plain = DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 2)), 4)
    looked_at = []
    with ContinuousLoader(plain, mode="threads", num_workers=workers) as loader:
        for _ in range(3):
            for (x,) in loader:
                model(x).sum().backward()
            with torch.inference_mode():
                looked_at += [x.is_inference() for (x,) in loader]
    assert looked_at == [True] * 18

"""The sample cache: nothing is handed out that did not come out the same twice, and the first difference ends it."""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accel.dataio import sample_cache
from accel.dataio.loader import ContinuousLoader
from accel.dataio.sample_cache import SampleCache, SampleKeeper


class Counted(Dataset[Any]):
    """Samples that tell their index; counts how often each is fetched."""

    classes = ("a", "b")

    def __init__(self, samples: int = 12) -> None:
        self.fetched = [0] * samples
        self.scale, self.shift = 1.0, 0.0

    def __len__(self) -> int:
        return len(self.fetched)

    def __getitem__(self, index: int) -> Any:
        self.fetched[index] += 1
        return torch.full((2, 3), self.scale * index + self.shift), index


class Many(Counted):
    """Fetches a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.fixture
def checks() -> None:
    """Samples that are kept are fetched again now and then, as ever."""


@pytest.fixture(autouse=True)
def _without_checks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "checks" not in request.fixturenames:
        monkeypatch.setattr(sample_cache, "_CHECKED", 0.0)
        monkeypatch.setattr(SampleKeeper, "_owes_check", lambda self, samples: False)


def epochs(cache: SampleCache, count: int, batch: int = 4) -> list[Any]:
    loader = DataLoader(cache, batch, shuffle=True)
    return [list(loader) for _ in range(count)][-1]


@pytest.mark.parametrize("kind", [Counted, Many])
def test_each_sample_is_fetched_twice_and_no_more(kind: type[Counted]) -> None:
    cache = SampleCache(kind())
    epochs(cache, 2)
    assert cache.stats().kept == 12 and cache.stats().served == 0
    for x, index in epochs(cache, 3):
        assert (x == index[:, None, None]).all()
    assert cache.dataset.fetched == [3] + 11 * [2]  # the first one for its layout, too
    assert cache.stats().served == 36 and cache.stats().kept_bytes == 12 * (24 + 8)


def test_what_is_not_kept_yet_is_fetched_beside_what_is() -> None:
    cache = SampleCache(Counted())
    for _ in range(2):
        cache.__getitems__([1, 3])
    assert [index for _, index in cache.__getitems__([0, 1, 2, 3, 1])] == [0, 1, 2, 3, 1]
    assert cache.stats().served == 3


def test_a_batch_of_a_dataset_that_makes_batches_is_kept_as_a_whole_or_not_at_all() -> None:
    cache = SampleCache(Many())
    for _ in range(2):
        cache.__getitems__([1, 3])
    assert [index for _, index in cache.__getitems__([3, 1])] == [3, 1] and cache.stats().served == 2
    assert [index for _, index in cache.__getitems__([0, 1, 3])] == [0, 1, 3] and cache.stats().served == 2


def test_what_is_written_into_a_sample_does_not_reach_the_cache() -> None:
    cache = SampleCache(Counted())
    for _ in range(4):
        (x, _), (y, _) = cache.__getitems__([1, 2])
        assert (x == 1).all() and (y == 2).all()
        x.zero_()


class Odd(Counted):
    """One sample in three has another shape."""

    def __getitem__(self, index: int) -> Any:
        x, label = super().__getitem__(index)
        return (x[:, : 2 if index % 3 == 1 else 3], label) if index % 3 == 1 else (x, label)


def test_samples_of_another_shape_are_fetched_each_time() -> None:
    cache = SampleCache(Odd())
    for _ in range(4):
        assert [tuple(x.shape) for x, _ in cache.__getitems__([0, 1, 2])] == [(2, 3), (2, 2), (2, 3)]
    assert cache.dataset.fetched[:3] == [3, 4, 2]
    assert cache.stats().kept == 2 and not cache.dropped


@pytest.mark.parametrize("indices", [[-1, 0], [np.int64(1), 2], [torch.tensor(1)], (1, 2), [2**70]])
def test_indices_that_are_no_places_are_passed_on(indices: Any) -> None:
    class Takes(Counted):
        def __getitem__(self, index: Any) -> Any:
            return torch.ones(2), int(index) % 12

    cache = SampleCache(Takes())
    for _ in range(4):
        assert [label for _, label in cache.__getitems__(indices)] == [int(index) % 12 for index in indices]
    assert cache.stats().kept <= 1 and not cache.dropped


def test_what_the_dataset_raises_comes_out_as_it_is() -> None:
    cache = SampleCache(Counted())
    for _ in range(3):
        with pytest.raises(IndexError) as raised:
            cache.__getitems__([3, 40])
    assert raised.value._accel_sample == 40  # type: ignore[attr-defined]
    assert not cache.dropped


# -- what ends it ------------------------------------------------------------------------------------------------------


class Noise(Counted):
    def __init__(self, noise: Callable[[], Any]) -> None:
        super().__init__()
        self.noise = noise

    def __getitem__(self, index: int) -> Any:
        x, label = super().__getitem__(index)
        return x + self.noise(), label


OWN = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("noise", "why"),
    [
        (lambda: torch.rand(()), "draws random numbers"),
        (lambda: 0.0 * random.random(), "draws random numbers"),  # of no consequence
        (lambda: float(np.random.rand()), "draws random numbers"),
        (lambda: float(OWN.random()), "came out differently"),
    ],
    ids=["torch", "python", "numpy", "its own"],
)
def test_a_dataset_that_draws_is_found_out_before_anything_is_handed_out(noise: Callable[[], Any], why: str) -> None:
    before = torch.get_rng_state(), random.getstate()
    cache = SampleCache(Noise(noise))
    assert before[0].equal(torch.get_rng_state()) and before[1] == random.getstate()
    epochs(cache, 3)
    assert why in cache.dropped
    assert cache.stats().served == cache.stats().kept == 0
    assert sum(cache.dataset.fetched) == 37


@pytest.mark.usefixtures("checks")
def test_some_samples_are_fetched_all_the_same_in_each_epoch() -> None:
    cache = SampleCache(Counted(100))
    epochs(cache, 10)
    assert 8 <= cache.stats().checked <= 30
    assert not cache.dropped


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("kind", [Counted, Many])
def test_the_first_difference_drops_everything_and_the_fresh_samples_are_handed_out(kind: type[Counted]) -> None:
    cache = SampleCache(kind())
    epochs(cache, 3, batch=12)
    cache.dataset.scale, cache.dataset.shift = 2.0, 1.0  # sample 0, too, is another now
    for x, index in epochs(cache, 1, batch=12):
        assert (x == 2 * index[:, None, None] + 1).all()
    assert "came out differently when it was fetched again" in cache.dropped
    assert epochs(cache, 1)[0][0].max() <= 23 and cache.stats().kept == 0


@pytest.mark.usefixtures("checks")
def test_checks_draw_nothing_from_the_programs_generators() -> None:
    cache = SampleCache(Counted(64))
    for _ in range(2):
        cache.__getitems__(list(range(64)))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
    for _ in range(20):
        cache.__getitems__(list(range(64)))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
    assert before[0].equal(after[0]) and before[1:] == after[1:]
    assert cache.stats().checked > 0


def test_a_batch_that_is_no_list_of_samples_is_handed_through() -> None:
    class Finished(Counted):
        def __getitems__(self, indices: list[int]) -> Any:
            return torch.tensor(indices)

    cache = SampleCache(Finished())
    assert cache.__getitems__([1, 2]).tolist() == [1, 2]  # type: ignore[attr-defined]
    assert "doesn't return a list" in cache.dropped


def test_after_forget_all_is_begun_anew() -> None:
    cache = SampleCache(Counted())
    epochs(cache, 3)
    cache.dataset.scale = 3.0
    cache.forget()
    for _ in range(3):
        assert (cache[2][0] == 6.0).all()
    assert not cache.dropped and cache.stats().kept == 1


def test_an_epoch_that_the_dataset_is_told_begins_anew() -> None:
    class Staged(Counted):
        def set_epoch(self, epoch: int) -> None:
            self.scale = float(epoch)

    cache = SampleCache(Staged())
    loader = ContinuousLoader(DataLoader(cache, 4), mode="inline")
    for epoch in range(1, 6):
        loader.set_epoch(epoch)
        assert all((x == epoch * index[:, None, None]).all() for x, index in loader)
    assert not cache.dropped and cache.stats().served == 0


def test_a_closed_cache_fetches() -> None:
    cache = SampleCache(Counted())
    epochs(cache, 3)
    cache.close()
    assert cache.dropped == "it was closed" and cache.stats().kept_bytes == 0
    assert (cache[3][0] == 3.0).all()


def test_a_cache_that_does_not_serve_keeps_on_noting() -> None:
    cache = SampleCache(Counted())
    cache.cache_book.notes["serves"] = False
    epochs(cache, 3)
    assert cache.stats().kept == 12 and cache.stats().served == 0
    assert sum(cache.dataset.fetched) == 37
    cache.cache_book.notes["serves"] = True
    epochs(cache, 3)
    assert cache.stats().served == 36


# -- memory ------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_fetched_each_time() -> None:
    cache = SampleCache(Counted(), memory=5 * 32 + 31)
    epochs(cache, 4)
    assert cache.cache_book.places == cache.stats().kept == 5
    assert cache.dataset.fetched == [3, 2, 2, 2, 2] + 7 * [4]


def test_nothing_more_is_kept_once_memory_has_become_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    left = 1 << 20
    monkeypatch.setattr(sample_cache, "available_memory", lambda: left)
    monkeypatch.setattr(sample_cache, "_LOOK_AFTER", 4 * 32)
    cache = SampleCache(Counted())
    left = 1 << 18
    for index in 2 * list(range(12)):
        cache[index]
    assert cache.stats().kept == 3 and not cache.dropped


def test_samples_in_a_file_leave_nothing_behind(tmp_path: Path) -> None:
    cache = SampleCache(Counted(), folder=tmp_path)
    assert not list(tmp_path.iterdir())
    epochs(cache, 3)
    assert cache.stats().served == 12 and cache.stats().kept == 12


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"memory": 0}, ValueError, "memory must be at least 1 byte, got 0"),
        ({"memory": 31}, ValueError, "not one sample of 32 bytes fits into memory=31 bytes"),
        ({"folder": "/nowhere/at/all"}, OSError, "/nowhere/at/all"),
    ],
)
def test_arguments_that_can_not_be(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SampleCache(Counted(), **options)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([1])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("dataset", "error", "text"),
    [
        (iter([1]), TypeError, "a length and indices, got list_iterator"),
        (Endless(), TypeError, "a length and indices, got Endless"),
        ([], ValueError, "the dataset is empty"),
        ([object()], ValueError, "samples can't be kept: one holds a builtins.object"),
        (SampleCache([1]), ValueError, "is a SampleCache already"),
    ],
)
def test_datasets_that_can_not_be_kept(dataset: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SampleCache(dataset)


# -- other processes and copies ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_processes_share_what_is_kept_and_why_it_ended() -> None:
    cache = SampleCache(Counted())

    def elsewhere(function: Callable[[], Any]) -> None:
        pid = os.fork()
        if not pid:
            function()
            os._exit(0)
        os.waitpid(pid, 0)

    elsewhere(lambda: cache.__getitems__([1, 2]))
    elsewhere(lambda: cache.__getitems__([2, 1]))
    assert cache.stats().kept == 2
    assert (cache[2][0] == 2.0).all() and cache.dataset.fetched[2] == 0
    elsewhere(lambda: cache.cache_book.give_up(sample_cache._DIFFERS, 7))
    assert cache.dropped.startswith("sample 7 came out differently")
    assert (cache[2][0] == 2.0).all() and cache.dataset.fetched[2] == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("wrap", [lambda loader: loader, ContinuousLoader], ids=["torch", "continuous"])
def test_a_loaders_workers_share_what_is_kept_across_epochs(wrap: Callable[[Any], Any]) -> None:
    cache = SampleCache(Counted())
    loader = wrap(DataLoader(cache, 4, shuffle=True, num_workers=2, multiprocessing_context="fork"))
    for _ in range(4):
        for x, index in loader:
            assert (x == index[:, None, None]).all()
    assert cache.stats().kept == 12 and cache.stats().served >= 12
    assert not cache.dropped
    if isinstance(loader, ContinuousLoader):
        loader.close()


@pytest.mark.parametrize("again", [copy.copy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_keeps_nothing_and_fetches(again: Callable[[Any], Any]) -> None:
    cache = SampleCache(Counted())
    epochs(cache, 3)
    other = again(cache)
    assert (other[4][0] == 4.0).all() and "nothing is kept" in other.dropped
    assert other.stats().kept == 0 and len(other) == 12


def test_it_answers_as_the_dataset() -> None:
    cache = SampleCache(Counted())
    assert len(cache) == 12 and cache.classes == ("a", "b") and isinstance(cache, Dataset)
    with pytest.raises(AttributeError, match="wings"):
        _ = cache.wings


@pytest.mark.parametrize("declares", [True, False, None])
def test_threads_may_read_it_if_they_may_read_the_dataset(declares: bool | None) -> None:
    dataset: Any = Counted()
    if declares is not None:
        dataset.thread_safe = declares
    assert SampleCache(dataset).thread_safe is (declares is not False)


def test_a_sample_that_comes_twice_in_a_batch_is_noted_twice() -> None:
    cache = SampleCache(Counted())
    cache.__getitems__([3, 3, 5])
    assert cache.stats().kept == 1


def test_an_attribute_that_is_set_is_the_dataset_s() -> None:
    """`loader.dataset.transform = …` landed on the cache, and training went on with the old samples."""

    class Scaled(Dataset[Tensor]):
        scale = 1.0

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([index * self.scale])

    data = Scaled()
    cache = SampleCache(data)
    for _ in range(3):
        cache.__getitems__([0, 1, 2, 3])
    assert cache.stats().kept == 4
    cache.scale = 2.0
    assert data.scale == 2.0 == cache.scale
    assert [float(each) for each in cache.__getitems__([1, 3])] == [2.0, 6.0]
    copied = pickle.loads(pickle.dumps(SampleCache(TensorDataset(torch.ones(2, 1)))))
    copied.tensors = (torch.zeros(2, 1),)
    assert float(copied[0][0]) == 0.0

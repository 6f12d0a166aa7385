"""The data set of images in the continuous loader: the plain loader's batches, made ahead, by workers that stay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from accel.dataio.dataset.numbers import Forecast, at_epoch, dataset_epoch, numbers_of, set_numbers
from accel.dataio.fetching.fetch import Fetch
from accel.dataio.image_geometry import RandomResizedCrop
from accel.dataio.images import Epoch, ImageDataset, collate_images
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes.proxy import Fetching
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies.loader_workers import LoaderWorkers
from tests.dataio.numbers import Numbers, seeded
from tests.dataio.pictures import jpeg

pytest.importorskip("simplejpeg", reason="needs simplejpeg, which the extra `images` brings")

Batch = tuple[Tensor, Tensor]
AHEAD = [("threads", 1), ("threads", 3), ("fork", 1), ("fork", 2)]
MODES = [("inline", 1), *AHEAD, ("auto", None)]
NUMBERS = {"evenly": [0, 1, 2, 3], "from_3": [3, 4, 5, 6], "in_jumps": [0, 7, 2, 2], "late": [0, 0, 1, 2]}


@pytest.fixture(scope="module")
def samples() -> list[tuple[bytes, int]]:
    return [(jpeg(30 + 7 * i, 60 - i, seed=i), i) for i in range(13)]


def make(samples: Any) -> ImageDataset:
    # Two threads a batch, whatever the machine has: the pool is used.
    return ImageDataset(samples, RandomResizedCrop(16), seed=1, threads=2)


def loader_of(dataset: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 3, shuffle=True, generator=seeded(), collate_fn=collate_images)


def run(loader: Any, dataset: ImageDataset, numbers: list[int], each: Callable[[], Any] = int) -> list[list[Batch]]:
    seen = []
    for number in numbers:
        dataset.set_epoch(number)
        seen.append([(images.clone(), labels.clone()) for images, labels in loader])
        each()
    return seen


def assert_same(found: list[list[Batch]], expected: list[list[Batch]]) -> None:
    for ours, plain in zip(found, expected, strict=True):
        for (images, labels), (plain_images, plain_labels) in zip(ours, plain, strict=True):
            assert labels.tolist() == plain_labels.tolist()
            assert torch.equal(images, plain_images)
            assert images.stride() == plain_images.stride()


def wrong_guesses(loader: ContinuousLoader) -> int:
    continuous = loader._core._continuous
    assert continuous is not None
    return continuous.guesses.failed


@pytest.mark.sample(3)
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize(("mode", "workers"), MODES)
def test_batches_are_the_plain_loaders(samples: Any, mode: Any, workers: int | None, numbers: str) -> None:
    plain, dataset = make(samples), make(samples)
    expected = run(loader_of(plain), plain, NUMBERS[numbers])
    with ContinuousLoader(loader_of(dataset), mode=mode, num_workers=workers) as loader:
        assert_same(run(loader, dataset, NUMBERS[numbers]), expected)


def test_batches_are_the_plain_loaders_while_ways_are_tried(samples: Any) -> None:
    plain, dataset = make(samples), make(samples)
    expected = run(loader_of(plain), plain, list(range(20)))
    with ContinuousLoader(loader_of(dataset), mode="auto") as loader:
        assert_same(run(loader, dataset, list(range(20))), expected)


@pytest.mark.parametrize(("mode", "workers"), [*AHEAD, pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_each_next_epoch_is_made_ahead_by_the_same_workers(samples: Any, mode: Any, workers: int) -> None:
    plain, dataset = make(samples), make(samples)
    expected = run(loader_of(plain), plain, list(range(5)))
    with ContinuousLoader(loader_of(dataset), mode=mode, num_workers=workers) as loader:
        pids: list[list[int]] = []

        def look() -> None:
            pids.append([worker.pid for worker in loader._core.worker_processes()])

        found = run(loader, dataset, list(range(5)), look)

        assert_same(found, expected)
        assert pids == [pids[0]] * 5
        assert wrong_guesses(loader) == 0


@pytest.mark.parametrize(("mode", "workers"), AHEAD)
def test_a_part_of_it_is_made_ahead_too(samples: Any, mode: Any, workers: int) -> None:
    plain, dataset, part = make(samples), make(samples), [2, 4, 6, 8, 10, 12, 0]
    expected = run(loader_of(Subset(plain, part)), plain, list(range(4)))
    with ContinuousLoader(loader_of(Subset(dataset, part)), mode=mode, num_workers=workers) as loader:
        assert_same(run(loader, dataset, list(range(4))), expected)
        assert wrong_guesses(loader) == 0


def test_the_next_epochs_batches_are_under_way_when_one_ends(samples: Any) -> None:
    dataset = make(samples)
    with ContinuousLoader(loader_of(dataset), mode="threads", num_workers=2) as loader:
        run(loader, dataset, [0])
        continuous = loader._core._continuous
        assert continuous is not None

        following = continuous.epoch.following
        assert following is not None
        assert following.waiting == 4
        assert dataset.epoch == 0


@pytest.mark.parametrize(("mode", "workers"), AHEAD)
def test_an_epoch_that_never_moves_costs_one_guess(samples: Any, mode: Any, workers: int) -> None:
    dataset = make(samples)
    with ContinuousLoader(loader_of(dataset), mode=mode, num_workers=workers) as loader:
        run(loader, dataset, [0, 0, 0, 0])

        assert wrong_guesses(loader) == 1


def test_optimize_may_move_it(samples: Any) -> None:
    dataset = make(samples)
    fetching = Fetching()
    model = nn.Linear(1, 1)
    run_ = Run(model, loader_of(dataset), [], Gate(model, []), fetching, cores=2)
    strategy = LoaderWorkers()

    assert strategy.refusal(run_) == ""
    assert strategy.settings(run_) == ["threads=1", "threads=2", 1, 2]
    for setting in strategy.settings(run_):
        strategy.enable(run_, setting)  # raises if a batch differs
        assert fetching.workers is not None
        fetching.workers.close()


class Caching(Dataset[Tensor]):
    """Keeps what it has read, and says that threads may do that together."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return self.kept.setdefault(index, torch.tensor(index))


class Drawing(Dataset[Tensor]):
    """Keeps a count, then draws."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        return torch.rand(1)


def first_batches(loader: ContinuousLoader) -> Iterator[None]:
    for _ in zip(range(5), loader, strict=False):
        yield


@pytest.mark.parametrize(
    ("dataset", "told", "attribute", "finding"),
    [
        (Caching, None, None, "fetching a sample changes the dataset"),
        (Caching, True, None, ""),
        (Caching, None, True, ""),
        (Caching, False, True, "as requested (thread_safe=False)"),
        (Drawing, True, None, "fetching a sample draws random numbers"),
    ],
)
def test_who_says_that_threads_may_read_together_is_believed(
    dataset: Any, told: bool | None, attribute: bool | None, finding: str
) -> None:
    data = dataset()
    if attribute is not None:
        data.thread_safe = attribute
    with ContinuousLoader(DataLoader(data, 4), mode="auto", thread_safe=told) as loader:
        list(first_batches(loader))

        assert finding in loader.explain()
        assert ("not used" in loader.explain()) == bool(finding)


# The epoch of the images' data set: told by value to some copies, by shared memory to others


def copied(epoch: Epoch) -> Epoch:
    """Return a copy as a worker process has it: values of its own, the same shared memory."""
    return copy.copy(epoch)


def test_a_copy_that_is_sent_nothing_follows() -> None:
    epoch = Epoch()
    kept = copied(epoch)
    for number in (1, 2, 7, 0, 0, 3):
        epoch.set(number)
        assert (epoch.number, kept.number) == (number, number)


def test_a_copy_that_was_sent_the_next_epoch_is_ahead() -> None:
    epoch = Epoch()
    kept = copied(epoch)
    set_numbers(kept, numbers_of(epoch.at(1)))

    assert (epoch.number, kept.number) == (0, 1)
    epoch.set(1)
    assert (epoch.number, kept.number) == (1, 1)


def test_a_copy_that_was_sent_a_wrong_epoch_is_corrected() -> None:
    epoch = Epoch()
    kept = copied(epoch)
    set_numbers(kept, numbers_of(epoch.at(1)))
    epoch.set(5)
    set_numbers(kept, numbers_of(epoch))

    assert kept.number == 5


def test_one_in_another_epoch_and_a_deep_copy_are_apart() -> None:
    epoch = Epoch(3)
    for other in (epoch.at(4), copy.deepcopy(epoch)):
        other.set(9)
        assert epoch.number == 3
        assert other._shared.is_shared()


class Viewed(Numbers):
    def at_epoch(self, epoch: int) -> Viewed:
        other = Viewed(self.length)
        other.epoch = epoch
        return other


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(Subset(d, [0, 1]), [1])], ids=["itself", "parts"])
def test_a_dataset_in_another_epoch(wrap: Any) -> None:
    data = wrap(Viewed())
    fetch = Fetch(data, default_collate, batched=True)
    forecast = Forecast(fetch)
    view = forecast.view(data, forecast.next(numbers_of(data)))

    assert (dataset_epoch(data), dataset_epoch(view), dataset_epoch(at_epoch(data, 5))) == (0, 1, 5)
    assert view[0].tolist() == [float(data[0][0]), 1.0, 0.0]


def test_a_dataset_that_moves_otherwise_than_its_view_is_not_had() -> None:
    data = Viewed()
    fetch = Fetch(data, default_collate, batched=True)
    forecast, before = Forecast(fetch), numbers_of(data)
    data.epoch, data.length = 1, 49
    forecast.saw(before, numbers_of(data))

    assert forecast.view(data, forecast.next(numbers_of(data))) is None

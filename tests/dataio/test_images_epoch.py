"""The epoch of the images' data set: told by value to some copies, by shared memory to others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch.utils.data import Subset, default_collate

from accel.dataio.dataset.numbers import Forecast, at_epoch, dataset_epoch, numbers_of, set_numbers
from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.fetching.fetch import Fetch
from accel.dataio.images import Epoch
from tests.dataio.numbers import Numbers


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


def test_a_change_can_be_sent_and_is_seen_once() -> None:
    epoch = Epoch()
    watch = DatasetWatch(Fetch(epoch, list, batched=True))
    epoch.set(0)
    assert not watch.changed(thoroughly=True)
    epoch.set(1)
    assert watch.changed() and not watch.changed(thoroughly=True, numbers=False)
    assert numbers_of(epoch) == numbers_of(Epoch().at(1))


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


@pytest.mark.parametrize(
    "data", [Numbers(), Subset(Numbers(), [1]), [1, 2], None], ids=["dataset", "subset", "list", "none"]
)
def test_others_can_not_be_had_so(data: Any) -> None:
    assert dataset_epoch(data) is None
    fetch = Fetch(data, default_collate, batched=True)
    assert Forecast(fetch).view(data, numbers_of(data)) is None


def test_a_dataset_that_moves_otherwise_than_its_view_is_not_had() -> None:
    data = Viewed()
    fetch = Fetch(data, default_collate, batched=True)
    forecast, before = Forecast(fetch), numbers_of(data)
    data.epoch, data.length = 1, 49
    forecast.saw(before, numbers_of(data))

    assert forecast.view(data, forecast.next(numbers_of(data))) is None

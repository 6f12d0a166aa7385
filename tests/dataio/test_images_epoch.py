"""The epoch of the images' data set: told by value to some copies, by shared memory to others."""

from __future__ import annotations

import copy

from accel.dataio.dataset.numbers import Numbers, numbers_of, set_numbers
from accel.dataio.dataset.watch import DatasetWatch
from accel.dataio.fetching.fetch import Fetch
from accel.dataio.image.epoch import Epoch

NEXT: Numbers = {("_number",): 1, ("_changes",): 1}
"""What an epoch holds once it has been set to 1."""


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
    set_numbers(kept, NEXT)

    assert (epoch.number, kept.number) == (0, 1)
    epoch.set(1)
    assert (epoch.number, kept.number) == (1, 1)


def test_a_copy_that_was_sent_a_wrong_epoch_is_corrected() -> None:
    epoch = Epoch()
    kept = copied(epoch)
    set_numbers(kept, NEXT)
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
    assert numbers_of(epoch) == NEXT


def test_a_deep_copy_is_apart() -> None:
    epoch = Epoch()
    other = copy.deepcopy(epoch)
    other.set(9)
    assert epoch.number == 0
    assert other._shared.is_shared()

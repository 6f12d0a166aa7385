"""The numbers and texts that a dataset has as attributes: what live worker processes are sent between two epochs.

Those of objects that it holds count too, `dataset.transform.strength`, three levels deep. A number
that moved by the same step at two epochs running, as an epoch counter does, is expected to move so
again.

Threads read the loop's own dataset, which is still in the epoch before. So a dataset may offer
`epoch`, a number, and `at_epoch(epoch)`, which returns what reads the same samples as the dataset
itself after `set_epoch(epoch)`, and leaves the dataset as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import Subset

from accel.dataio.dataset.reach import is_code, native, own_attributes
from accel.profiler.interruptions import ours

if TYPE_CHECKING:
    from accel.dataio.fetching.fetch import Fetch

Numbers = dict[tuple[str, ...], Any]
"""By the names of the attributes that lead to each from the dataset on."""
Owner = tuple[tuple[str, ...], dict[str, Any], Collection[str]]
"""The path to an object, its attributes, and the names of those that are none of anybody's business."""

_KINDS = frozenset({int, float, bool, str})
_DEPTH, _MOST = 3, 1000


def numbers_of(dataset: Any) -> Numbers:
    return numbers_in(owners(dataset))


def numbers_in(owned: Iterable[Owner]) -> Numbers:
    """Return the numbers and texts among the attributes of some objects."""
    return {
        (*path, name): value
        for path, attributes, hidden in owned
        for name, value in attributes.items()
        if type(value) in _KINDS and name not in hidden
    }


def owners(dataset: Any) -> list[Owner]:
    """Return the objects whose numbers count: the dataset, and plain objects of Python that it holds."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), _inner(dataset))]
    owned: list[Owner] = []
    seen = set[int]()
    while waiting and len(seen) < _MOST:
        path, thing = waiting.pop(0)
        attributes = own_attributes(thing)
        if (
            attributes is None
            or id(thing) in seen
            or is_code(thing)
            or isinstance(thing, Tensor)
            or native(type(thing))
        ):
            continue
        seen.add(id(thing))
        hidden = getattr(type(thing), "accel_hides", ())
        owned.append((path, attributes, hidden))
        if len(path) + 1 < _DEPTH:
            waiting += [((*path, name), value) for name, value in attributes.items() if name not in hidden]
    return owned


def is_number(thing: Any) -> bool:
    return type(thing) in _KINDS


def set_numbers(dataset: Any, numbers: Numbers) -> None:
    """Set numbers in a copy of a dataset, past any `__setattr__`, as they were read."""
    for path, value in numbers.items():
        target = _inner(dataset)
        for name in path[:-1]:
            target = object.__getattribute__(target, name)
        attributes = own_attributes(target)
        assert attributes is not None
        attributes[path[-1]] = value


def differing(old: Numbers, new: Numbers) -> Numbers | None:
    """Return the numbers that are to be sent to a copy that has `old`; None if sending is not enough."""
    if old.keys() - new.keys():
        return None
    return {path: value for path, value in new.items() if path not in old or not _same(old[path], value)}


def _same(old: Any, new: Any) -> bool:
    # True is not 1, and a NaN is itself.
    return type(old) is type(new) and (old == new or (old != old and new != new))


class Forecast:
    """Expect a dataset's next numbers from how they moved between the last epochs."""

    def __init__(self, fetch: Fetch) -> None:
        self._steps: dict[tuple[str, ...], int] = {}
        if (epoch := dataset_epoch(fetch.dataset)) is not None:
            self.saw(numbers_of(fetch.dataset), numbers_of(at_epoch(fetch.dataset, epoch + 1)))

    def saw(self, old: Numbers, new: Numbers) -> None:
        """Record how the numbers changed from one epoch's beginning to the next one's."""
        whole = {path: value for path, value in new.items() if type(value) is int and type(old.get(path)) is int}
        self._steps = {path: value - old[path] for path, value in whole.items() if value != old[path]}

    def next(self, now: Numbers) -> Numbers:
        return {**now, **{path: now[path] + step for path, step in self._steps.items() if path in now}}

    def view(self, dataset: Any, expected: Numbers) -> Any:
        """Return the dataset as it is expected to be, and leave itself alone; None if that can't be had."""
        epoch = dataset_epoch(dataset)
        if epoch is None:
            return None
        # Its epoch is one of the numbers that moved; by how much, the comparison shows.
        views = (at_epoch(dataset, epoch + step) for step in set(self._steps.values()))
        return next((view for view in views if numbers_of(view) == expected), None)


# -- the epoch ---------------------------------------------------------------------------------------------------------


def dataset_epoch(dataset: Any) -> int | None:
    """Return the epoch of a dataset that can be had as in another one; None for any other dataset."""
    inner = _inner(dataset)
    epoch = declared(inner, "epoch")
    return epoch if type(epoch) is int and callable(declared(inner, "at_epoch")) else None


def declared(dataset: Any, name: str) -> Any:
    """Return an attribute of a dataset, None if there is none, whatever its `__getattr__` or a property raises."""
    try:
        return getattr(dataset, name)
    except ours():
        return None


def at_epoch(dataset: Any, epoch: int) -> Any:
    """Return a dataset as it will be in `epoch`, with the `Subset`s around it."""
    if type(dataset) is Subset:
        return Subset(at_epoch(dataset.dataset, epoch), dataset.indices)
    return dataset.at_epoch(epoch)


def _inner(dataset: Any) -> Any:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset

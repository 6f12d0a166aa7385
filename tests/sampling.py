"""`@pytest.mark.sample(n)`: by default a test runs on a share of its cases, and on all of them with `make slow`.

    @pytest.mark.sample(3)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", SIZES)
    def test_…(dtype, size): ...

Each value of each parameter is in at least one of the cases that stay, and at least one case in `n` stays; with
`every_value=False`, for lists whose cases overlap, only the latter. Which ones depends on their names alone, so that
they are the same in each run.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def mark_the_rest_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that the default run leaves out."""
    cases: defaultdict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sample") and not _is_slow(item):
            cases[item.parent, item.originalname].append(item)
    for of_a_test in cases.values():
        marker = next(of_a_test[0].iter_markers("sample"))
        covers = marker.kwargs.get("every_value", True)
        values = [_values(item) if covers else set() for item in of_a_test]
        stay = sample(values, [item.name for item in of_a_test], *marker.args)
        for number, item in enumerate(of_a_test):
            if number not in stay:
                item.add_marker(pytest.mark.slow)


def sample(values: Sequence[set[Any]], names: Sequence[str], one_in: int) -> set[int]:
    """Return the numbers of the cases that stay.

    Args:
        values: of the parameters of each case.
        names: of the cases, in the same order.
        one_in: at least one case in so many stays.
    """
    order = sorted(range(len(names)), key=lambda number: zlib.crc32(names[number].encode()))
    uncovered = set().union(*values)
    stay: set[int] = set()
    while uncovered:
        best = max(order, key=lambda number: len(values[number] & uncovered))
        stay.add(best)
        uncovered -= values[best]
    others = [number for number in order if number not in stay]
    return stay.union(others[: max(0, math.ceil(len(names) / one_in) - len(stay))])


def examples(usual: int) -> int:
    """Return how many examples a property test tries: `usual` by `make slow`, and a quarter by default."""
    return max(1, usual * settings.default.max_examples // 100)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None or item.get_closest_marker("gpu") is not None


def _values(item: pytest.Function) -> set[Any]:
    callspec = getattr(item, "callspec", None)
    return {(name, id(value)) for name, value in callspec.params.items()} if callspec is not None else set()

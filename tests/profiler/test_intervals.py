"""Arithmetic on stretches of time, against one that counts unit cells."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.profiler.trace.events import Work
from accel.profiler.trace.intervals import Interval, clip, length, minus, parents, starved, union

POINTS = st.integers(0, 40)  # few enough points that ends meet, intervals repeat and some are empty
INTERVALS = st.lists(st.tuples(POINTS, POINTS).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=12)


def cells(intervals: list[Interval]) -> set[int]:
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(INTERVALS)
def test_a_union_covers_the_same_in_disjoint_pieces(intervals: list[Interval]) -> None:
    merged = union(intervals)

    assert cells(merged) == cells(intervals)
    assert all(start < end for start, end in merged)
    assert all(before[1] < after[0] for before, after in pairwise(merged))
    assert length(intervals) == len(cells(intervals))


@given(INTERVALS, INTERVALS)
def test_what_holes_leave_is_the_difference(intervals: list[Interval], holes: list[Interval]) -> None:
    left = minus(intervals, holes)

    assert cells(left) == cells(intervals) - cells(holes)
    assert left == union(left)


@given(INTERVALS, POINTS, POINTS)
def test_clipping_keeps_what_is_inside(intervals: list[Interval], one: int, other: int) -> None:
    window = (float(min(one, other)), float(max(one, other)))

    assert cells(clip(intervals, window)) == cells(intervals) & cells([window])


@given(INTERVALS)
def test_the_parent_is_the_innermost_span_that_holds_it(spans: list[Interval]) -> None:
    def outside(inner: int) -> list[tuple[float, float, int]]:
        key = (spans[inner][0], -spans[inner][1], inner)
        holding = ((start, -end, index) for index, (start, end) in enumerate(spans) if end >= spans[inner][1])
        return [other for other in holding if other < key]

    expected = [max(outside(index), default=(0.0, 0.0, -1))[2] for index in range(len(spans))]
    assert parents(spans) == expected


def test_parents_of_calls_in_calls() -> None:
    outer, inner, leaf, next_one = (0.0, 10.0), (1.0, 6.0), (2.0, 3.0), (10.0, 12.0)

    assert parents([leaf, outer, inner, next_one]) == [2, -1, 1, -1]


@pytest.mark.parametrize(
    ("launch", "waited"),
    [
        pytest.param(12.0, 10.0, id="launched in the gap: the host was late for all of it"),
        pytest.param(10.0, 10.0, id="launched as the gap began"),
        pytest.param(9.0, 0.0, id="queued before: it waited for something else"),
        pytest.param(None, 0.0, id="its launch was not seen"),
    ],
)
def test_a_gap_is_the_hosts_if_the_queue_was_empty(launch: float | None, waited: float) -> None:
    runs = [Work(name="", start=0, end=10, launch=-5), Work(name="", start=20, end=30, launch=launch)]

    assert length(starved(runs, (0.0, 30.0))) == waited


def test_another_streams_work_fills_a_gap() -> None:
    runs = [
        Work(name="", start=0, end=10, launch=0),
        Work(name="", start=5, end=18, launch=1),
        Work(name="", start=20, end=30, launch=19),
    ]

    assert starved(runs, (0.0, 30.0)) == [(18, 20)]


def test_what_precedes_the_first_run_and_what_follows_the_last_one_do_not_count() -> None:
    first = Work(name="", start=4, end=6, launch=3)
    assert starved([first], (0.0, 100.0)) == []
    assert starved([], (0.0, 100.0)) == []
    assert starved([first, Work(name="", start=120, end=130, launch=119)], (0.0, 100.0)) == []


@given(INTERVALS, st.lists(st.floats(0, 40), min_size=12, max_size=12))
def test_no_more_is_waited_than_is_idle(intervals: list[Interval], launches: list[float]) -> None:
    runs = [
        Work(name="", start=start, end=end, launch=launch)
        for (start, end), launch in zip(intervals, launches, strict=False)
    ]

    assert length(starved(runs, (0.0, 40.0))) <= 40.0 - length(intervals)

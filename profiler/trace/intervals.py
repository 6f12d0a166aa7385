"""Arithmetic on time intervals: union, difference, idle time, nesting.

All times are in one unit, on one clock; an interval is (start, end) with start ≤ end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals merged into disjoint ones, in order; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return how much time the intervals cover, overlaps counted once."""
    return sum(end - start for start, end in union(intervals))


def minus(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """Return the parts of `intervals` that none of the `holes` covers, disjoint and in order."""
    rest: list[Interval] = []
    cuts = union(holes)
    first = 0
    for start, end in union(intervals):
        while first < len(cuts) and cuts[first][1] <= start:
            first += 1
        for hole_start, hole_end in cuts[first:]:
            if hole_start >= end:
                break
            if hole_start > start:
                rest.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            rest.append((start, end))
    return rest


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of the intervals inside the window, in the given order; what lies outside vanishes."""
    low, high = window
    parts = ((max(start, low), min(end, high)) for start, end in intervals)
    return [(start, end) for start, end in parts if start < end]


def starved(works: Iterable[Any], window: Interval) -> list[Interval]:
    """Return when the idle device waited for a launch inside the window, by its pieces of work.

    A gap counts if what ends it was launched after the gap began: the queue was empty and the host was late. A gap
    whose next run had been queued before (it waited for another stream, or for the launch to arrive) does not. The
    whole gap counts, as in Holistic Trace Analysis ("host wait"), and not only the part before the launch. What follows
    the last run is left out: it is unknown what it waited for. So is what precedes the first one: a window begins with
    an idle device, whatever the loop does.
    """
    gaps: list[Interval] = []
    ordered = sorted((work for work in works if work.start < window[1]), key=lambda work: work.start)
    free = ordered[0].end if ordered else 0.0
    for work in ordered[1:]:
        if work.start > free and work.launch is not None and work.launch >= free:
            gaps.append((free, work.start))
        free = max(free, work.end)
    return gaps


def parents(spans: Sequence[Interval]) -> list[int]:
    """Return, for each span, the index of the innermost other span that holds it; -1 if there is none.

    Of two equal spans the earlier in the list is the outer one. Spans that overlap without nesting are no parents of
    each other.
    """
    parent = [-1] * len(spans)
    open_spans: list[int] = []
    for index in sorted(range(len(spans)), key=lambda index: (spans[index][0], -spans[index][1])):
        # What ends earlier holds neither this span nor, as later ones start no sooner, any that this one does not hold.
        while open_spans and spans[open_spans[-1]][1] < spans[index][1]:
            open_spans.pop()
        if open_spans:
            parent[index] = open_spans[-1]
        open_spans.append(index)
    return parent

"""The always-on clocks stay cheap; `python -m benchmarks.profiler_overhead` has the figures of a quiet machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.profiler_overhead import cost, loop_of


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_clocks_cost_a_few_microseconds_a_step() -> None:
    """5 to 7 µs on a quiet machine; the interval must reach below ten."""
    found = cost(loop_of(4, 1), rounds=15)

    assert found.clocks.low <= 10.0, found


def test_clocks_and_looks_cost_at_most_one_percent_of_three_milliseconds() -> None:
    found = cost(loop_of(64, 120), rounds=30)

    assert found.with_looks.low <= 30.0, found

"""The always-on clocks stay cheap; `python -m benchmarks.profiler_overhead` has the figures of a quiet machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.profiler_overhead import Cost, cost, loop_of


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def least(width: int, depth: int, judged: Callable[[Cost], float]) -> float:
    """Return the least of three short measurements: what else runs on the machine only adds."""
    loop = loop_of(width, depth)
    return min(judged(cost(loop, rounds=2)) for _ in range(3))


def test_the_clocks_cost_a_few_microseconds_a_step() -> None:
    """6 to 8 of 75 µs, on a crowded machine too; marks that cost twice as much exceed the bound."""
    assert least(4, 1, lambda found: found.clocks.us / found.step_us) <= 0.14


def test_clocks_and_looks_cost_at_most_one_percent_of_three_milliseconds() -> None:
    assert least(64, 120, lambda found: found.with_looks.us / found.step_us) <= 0.01

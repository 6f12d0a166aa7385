"""The default run's share of a test's cases: every value is there, no fewer than one in so many, always the same."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sampling import sample


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 8))
def test_every_value_and_one_case_in_n_stay(sizes: list[int], one_in: int) -> None:
    cases = list(itertools.product(*map(range, sizes)))
    values = [set(enumerate(case)) for case in cases]
    stay = sample(values, [str(case) for case in cases], one_in)

    assert set().union(*(values[number] for number in stay)) == set().union(*values)
    assert math.ceil(len(cases) / one_in) <= len(stay) <= math.ceil(len(cases) / one_in) + sum(sizes)
    assert stay == sample(values, [str(case) for case in cases], one_in)


def test_the_rest_is_slow(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.sampling import mark_the_rest_slow as pytest_collection_modifyitems")
    pytester.makeini("[pytest]\nmarkers =\n    sample\n    slow\n")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.sample(4)
        @pytest.mark.parametrize("x", range(4))
        @pytest.mark.parametrize("y", range(3))
        def test_grid(x, y): ...

        def test_alone(): ...
    """)

    assert pytester.runpytest_inprocess("-m", "slow").parseoutcomes() == {"passed": 8, "deselected": 5}
    assert pytester.runpytest_inprocess("-m", "not slow").parseoutcomes() == {"passed": 5, "deselected": 8}

"""The budget: what it reads, and the laws of what it allows."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from accel.search.budget import Budget

seconds = st.floats(min_value=0, max_value=1e9, allow_nan=False)
positive = st.floats(min_value=1e-6, max_value=1e9, allow_nan=False)
shares = st.floats(min_value=0.01, max_value=100).map(lambda percent: Budget.parse(f"{percent:.6f}%"))
budgets = st.one_of(positive.map(lambda value: Budget.parse(f"{value:.9f}s")), shares)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (60, 60.0),
        (1, 1.0),
        ("90s", 90.0),
        ("2m", 120.0),
        ("2 min", 120.0),
        (" 1.5h ", 5400.0),
        (".5s", 0.5),
    ],
)
def test_times(text: float | str, wanted: float) -> None:
    budget = Budget.parse(text)
    assert budget.seconds == wanted
    assert budget.share == 1.0
    assert budget.text == (text.strip() if isinstance(text, str) else f"{text:g}s")


@pytest.mark.parametrize("text", ["60", " 60 ", "60.0"])
def test_a_number_alone_is_seconds_as_text_too(text: str) -> None:
    assert Budget.parse(text) == Budget.parse(60)


@given(value=st.floats(min_value=1e-6, max_value=0.999), as_text=st.booleans())
@example(value=0.03, as_text=False)
@example(value=0.03, as_text=True)
def test_a_number_below_one_is_refused_as_a_mistyped_share(value: float, as_text: bool) -> None:
    with pytest.raises(InvalidArgument, match="without a unit must be at least 1 s") as raised:
        Budget.parse(f"{value:.12f}" if as_text else value)
    assert f"did you mean '{100 * value:.6g}%'?" in str(raised.value)


@pytest.mark.parametrize(("text", "wanted"), [("10%", 0.1), ("100%", 1.0), (" 2.5 % ", 0.025)])
def test_shares(text: str, wanted: float) -> None:
    budget = Budget.parse(text)
    assert budget.share == pytest.approx(wanted)
    assert budget.seconds == math.inf
    assert budget.text == text.strip()


@given(value=positive)
def test_a_number_is_its_seconds_however_it_is_written(value: float) -> None:
    assert value < 1 or Budget.parse(value).seconds == value
    assert Budget.parse(f"{value:.9f}s").seconds == pytest.approx(value, abs=1e-9)
    assert Budget.parse(f"{value:.9f}m").seconds == pytest.approx(60 * value, abs=1e-7)
    assert Budget.parse(f"{value:.9f}h").seconds == pytest.approx(3600 * value, abs=1e-5)


@given(
    value=st.one_of(st.text(max_size=6), st.floats(), st.integers(), st.booleans(), st.none(), st.binary(max_size=3))
)
def test_anything_else_is_refused_with_the_remedy(value: object) -> None:
    try:
        budget = Budget.parse(value)  # type: ignore[arg-type]
    except InvalidArgument as error:
        assert 'write seconds (60), "90s", "2m" or a share of the run ("10%")' in str(error)  # noqa: PT017
    else:
        assert budget.seconds > 0
        assert 0 < budget.share <= 1


@given(budget=budgets, spent=seconds, expected=seconds, elapsed=seconds)
def test_a_cost_is_allowed_within_the_time_and_the_share(
    budget: Budget, spent: float, expected: float, elapsed: float
) -> None:
    allowed = budget.allows(spent=spent, expected=expected, elapsed=elapsed)
    assert allowed == (spent + expected <= budget.seconds and spent + expected <= budget.share * elapsed)


@given(budget=shares, elapsed=positive, saved=positive)
@example(budget=Budget(share=0.02), elapsed=100.0, saved=10.0)  # few drawn ones have the share below the other limit
def test_half_of_what_was_saved_comes_on_top_of_the_share(budget: Budget, elapsed: float, saved: float) -> None:
    limit = min(budget.share * elapsed + saved / 2, max(budget.share, 0.1) * elapsed)
    assert budget.allows(spent=0.0, expected=0.999 * limit, elapsed=elapsed, saved=saved)
    assert not budget.allows(spent=0.0, expected=1.001 * limit, elapsed=elapsed, saved=saved)


@given(budget=shares, spent=seconds, expected=positive, saved=seconds)
def test_what_is_waited_for_is_allowed_then(budget: Budget, spent: float, expected: float, saved: float) -> None:
    wait_s = budget.allowed_from(spent=spent, expected=expected, saved=saved)
    assert budget.allows(spent=spent, expected=expected, elapsed=1.001 * wait_s, saved=saved)
    assert not budget.allows(spent=spent, expected=expected, elapsed=0.999 * wait_s, saved=saved)


@given(budget=budgets, spent=seconds, expected=seconds, elapsed=seconds, less=st.floats(0, 1), more=seconds)
def test_what_is_allowed_stays_allowed_when_it_is_cheaper_or_later(
    budget: Budget, spent: float, expected: float, elapsed: float, less: float, more: float
) -> None:
    if budget.allows(spent=spent, expected=expected, elapsed=elapsed):
        assert budget.allows(spent=spent * less, expected=expected, elapsed=elapsed)
        assert budget.allows(spent=spent, expected=expected * less, elapsed=elapsed)
        assert budget.allows(spent=spent, expected=expected, elapsed=elapsed + more)


@given(budget=budgets, spent=seconds, expected=seconds)
def test_exhausted_means_that_no_waiting_helps(budget: Budget, spent: float, expected: float) -> None:
    # Long enough for any share; a rounding of the product must not matter.
    some_day = 2 * (spent + expected) / budget.share
    assert budget.exhausted(spent, expected) != budget.allows(spent=spent, expected=expected, elapsed=some_day)

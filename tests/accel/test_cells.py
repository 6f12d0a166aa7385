"""No name and no number of a report breaks in the middle, whatever its size, on a terminal of usual width."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel import strategies
from accel.report import Report, StrategyRow
from accel.report.compare import compare
from accel.report.rendering import as_text
from accel.report.words import gain_text, ms_text, numerics_text, seconds_text, step_text
from tests.sampling import examples

WIDTHS = (100,)  # on narrower terminals rich breaks words where a table has no room
positive = st.floats(1e-2, 1e3) | st.sampled_from([99.95, 999.5])
names = st.sampled_from(strategies.names()) | st.from_regex(r"\A[a-z]{1,12}(_[a-z]{1,8}){0,2}\Z")
values = st.none() | positive | st.just(math.inf)
sizes = st.sampled_from(["", "workers=2", "threads=8", "fused", "powersgd(rank=4)+hosts"])


@st.composite
def rows(draw: Any) -> StrategyRow:
    row = StrategyRow(name=draw(names), summary="", treats=[], exactness="exact", setting=draw(sizes))
    row.status = draw(st.sampled_from(["kept", "undone", "inconclusive", "not applicable", "not tried"]))
    row.gain, row.gain_low, row.gain_high = draw(values), draw(values), draw(values)
    row.before_ms, row.after_ms, row.spread_ms = draw(values), draw(values), draw(values)
    row.output_error, row.gradient_error = draw(values), draw(values)
    row.cost_s = draw(st.just(0.0) | positive)
    return row


phases = st.dictionaries(
    st.sampled_from(["data", "forward", "communication", "optimizer"]) | names, positive, max_size=5
)


def whole(row: StrategyRow) -> list[str]:
    """The words of a row, each of which must stand in one piece; of what does not apply the name alone."""
    if row.status == "not applicable":
        return [row.name]
    cost = seconds_text(row.cost_s) if row.cost_s else "-"
    numbers = (gain_text(row.gain, row.gain_low, row.gain_high), step_text(row), numerics_text(row), cost)
    return [word for text in (row.name, row.setting, row.status, *numbers) if text != "-" for word in text.split()]


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


@settings(max_examples=examples(25), deadline=None)
@given(
    report=st.builds(
        Report,
        rows=st.lists(rows(), min_size=1, max_size=5),
        anatomy_before=phases,
        anatomy_after=phases,
    )
)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_cell_of_a_report_breaks(width: int, report: Report) -> None:
    printed = lines(as_text(report, width=width, color=False))
    assert max(map(len, printed)) <= min(width, 100)
    for row in report.rows:
        for text in whole(row):
            assert any(text in line for line in printed), text
    for part in (report.anatomy_before, report.anatomy_after):
        for name, value in part.items():
            assert any(name in line for line in printed) and any(ms_text(value) in line for line in printed), name


@settings(max_examples=examples(25), deadline=None)
@given(old=st.lists(rows(), max_size=4), new=st.lists(rows(), max_size=4), before=phases, after=phases)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_cell_of_a_comparison_breaks(
    width: int, old: list[StrategyRow], new: list[StrategyRow], before: Any, after: Any
) -> None:
    one = Report(accel_ms=2.0, state="done", rows=old, anatomy_after=before)
    other = Report(accel_ms=3.0, state="done", rows=new, anatomy_after=after)
    compared = compare(one, other)
    printed = lines(compared.render(width=width, color=False))
    for row in {row.name: row for row in old}.values():
        gain = gain_text(row.gain, row.gain_low, row.gain_high)
        assert gain == "-" or all(any(text in line for line in printed) for text in (row.name, *gain.split()))
    for phase in (*before, *after):
        assert any(phase in line for line in printed)

"""The page of a profiled run: what it says, and that its bar adds up."""

from __future__ import annotations

import re

import pytest

from accel.report.rendering import as_page as render
from tests.accel import profile_reports
from tests.accel.pages import Page, bars


def test_run_that_nothing_holds_back_says_so() -> None:
    report = profile_reports.full(verdict="nothing holds the run back", bottleneck="none", findings=[], next=[])
    page = Page(render(report))
    assert ("p", "Nothing was found that holds the run back.") in page.words
    assert ("h2", "Next") not in page.words


def test_phases_lie_end_to_end_and_fill_the_bar() -> None:
    (parts,) = bars(render(profile_reports.full()), "Phases of a mean step")
    assert [shade for shade, _ in parts] == [f"s{number}" for number in range(len(profile_reports.PHASES_MS))]
    assert sum(width for _, width in parts) == pytest.approx(100.0, abs=0.02)
    assert parts[0][1] == pytest.approx(67.4, abs=0.05)


def test_tree_adds_up_to_100_percent_and_shows_the_key_of_the_bar() -> None:
    html = render(profile_reports.full())
    row = r'<th scope="row"(?: style="padding-left: (\d+)rem")?>.*?</th>\s*<td[^>]*>.*?</td>\s*<td[^>]*>(.*?) %</td>'
    rows = re.findall(row, html[: html.index('id="experiments"')])
    shown = [(int(indent or 1) - 1, round(10 * float(percent))) for indent, percent in rows]
    assert shown[0] == (0, 1000)
    assert abs(sum(tenths for depth, tenths in shown if depth == 1) - 1000) <= 3  # each is rounded
    assert '<span class="key s0">1</span> data</th>' in html
    assert "0.4 % of the wall time belongs to no phase." in Page(html).text()


def test_the_straggler_is_named() -> None:
    assert ("span", "▲ 1 straggler") in Page(render(profile_reports.full())).words

"""The page of a profiled run: what it says, and that its pictures add up."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.profiler.evidence import OpTime, Roofline
from accel.profiler.report import ProfileReport, StepRow
from accel.report.pictures import ROOFLINE_HEIGHT
from accel.report.rendering import as_page as render
from tests.accel import profile_reports
from tests.accel.pages import Page, number, pictures


def test_run_that_nothing_holds_back_says_so() -> None:
    report = profile_reports.full(verdict="nothing holds the run back", bottleneck="none", findings=[], next=[])
    page = Page(render(report))
    assert ("p", "Nothing was found that holds the run back.") in page.words
    assert ("h2", "Next") not in page.words


def test_anatomy_segments_lie_end_to_end_and_fill_the_bar() -> None:
    anatomy = pictures(render(profile_reports.full()))["phases"]
    parts = [(number(part, "x"), number(part, "width")) for part in anatomy.findall("svg")]
    assert len(parts) == len(profile_reports.PHASES_MS)
    end = 0.0
    for at, width in parts:
        assert at == pytest.approx(end, abs=0.002)
        end = at + width
    assert end == pytest.approx(100.0, abs=0.002)
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


def test_columns_of_the_timeline_stand_side_by_side_on_one_ground() -> None:
    timeline = pictures(render(profile_reports.full()))["timeline"]
    columns = timeline.findall("g")
    assert len(columns) == 120
    for place, column in enumerate(columns):
        blocks = column.findall("rect")
        assert all(number(block, "x") == pytest.approx(place / 1.2, abs=0.002) for block in blocks)
        bottoms = [number(block, "y") + number(block, "height") for block in blocks]
        assert bottoms[0] == pytest.approx(180)
        # Each block stands on the one before it; one too thin to be drawn leaves a gap of its height.
        for below, bottom in zip(blocks, bottoms[1:], strict=False):
            assert bottom == pytest.approx(number(below, "y"), abs=0.06)
        assert min(number(block, "y") for block in blocks) >= 0


def test_step_far_above_the_others_is_cut_marked_and_named() -> None:
    html = render(profile_reports.full())
    timeline = pictures(html)["timeline"]
    cut = [column.findtext("title") for column in timeline.findall("g") if column.findtext("text") == "▲"]
    assert len(cut) == 1
    assert cut[0] is not None
    assert cut[0].startswith("step 367: 2,8")
    assert "taller than the picture (▲): step 367 (2,8" in Page(html).text()
    # What is left fills the picture.
    tops = sorted(min(number(r, "y") for r in column.findall("rect")) for column in timeline.findall("g"))
    assert tops[1] < 20


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 60, 61, 120])
def test_timeline_of_any_length(steps: int) -> None:
    html = render(profile_reports.full(timeline=profile_reports.timeline(steps)))
    drawings = pictures(html)
    assert ("timeline" in drawings) is (steps > 0)
    if steps:
        assert len(drawings["timeline"].findall("g")) == steps
        labels = [text.text for text in drawings["timeline"].findall("text") if text.get("y") == "195"]
        assert labels[0] == "290"
        assert labels[-1] == str(289 + steps)
        assert len(labels) == min(steps, 5)
    assert not re.search(r"\b1 steps", html)


def test_step_without_phases_or_time_is_a_gap() -> None:
    rows = [StepRow(step=1, ms=0.0, phases_ms={}), StepRow(step=2, ms=10.0, phases_ms={"data": 10.0})]
    columns = pictures(render(profile_reports.full(timeline=rows)))["timeline"].findall("g")
    assert [len(column.findall("rect")) for column in columns] == [0, 1]


def test_one_colour_means_one_phase_in_every_picture() -> None:
    html = render(profile_reports.full())
    drawings = pictures(html)
    first = drawings["phases"].find("svg/rect")
    bottom = drawings["timeline"].find("g/rect")
    assert first is not None
    assert bottom is not None
    assert first.get("class") == "segment s0"
    assert bottom.get("class") == "s0"


def test_roofline_bends_where_the_roofs_meet() -> None:
    picture = pictures(render(profile_reports.full()))["roofline"]
    roofs = [line for line in picture.findall("line") if line.get("class") == "roof"]
    slope, low, high = ([number(line, name) for name in ("x1", "y1", "x2", "y2")] for line in roofs)
    # The slope rises to the higher level roof, which begins there; the lower one branches off below it.
    assert slope[1] > slope[3]
    assert slope[2:] == high[:2]
    assert low[0] < high[0]
    assert low[1] > high[1]
    assert all(level[1] == level[3] and level[2] == 100 for level in (low, high))


def test_dots_lie_under_the_roof_and_carry_the_number_of_their_row() -> None:
    html = render(profile_reports.full())
    dots = [dot for dot in pictures(html)["roofline"].findall("g")]
    titles = [dot.findtext("title") for dot in dots]
    assert titles[0] == "aten::convolution_backward: 31,200 GFLOP/s at 57.8 FLOP per byte"
    # Operators 5, 6 and 8 have no intensity.
    assert [dot.findtext("text") for dot in dots] == ["1", "2", "3", "4", "7"]
    assert "4 aten::native_batch_norm_backward" in Page(html).text()


@pytest.mark.parametrize(
    ("ops", "roofline"),
    [
        (profile_reports.ops(), None),
        ([], Roofline(gflops={"float32": 100.0}, gb_per_s=10.0)),
        (profile_reports.ops(), Roofline(gflops={}, gb_per_s=10.0)),
        (profile_reports.ops(), Roofline(gflops={"float32": 100.0}, gb_per_s=0.0)),
        (profile_reports.ops(), Roofline(gflops={"float32": float("nan")}, gb_per_s=10.0)),
        (
            [OpTime(name="op", calls=1, ms=1, share=1, gflops=0.0, intensity=0.0)],
            Roofline(gflops={"float32": 1.0}, gb_per_s=1.0),
        ),
    ],
)
def test_without_a_roof_or_a_dot_there_is_no_roofline(ops: list[OpTime], roofline: Roofline | None) -> None:
    assert "roofline" not in pictures(render(profile_reports.full(ops=ops, roofline=roofline)))


def test_ranks_are_drawn_on_one_scale_and_the_straggler_is_named() -> None:
    html = render(profile_reports.full())
    page = Page(html)
    assert ("span", "▲ 1 straggler") in page.words
    table = html[html.index('aria-label="Ranks: ') :]
    bars = [picture for name, picture in pictures(table).items() if name.startswith("bar") and picture.find("svg")]
    ends = [max(number(part, "x") + number(part, "width") for part in bar.findall("svg")) for bar in bars]
    assert len(ends) == 2
    assert ends[1] == pytest.approx(100, abs=0.01)
    assert ends[0] == pytest.approx(100 * 213.2 / 233.2, abs=1)


@settings(deadline=None)  # the machine may be busy
@given(
    numbers=st.lists(st.tuples(st.floats(1e-6, 1e12), st.floats(1e-6, 1e12)), min_size=1, max_size=12),
    peaks=st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=4),
    gb_per_s=st.floats(1e-6, 1e12),
)
def test_every_dot_and_roof_lies_in_the_picture(
    numbers: list[tuple[float, float]], peaks: list[float], gb_per_s: float
) -> None:
    ops = [OpTime(name="op", calls=1, ms=1, share=1, gflops=gflops, intensity=each) for gflops, each in numbers]
    roofline = Roofline(gflops={f"dtype{n}": peak for n, peak in enumerate(peaks)}, gb_per_s=gb_per_s)
    picture = pictures(render(ProfileReport(ops=ops, roofline=roofline)))["roofline"]
    dots = picture.findall("g/circle")
    assert len(dots) == len(ops)
    assert all(0 < number(dot, "cx") < 100 and 0 < number(dot, "cy") < ROOFLINE_HEIGHT for dot in dots)
    roofs = [line for line in picture.findall("line") if line.get("class") == "roof"]
    assert len(roofs) == len(peaks) + 1
    assert all(0 <= number(roof, x) <= 100 for roof in roofs for x in ("x1", "x2"))
    assert all(0 <= number(roof, y) <= ROOFLINE_HEIGHT for roof in roofs for y in ("y1", "y2"))

"""The page of a profiled run: self-contained, well-formed, inert whatever the names are, with pictures that add up."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel.profiler.evidence import OpTime, Roofline
from accel.profiler.report import Node, ProfileReport, StepRow
from accel.report import roofline_picture
from accel.report.profile_page import render
from accel.report.roofline_picture import LogAxis
from tests.accel import profile_reports

VOID = {"meta", "br", "line", "rect", "circle", "path"}
HOSTILE = [
    "<script>alert(1)</script>",
    "</style></svg><img src=x onerror=alert(1)>",
    "\" onload=\"alert(1)' x='",
    "{{ 7 * 7 }}{% raw %}",
    "a\n\x00\x1b[31m\ud800\u202eb",
    "x" * 5000,
]


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags close in the order they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, f"<{tag}/> is not closed in HTML"
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append((self.open[-1] if self.open else "", " ".join(data.split())))

    def text(self) -> str:
        return " ".join(word for tag, word in self.words if tag != "style")

    def having(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def _pictures(html: str) -> dict[str, ElementTree.Element]:
    """Return the outermost drawings by the first part of their title's id, parsed as XML."""
    found, depth, start = {}, 0, 0
    for match in re.finditer(r"<svg\b|</svg>", html):
        if match[0] == "<svg":
            start = match.start() if depth == 0 else start
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                picture = ElementTree.fromstring(html[start : match.end()])
                found[picture.get("aria-labelledby", f"bar {len(found)}").split("-")[0]] = picture
    assert depth == 0
    return found


def _number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "0").rstrip("%"))


def _headings(page: Page) -> list[str]:
    return [word for tag, word in page.words if tag == "h2"]


def test_verdict_why_and_next_come_first() -> None:
    page = Page(render(profile_reports.full()))
    assert ("h1", "input-bound: reading files takes 67 % of the step (input.storage, confirmed)") in page.words
    assert _headings(page) == [
        *("Why", "Next", "Where a step's time goes", "Step by step", "Experiments", "Ranks", "Source lines"),
        *("Operators", "Where the host waits for the device", "GPUs", "Host", "What could not be seen"),
        "Where and how",
    ]


def test_finding_says_saving_evidence_remedy_and_strategy() -> None:
    words = Page(render(profile_reports.full())).words
    assert ("h3", "1. the loop waits for files that are read one by one from slow storage") in words
    assert ("p", "✓ saves 67 % [64, 70] of the step, confirmed by experiment (predicted 66 %)") in words
    assert ("li", "143 of 212 ms per step pass waiting for the next batch") in words
    assert ("li", "experiment: trained on one batch that was held in memory") in words
    assert ("p", "read ahead with more workers (4), or pack the files into shards") in words
    assert ("code", "loader_workers") in words
    assert ("p", "○ predicted, not tried: saves 8 % [5, 10] of the step") in words
    assert ("li", "no experiment: ranks can't trade their storage") in words


def test_saving_is_drawn_on_the_scale_of_the_step() -> None:
    gauge = _pictures(render(profile_reports.full()))["gauge"]
    drawn = {rect.get("class"): rect.get("width") for rect in gauge.iter("rect")}
    # The second finding's, which came last, is predicted.
    assert drawn == {"track": "100%", "predicted": "8.0%"}
    spans = [line for line in gauge.iter("line") if line.get("x1") != line.get("x2")]
    assert [(line.get("x1"), line.get("x2")) for line in spans] == [("5.0%", "10.0%")]


def test_refused_and_broken_off_run_says_so() -> None:
    words = Page(render(profile_reports.refused())).words
    assert (
        "h1",
        "no verdict: only 6 steps were seen, at least 20 are needed; the largest part of the step is backward (60 %)",
    ) in words
    assert ("span", "not completed") in words
    assert ("p", "the script raised ValueError: no more data; this is what was seen before.") in words
    assert ("p", "No cause was named.") in words


def test_run_that_nothing_holds_back_says_so() -> None:
    report = profile_reports.full(verdict="nothing holds the run back", bottleneck="none", findings=[], next=[])
    page = Page(render(report))
    assert ("p", "Nothing was found that holds the run back.") in page.words
    assert "Next" not in _headings(page)


def test_anatomy_segments_lie_end_to_end_and_fill_the_bar() -> None:
    anatomy = _pictures(render(profile_reports.full()))["anatomy"]
    parts = [(_number(part, "x"), _number(part, "width")) for part in anatomy.findall("svg")]
    assert len(parts) == len(profile_reports.PHASES_MS)
    end = 0.0
    for at, width in parts:
        assert at == pytest.approx(end, abs=0.002)
        end = at + width
    assert end == pytest.approx(100.0, abs=0.002)
    assert parts[0][1] == pytest.approx(67.4, abs=0.05)


def test_tree_adds_up_to_100_percent_and_shows_the_key_of_the_bar() -> None:
    html = render(profile_reports.full())
    rows = re.findall(r'<th scope="row" class="d(\d)">(.*?)</th><td[^>]*>(.*?)</td><td[^>]*>(.*?) %</td>', html)
    shown = [(int(depth), round(10 * float(percent))) for depth, _, _, percent in rows]
    assert shown[0] == (0, 1000)
    assert sum(tenths for depth, tenths in shown if depth == 1) == 1000
    assert '<span class="key s0">1</span> data</th>' in html
    assert "0.4 % of the wall time belongs to no phase." in Page(html).text()


def test_columns_of_the_timeline_stand_side_by_side_on_one_ground() -> None:
    timeline = _pictures(render(profile_reports.full()))["timeline"]
    columns = timeline.findall("g")
    assert len(columns) == 120
    for place, column in enumerate(columns):
        blocks = column.findall("rect")
        assert all(_number(block, "x") == pytest.approx(place / 1.2, abs=0.002) for block in blocks)
        bottoms = [_number(block, "y") + _number(block, "height") for block in blocks]
        assert bottoms[0] == pytest.approx(180)
        # Each block stands on the one before it; one too thin to be drawn leaves a gap of its height.
        for below, bottom in zip(blocks, bottoms[1:], strict=False):
            assert bottom == pytest.approx(_number(below, "y"), abs=0.06)
        assert min(_number(block, "y") for block in blocks) >= 0


def test_step_far_above_the_others_is_cut_marked_and_named() -> None:
    html = render(profile_reports.full())
    timeline = _pictures(html)["timeline"]
    cut = [column.findtext("title") for column in timeline.findall("g") if column.find("svg/path") is not None]
    assert len(cut) == 1
    assert cut[0] is not None
    assert cut[0].startswith("step 367: 2,8")
    assert "Taller than the picture (▲): step 367 (2,8" in Page(html).text()
    # What is left fills the picture.
    tops = sorted(min(_number(r, "y") for r in column.findall("rect")) for column in timeline.findall("g"))
    assert tops[1] < 20


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 60, 61, 120])
def test_timeline_of_any_length(steps: int) -> None:
    html = render(profile_reports.full(timeline=profile_reports.timeline(steps)))
    pictures = _pictures(html)
    assert ("timeline" in pictures) is (steps > 0)
    if steps:
        assert len(pictures["timeline"].findall("g")) == steps
        labels = [text.text for text in pictures["timeline"].findall("text") if text.get("y") == "195"]
        assert labels[0] == "290"
        assert labels[-1] == str(289 + steps)
        assert len(labels) == min(steps, 5)
    assert not re.search(r"\b1 steps", html)


def test_step_without_phases_or_time_is_a_gap() -> None:
    rows = [StepRow(step=1, ms=0.0, phases_ms={}), StepRow(step=2, ms=10.0, phases_ms={"data": 10.0})]
    columns = _pictures(render(profile_reports.full(timeline=rows)))["timeline"].findall("g")
    assert [len(column.findall("rect")) for column in columns] == [0, 1]


def test_one_colour_means_one_phase_in_every_picture() -> None:
    html = render(profile_reports.full())
    pictures = _pictures(html)
    first = pictures["anatomy"].find("svg/rect")
    bottom = pictures["timeline"].find("g/rect")
    assert first is not None
    assert bottom is not None
    assert first.get("class") == "segment s0"
    assert bottom.get("class") == "s0"


def test_roofline_bends_where_the_roofs_meet() -> None:
    picture = _pictures(render(profile_reports.full()))["roofline"]
    roofs = [line for line in picture.findall("line") if line.get("class") == "roof"]
    slope, low, high = ([_number(line, name) for name in ("x1", "y1", "x2", "y2")] for line in roofs)
    # The slope rises to the higher level roof, which begins there; the lower one branches off below it.
    assert slope[1] > slope[3]
    assert slope[2:] == high[:2]
    assert low[0] < high[0]
    assert low[1] > high[1]
    assert all(level[1] == level[3] and level[2] == 100 for level in (low, high))


def test_dots_lie_under_the_roof_and_carry_the_number_of_their_row() -> None:
    html = render(profile_reports.full())
    dots = [dot for dot in _pictures(html)["roofline"].findall("svg") if dot.find("circle") is not None]
    titles = [dot.findtext("title") for dot in dots]
    assert titles[0] == "aten::convolution_backward: 31,200 GFLOP/s at 57.8 FLOP per byte"
    # Operators 5, 6 and 8 have no intensity.
    assert [dot.findtext("text") for dot in dots] == ["1", "2", "3", "4", "7"]
    assert "4 aten::native_batch_norm_backward" in Page(html).text()


def test_numbers_of_the_roofline_cover_nothing() -> None:
    ops = [OpTime(name="op", calls=1, ms=1, share=0.1, gflops=g, intensity=2.0) for g in (10.0, 10.4, 11.0, 60.0)]
    picture = roofline_picture.picture(ops, Roofline(gflops={"float32": 100.0}, gb_per_s=20.0))
    assert picture is not None
    dots = picture["dots"]
    assert all(dot.shown for dot in dots)
    assert len({(round(dot.y * 2.8) + dot.dy, dot.dx) for dot in dots}) == 4


def test_number_without_a_place_is_left_out() -> None:
    ops = [OpTime(name="op", calls=1, ms=1, share=0.1, gflops=10.0, intensity=2.0) for _ in range(40)]
    picture = roofline_picture.picture(ops, Roofline(gflops={"float32": 100.0}, gb_per_s=20.0))
    assert picture is not None
    assert 1 <= sum(dot.shown for dot in picture["dots"]) < 40


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
    assert "roofline" not in _pictures(render(profile_reports.full(ops=ops, roofline=roofline)))


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.5, 200.0, ["1", "10", "100"]),
        (2.0, 8.0, ["2", "5"]),
        (0.02, 0.3, ["0.02", "0.05", "0.1", "0.2"]),
        (1.0, 1e6, ["1", "10", "100", "1,000", "10,000", "100,000", "1,000,000"]),
        (1e-5, 1e9, ["1e-05", "0.01", "10", "10,000", "1e+07"]),
    ],
)
def test_logarithmic_ticks_are_round_and_few(low: float, high: float, labels: list[str]) -> None:
    axis = LogAxis(low=low, high=high)
    assert [tick.text for tick in axis.ticks()] == labels
    assert all(0 <= tick.at <= 100 for tick in axis.ticks())


def test_ranks_are_drawn_on_one_scale_and_the_straggler_is_named() -> None:
    html = render(profile_reports.full())
    page = Page(html)
    assert ("span", "▲ straggler") in page.words
    assert ("p", "Straggler: rank 1.") in page.words
    bars = [picture for name, picture in _pictures(html).items() if name.startswith("bar") and picture.find("svg")]
    ends = [max(_number(part, "x") + _number(part, "width") for part in bar.findall("svg")) for bar in bars]
    assert len(ends) == 2
    assert ends[1] == pytest.approx(100, abs=0.01)
    assert ends[0] == pytest.approx(100 * 213.2 / 233.2, abs=1)


def test_tables_hold_experiments_lines_operators_syncs_gpus_and_host() -> None:
    page = Page(render(profile_reports.full()))
    cells = [word for tag, word in page.words if tag in {"td", "th", "dd", "span", "code"}]
    for text in (
        *("213 → 70.1", "67 % [64, 70]", "✓ helps", "? too noisy to tell", "✗ does not help"),
        *("train.py:88", "for images, labels in loader:", "next batch", "99 %"),
        *("1 aten::convolution_backward", "31,200", "57.8", "23 %", "6 aten::add_ *", "train.py:97"),
        *("0 NVIDIA A100-SXM4-80GB", "11.4 of 79.3 GiB", "812/97 MB/s", "software thermal slowdown"),
        *("DataLoader, 2 workers, not pinned", "kept 0.4 cores busy", "profile.trace.json.gz", "completed"),
    ):
        assert text in cells, text
    assert ("pre", "accel profile train.py --epochs 1") in page.words
    assert ("li", "DDP's buckets: the run was shorter than their second rebuild") in page.words


REPORTS = {
    "full": profile_reports.full(),
    "refused": profile_reports.refused(),
    "hostile": profile_reports.hostile(),
    "64 ranks": profile_reports.wide(),
    "nothing": ProfileReport(),
    "zero": profile_reports.hostile("x", 0.0),
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_page_is_well_formed_and_accessible(report: ProfileReport) -> None:
    html = render(report)
    page = Page(html)
    assert page.having("html") == [{"lang": "en"}]
    assert all(cell.get("scope") in {"row", "col"} for cell in page.having("th"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        assert set(attributes.get("aria-labelledby", "").split()) <= set(ids)
    for name, picture in _pictures(html).items():
        if not name.startswith("bar"):
            assert picture.get("role") == "img"
            assert picture.findtext("title")
            assert picture.findtext("desc")
    assert "None" not in page.text().replace("None was", "")
    assert not re.search(r"\bnan\b|\binf\b", page.text())


def test_page_has_both_schemes() -> None:
    text = render(profile_reports.full())
    style = text[text.index("<style>") : text.index("</style>")]
    assert "prefers-color-scheme: dark" in style
    used, defined = set(re.findall(r"var\((--\w+)\)", style)), set(re.findall(r"(--\w+):", style))
    assert used == defined


def _luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_stands_out_in_both_schemes() -> None:
    style = render(profile_reports.full())
    schemes = [
        dict(re.findall(r"(--\w+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(schemes) == 2
    for colours in schemes:
        for ink in ("--ink", "--muted", "--good", "--bad", "--warn", "--idle"):
            for paper in ("--page", "--card"):
                assert _contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    shades = re.findall(r"\.s\d \{ fill: (#\w{6});", style)
    assert len(shades) == len(set(shades)) == 10
    assert all(_contrast("#000000", shade) >= 4.5 for shade in shades)


def test_page_loads_nothing_and_runs_nothing() -> None:
    text = render(profile_reports.full())
    for loader in ("http://", "https://", "url(", "@import", "src=", "href=", "<script", "<link", "<iframe", "//cdn"):
        assert loader not in text
    policy = next(meta for meta in Page(text).having("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def _shape(page: Page) -> list[tuple[str, list[str]]]:
    # Whether a phase's name fits into its block depends on how long it is.
    return [(tag, sorted(attributes)) for tag, attributes in page.tags if attributes.get("class") != "inside"]


@pytest.mark.parametrize("text", HOSTILE, ids=["script", "end tags", "quotes", "template", "control", "long"])
def test_hostile_text_adds_no_tag_and_no_attribute(text: str) -> None:
    page = Page(render(profile_reports.hostile(text)))
    assert _shape(page) == _shape(Page(render(profile_reports.hostile("harmless"))))


def test_hostile_text_is_shown_literally() -> None:
    words = Page(render(profile_reports.hostile("<script>alert('1')</script>"))).words
    assert ("h1", "<script>alert('1')</script>") in words
    assert ("li", "<script>alert('1')</script>") in words


def test_characters_no_page_may_hold_are_stripped() -> None:
    html = render(profile_reports.hostile("a\x00\x1b[31m\ud800\u202eb"))
    assert "a[31mb" in html
    assert not set(html) & set("\x00\x1b\ud800\u202e")


def test_text_inside_a_picture_is_clipped() -> None:
    inside = [word for tag, word in Page(render(profile_reports.hostile("x" * 5000))).words if tag == "text"]
    assert inside
    assert all(len(word) < 60 for word in inside)


def _places(pictures: Iterable[ElementTree.Element]) -> Iterable[float]:
    for picture in pictures:
        for element in picture.iter():
            for name in ("x1", "x2", "width", "cx"):
                if (value := element.get(name, "")).endswith("%"):
                    yield float(value.rstrip("%"))


@settings(deadline=None)  # the machine may be busy
@given(text=st.text(st.characters(), min_size=1, max_size=40), number=st.floats())
@example(text="negative", number=-1.0)
@example(text="overflow", number=1.7e308)
@example(text="small", number=5e-324)
def test_any_text_and_number_give_a_whole_page(text: str, number: float) -> None:
    html = render(profile_reports.hostile(text, number))
    html.encode("utf-8")
    Page(html)
    assert all(0 <= place <= 100 for place in _places(_pictures(html).values()))


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
    picture = roofline_picture.picture(ops, roofline)
    assert picture is not None
    assert len(picture["dots"]) == len(ops)
    assert all(0 < dot.x < 100 and 0 < dot.y < 100 for dot in picture["dots"])
    assert all(0 <= place <= 100 for level in picture["levels"] for place in vars(level.line).values())


def test_very_long_names_are_kept_outside_the_pictures() -> None:
    report = profile_reports.wide()
    assert ("th", f"1 {report.ops[0].name}") in Page(render(report)).words


def test_deep_tree_needs_no_deep_stack() -> None:
    root = Node(name="bottom", ms=1.0, share=1.0)
    for _ in range(3000):
        root = Node(name="part", ms=1.0, share=1.0, children=[root])
    assert Page(render(replace(ProfileReport(), evidence=root)))

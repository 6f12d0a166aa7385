"""The web page: self-contained, well-formed, readable without colour, and inert whatever the names are."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel.profiler.phases import PHASES
from accel.report import Event, Machine, Report, StrategyRow
from accel.report.webpage import SHADES, Axis, render

VOID = {"meta", "br", "line", "rect", "circle"}
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


def _row(**fields: object) -> StrategyRow:
    base: dict[str, object] = {
        "name": "channels_last",
        "summary": "store images NHWC",
        "treats": ["conv"],
        "exactness": "reordered",
        "status": "kept",
        "why": "fewer conversions",
        "before_ms": 26.6,
        "after_ms": 18.4,
        "spread_ms": 0.31,
        "gain": 1.45,
        "gain_low": 1.38,
        "gain_high": 1.52,
        "output_error": 0.0,
        "gradient_error": 2e-6,
        "tolerance": 1e-4,
        "cost_s": 0.8,
        "steps": 24,
    }
    return StrategyRow(**{**base, **fields})  # type: ignore[arg-type]


def _report(**fields: object) -> Report:
    base: dict[str, object] = {
        "state": "done",
        "model": "Net",
        "plain_ms": 25.0,
        "accel_ms": 10.0,
        "speedup": 2.5,
        "speedup_low": 2.4,
        "speedup_high": 2.6,
        "steps": 700,
        "search_steps": 214,
        "search_s": 3.2,
        "break_even_step": 611,
        "anatomy_before": {"loader": 5.0, "backward": 20.0},
        "anatomy_after": {"loader": 1.0, "backward": 9.0},
        "rows": [_row(), _row(name="compile", status="undone", after_ms=29.6, gain=0.9, gain_low=0.85, gain_high=0.95)],
        "plan": {"channels_last": {"dims": 4}},
    }
    return Report(**{**base, **fields})  # type: ignore[arg-type]


def test_verdict_is_the_heading() -> None:
    page = Page(render(_report()))
    assert ("h1", "2.50x: 25 → 10 ms per step") in page.words
    assert "confidence interval [2.40x, 2.60x], that is +140 % to +160 % steps a second" in page.text()


def test_unfinished_run_is_marked() -> None:
    assert ("span", "interrupted") in Page(render(_report(state="interrupted"))).words
    assert ("span", "done") not in Page(render(_report())).words


def test_bars_start_at_zero_and_keep_the_ratio() -> None:
    bars = [rect for rect in Page(render(_report())).having("rect") if rect["class"] in {"plain", "good"}]
    assert [(bar["x"], bar["width"]) for bar in bars] == [("0", "100.0%"), ("0", "40.0%")]


def test_anatomy_segments_lie_end_to_end_on_one_scale() -> None:
    parts = [svg for svg in Page(render(_report())).having("svg") if "x" in svg]
    assert [(part["x"], part["width"]) for part in parts] == [
        ("0.0%", "20.0%"),
        ("20.0%", "80.0%"),
        ("0.0%", "4.0%"),
        ("4.0%", "36.0%"),
    ]


def test_legend_has_ms_and_share() -> None:
    text = Page(render(_report())).text()
    assert "1 loader 5 (20 %) 1 (10 %)" in text
    assert "2 backward 20 (80 %) 9 (90 %)" in text


def test_whiskers_span_the_interval_and_one_is_marked() -> None:
    page = Page(render(_report()))
    lines = page.having("line")
    one = float(next(line["x1"] for line in lines if line["class"] == "one").rstrip("%"))
    spans = [line for line in lines if line["class"] == "whisker" and line["x1"] != line["x2"]]
    kept, undone = [(float(span["x1"].rstrip("%")), float(span["x2"].rstrip("%"))) for span in spans]
    # All of the kept strategy's interval is right of no change, all of the undone one's left of it.
    assert one < kept[0] < kept[1] <= 100
    assert 0 <= undone[0] < undone[1] < one


def test_status_is_a_word_and_a_sign() -> None:
    words = Page(
        render(_report(rows=[_row(), _row(status="undone"), _row(status="refused"), _row(status="disabled")]))
    ).words
    for text in ("✓ kept", "✗ undone", "? refused", "○ disabled"):
        assert ("span", text) in words


def test_strategy_table_has_every_number() -> None:
    cells = [word for tag, word in Page(render(_report(rows=[_row()]))).words if tag == "td"]
    for text in ("1.45x [1.38, 1.52]", "26.6 → 18.4 ± 0.31", "same bits/2e-06", "0.8 s", "fewer conversions"):
        assert text in cells


def test_cost_events_unseen_machine_command_and_plan_are_shown() -> None:
    report = _report(
        events=[Event(step=120, text="validation began")],
        unseen=["time in workers"],
        machine=Machine(device="cpu (EPYC)", cores=2),
        command="python train.py",
    )
    page = Page(render(report))
    assert ("p", "214 of 700 steps were trial steps, cost 3.2 s; paid back at step 611.") in page.words
    assert ("li", "step 120: validation began") in page.words
    assert ("li", "time in workers") in page.words
    assert ("dd", "cpu (EPYC), 2 cores, 1 process") in page.words
    assert ("pre", "python train.py") in page.words
    assert ("pre", '{ "channels_last": { "dims": 4 } }') in page.words


def test_page_is_accessible() -> None:
    page = Page(render(_report()))
    assert page.having("html") == [{"lang": "en"}]
    assert any(meta.get("name") == "viewport" for meta in page.having("meta"))
    assert all(cell.get("scope") in {"row", "col"} for cell in page.having("th"))
    pictures = [svg for svg in page.having("svg") if "x" not in svg]
    assert len(pictures) == 3
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in pictures)
    assert len(page.having("title")) >= 1 + len(page.having("svg"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(attributes["aria-labelledby"] in ids for _, attributes in page.tags if "aria-labelledby" in attributes)


def test_page_has_both_schemes() -> None:
    text = render(_report())
    assert "prefers-color-scheme: dark" in text
    style = text[text.index("<style>") : text.index("</style>")]
    used, defined = set(re.findall(r"var\((--\w+)\)", style)), set(re.findall(r"(--\w+):", style))
    assert used == defined


def test_each_phase_has_a_colour_of_its_own() -> None:
    shades = re.findall(r"\.s\d \{ fill: (#\w{6});", render(_report()))
    assert len(shades) == len(set(shades)) == SHADES >= len(PHASES)


def test_page_loads_nothing_and_runs_nothing() -> None:
    text = render(_report())
    for loader in ("http://", "https://", "url(", "@import", "src=", "href=", "<script", "<link", "<iframe", "//cdn"):
        assert loader not in text
    policy = next(meta for meta in Page(text).having("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def _hostile(text: str, number: float | None = 1.0) -> Report:
    row = _row(name=text, setting=text, summary=text, treats=[text], status=text, why=text, exactness=text, gain=number)
    return _report(
        model=text,
        started=text,
        command=text,
        fingerprint=text,
        training_same=text,
        state=text,
        bottleneck=text,
        bottleneck_advice=text,
        plain_ms=number,
        anatomy_before={text: number},
        anatomy_after={text: number},
        rows=[row],
        events=[Event(step=1, text=text)],
        unseen=[text],
        machine=Machine(device=text, platform=text, torch=text),
        plan={text: text},
    )


def _shape(page: Page) -> list[tuple[str, list[str]]]:
    return [(tag, sorted(attributes)) for tag, attributes in page.tags]


@pytest.mark.parametrize("text", HOSTILE, ids=["script", "end tags", "quotes", "template", "control", "long"])
def test_hostile_text_adds_no_tag_and_no_attribute(text: str) -> None:
    page = Page(render(_hostile(text)))
    assert _shape(page) == _shape(Page(render(_hostile("harmless"))))


def test_hostile_text_is_shown_literally() -> None:
    words = Page(render(_hostile("<script>alert('1')</script>"))).words
    assert ("li", "step 1: <script>alert('1')</script>") in words
    assert ("pre", "<script>alert('1')</script>") in words


def test_characters_no_page_may_hold_are_stripped() -> None:
    html = render(_hostile("a\x00\x1b[31m\ud800\u202eb"))
    assert "a[31mb" in html
    assert not set(html) & set("\x00\x1b\ud800\u202e")


def test_text_inside_a_picture_is_clipped() -> None:
    inside = [word for tag, word in Page(render(_hostile("x" * 5000))).words if tag == "text"]
    assert inside
    assert all(len(word) < 60 for word in inside)


@settings(deadline=None)  # the machine may be busy
@given(text=st.text(st.characters(), min_size=1, max_size=60), number=st.one_of(st.none(), st.floats()))
@example(text="negative", number=-1.0)
@example(text="overflow", number=1.7e308)
def test_any_text_and_number_give_a_whole_page(text: str, number: float | None) -> None:
    report = _hostile(text)
    report.rows[0].gain = report.rows[0].gain_low = report.rows[0].output_error = report.rows[0].spread_ms = number
    report.anatomy_after = {"other": 1.0, text: 0.0 if number is None else number}
    html = render(report)
    html.encode("utf-8")
    page = Page(html)
    for _, attributes in page.tags:
        for name in ("x", "x1", "x2", "cx", "width"):
            value = attributes.get(name, "0").rstrip("%")
            assert 0 <= float(value) <= 100


def test_report_without_numbers_renders() -> None:
    page = Page(render(Report()))
    assert ("h1", "no verdict yet: 0 steps seen, the search has not ended") in page.words
    assert page.words.count(("p", "Not measured yet.")) == 2
    assert ("p", "None was considered yet.") in page.words
    assert page.having("svg") == []


def test_row_without_numbers_renders_dashes() -> None:
    row = StrategyRow(name="bf16", summary="", treats=[], exactness="reduced", status="not allowed")
    page = Page(render(Report(rows=[row])))
    assert [word for tag, word in page.words if tag == "td"] == ["-", "-", "-", "-", "-"]
    assert "None" not in page.text().replace("None was considered", "")


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 26.0, ["0", "10", "20"]),
        (0.0, 0.8, ["0", "0.2", "0.4", "0.6", "0.8"]),
        (0.85, 1.55, ["1", "1.2", "1.4"]),
        (0.0, 1234.0, ["0", "500", "1000"]),
        (0.0, 0.0, []),
        (0.0, float("inf"), []),
        (0.0, 5e-324, []),
    ],
)
def test_ticks_are_round_and_few(low: float, high: float, labels: list[str]) -> None:
    axis = Axis(low=low, high=high)
    assert [tick.text for tick in axis.ticks()] == labels
    assert all(0 <= tick.at <= 100 for tick in axis.ticks())

"""The page of any report: self-contained, well-formed, accessible, and inert whatever the names are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel.profiler.phases import PHASES
from accel.profiler.report import ProfileReport
from accel.report import Report
from accel.report.pictures import SHADES, Axis
from accel.report.rendering import as_page
from tests.accel import profile_reports, run_reports
from tests.accel.pages import Page, pictures, places

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "end tags": "</style></svg><img src=x onerror=alert(1)>",
    "quotes": "\" onload=\"alert(1)' x='",
    "template": "{{ 7 * 7 }}{% raw %}",
    "control": "a\n\x00\x1b[31m\ud800\u202eb",
    "long": "x" * 5000,
}
REPORTS = {
    "run": run_reports.full(),
    "run of nothing": Report(),
    "hostile run": run_reports.hostile(),
    "profile": profile_reports.full(),
    "refused profile": profile_reports.refused(),
    "hostile profile": profile_reports.hostile(),
    "profile of 64 ranks": profile_reports.wide(),
    "profile of nothing": ProfileReport(),
    "profile of zeros": profile_reports.hostile("x", 0.0),
}
of_both_kinds = pytest.mark.parametrize(
    "make", [run_reports.hostile, profile_reports.hostile], ids=["of a run", "of a profile"]
)


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_page_is_well_formed_and_accessible(report: Any) -> None:
    html = as_page(report)
    page = Page(html)
    assert page.having("html") == [{"lang": "en"}]
    assert any(meta.get("name") == "viewport" for meta in page.having("meta"))
    assert all(cell.get("scope") in {"row", "col"} for cell in page.having("th"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        assert set(attributes.get("aria-labelledby", "").split()) <= set(ids)
    for name, picture in pictures(html).items():
        if not name.startswith("bar"):
            assert picture.get("role") == "img"
            assert f"{name}-title" in ids
    assert "None" not in page.text().replace("None was", "")
    assert not re.search(r"\bnan\b|\binf\b", page.text())


def _style() -> str:
    text = as_page(profile_reports.full())
    return text[text.index("<style>") : text.index("</style>")]


def test_page_has_both_schemes() -> None:
    style = _style()
    assert "prefers-color-scheme: dark" in style
    used, defined = set(re.findall(r"var\((--\w+)\)", style)), set(re.findall(r"(--\w+):", style))
    assert used == defined


def test_every_class_of_the_style_sheet_is_used() -> None:
    style, pages = _style(), "".join(map(as_page, REPORTS.values()))
    named = set(re.findall(r"\.([a-z]\w*)", re.sub(r"\{[^{}]*\}", "", style))) - {f"s{n}" for n in range(SHADES)}
    used = {name for names in re.findall(r'class="([^"]*)"', pages) for name in names.split()}
    assert named <= used


def _luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_stands_out_in_both_schemes() -> None:
    style = _style()
    schemes = [
        dict(re.findall(r"(--\w+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(schemes) == 2
    for colours in schemes:
        for ink in ("--ink", "--muted", "--good", "--bad", "--warn", "--idle"):
            for paper in ("--page", "--card"):
                assert _contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    shades = re.findall(r"\.s\d \{ fill: (#\w{6});", style)
    assert len(shades) == len(set(shades)) == SHADES >= len(PHASES)
    assert all(_contrast("#000000", shade) >= 4.5 for shade in shades)


@pytest.mark.parametrize("report", [run_reports.full(), profile_reports.full()], ids=["run", "profile"])
def test_page_loads_nothing_and_runs_nothing(report: Any) -> None:
    text = as_page(report)
    for loader in ("http://", "https://", "url(", "@import", "src=", "href=", "<script", "<link", "<iframe", "//cdn"):
        assert loader not in text
    policy = next(meta for meta in Page(text).having("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


@of_both_kinds
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_adds_no_tag_and_no_attribute(make: Callable[..., Any], text: str) -> None:
    assert Page(as_page(make(text))).shape() == Page(as_page(make("harmless"))).shape()


@of_both_kinds
def test_hostile_text_is_shown_literally(make: Callable[..., Any]) -> None:
    words = Page(as_page(make("<script>alert('1')</script>"))).words
    for tag in ("li", "pre", "th"):
        assert any(word.startswith("<script>alert('1')</script>") for name, word in words if name == tag), tag


@of_both_kinds
def test_characters_no_page_may_hold_are_stripped(make: Callable[..., Any]) -> None:
    html = as_page(make("a\x00\x1b[31m\ud800\u202eb"))
    assert "a[31mb" in html
    assert not set(html) & set("\x00\x1b\ud800\u202e")


@of_both_kinds
def test_text_inside_a_picture_is_clipped(make: Callable[..., Any]) -> None:
    inside = [word for tag, word in Page(as_page(make("x" * 5000))).words if tag == "text"]
    assert inside
    assert all(len(word) < 60 for word in inside)


@of_both_kinds
@settings(deadline=None)  # the machine may be busy
@given(text=st.text(st.characters(), min_size=1, max_size=40), value=st.floats())
@example(text="negative", value=-1.0)
@example(text="overflow", value=1.7e308)
@example(text="small", value=5e-324)
def test_any_text_and_number_give_a_whole_page(make: Callable[..., Any], text: str, value: float) -> None:
    html = as_page(make(text, value))
    html.encode("utf-8")
    Page(html)
    assert all(0 <= place <= 100 for place in places(pictures(html).values()))


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
    assert [text for _, text in axis.ticks()] == labels
    assert all(0 <= at <= 100 for at, _ in axis.ticks())

"""The page of a run under `accel.optimize`: what it says, and that its pictures keep the ratios."""

from __future__ import annotations

from typing import Any

from accel.report import Event, Machine, Report
from accel.report.rendering import as_page
from tests.accel import run_reports
from tests.accel.pages import Page, number, pictures
from tests.accel.run_reports import row


def _report(**fields: Any) -> Report:
    base: dict[str, Any] = {
        "model": "Net",
        "plain_ms": 25.0,
        "accel_ms": 10.0,
        "speedup": 2.5,
        "speedup_low": 2.4,
        "speedup_high": 2.6,
        "training_same": "",
        "anatomy_before": {"loader": 5.0, "backward": 20.0},
        "anatomy_after": {"loader": 1.0, "backward": 9.0},
        "rows": [row(), row(name="compile", status="undone", after_ms=29.6, gain=0.9, gain_low=0.85, gain_high=0.95)],
        "bottleneck": "",
    }
    return run_reports.full(**{**base, **fields})


def _page(**fields: Any) -> Page:
    return Page(as_page(_report(**fields)))


def test_verdict_is_the_heading() -> None:
    page = _page()
    assert ("h1", "2.50x: 25 → 10 ms per step") in page.words
    assert "confidence interval [2.40x, 2.60x], that is +140 % to +160 % steps a second" in page.text()
    assert page.headings() == [
        *("Before and after", "Strategies", "Cost and what is left", "Step anatomy", "Where and how"),
    ]


def test_unfinished_run_is_marked() -> None:
    assert ("span", "interrupted") in _page(state="interrupted").words
    assert ("span", "done") not in _page().words


def test_bars_start_at_zero_and_keep_the_ratio() -> None:
    bars = [rect for rect in _page().having("rect") if rect["class"] in {"plain", "good"}]
    assert [(bar["x"], bar["width"]) for bar in bars] == [("0", "100.0%"), ("0", "40.0%")]


def test_anatomy_segments_lie_end_to_end_on_one_scale() -> None:
    parts = pictures(as_page(_report()))["phases"].findall("svg")
    assert [(part.get("x"), part.get("width")) for part in parts] == [
        ("0.0%", "20.0%"),
        ("20.0%", "80.0%"),
        ("0.0%", "4.0%"),
        ("4.0%", "36.0%"),
    ]


def test_table_of_phases_has_ms_and_share() -> None:
    text = _page().text()
    assert "1 loader 5 20 % 1 10 %" in text
    assert "2 backward 20 80 % 9 90 %" in text


def test_whiskers_span_the_interval_and_one_is_marked() -> None:
    lines = list(pictures(as_page(_report()))["gains"].iter("line"))
    one = next(number(line, "x1") for line in lines if line.get("class") == "one")
    spans = [line for line in lines if line.get("class") == "whisker" and line.get("x1") != line.get("x2")]
    kept, undone = [(number(span, "x1"), number(span, "x2")) for span in spans]
    # All of the kept strategy's interval is right of no change, all of the undone one's left of it.
    assert one < kept[0] < kept[1] <= 100
    assert 0 <= undone[0] < undone[1] < one


def test_status_is_a_word_and_a_sign() -> None:
    words = _page(rows=[row(), row(status="undone"), row(status="refused"), row(status="disabled")]).words
    for text in ("✓ kept", "✗ undone", "? refused", "○ disabled"):
        assert ("span", text) in words


def test_strategy_table_has_every_number_and_what_is_declared() -> None:
    page = _page(rows=[row(output_error=0.0, tolerance=1e-4, steps=24, setting="dims=4")])
    cells = [word for tag, word in page.words if tag in {"td", "th", "span"}]
    for text in (
        *("channels_last dims=4", "NHWC", "treats conv", "1.45x [1.38, 1.52]", "26.6 → 18.4 ± 0.31"),
        *("same bits/2e-06", "reordered, allowed 0.0001", "0.8 s", "24 steps", "53 layout conversions went away"),
    ):
        assert text in cells, text


def test_cost_events_unseen_machine_command_and_plan_are_shown() -> None:
    page = _page(
        events=[Event(step=120, text="validation began")],
        unseen=["time in workers"],
        machine=Machine(device="cpu (EPYC)", cores=2),
        command="python train.py",
        fingerprint="0123abcd",
        plan={"channels_last": {"dims": 4}},
    )
    assert ("dd", "214 of 700 steps were trial steps, cost 3.2 s; paid back at step 611") in page.words
    assert ("li", "step 120: validation began") in page.words
    assert ("li", "time in workers") in page.words
    assert ("dd", "cpu (EPYC), 2 cores, 1 process") in page.words
    assert ("dd", "0123abcd") in page.words
    assert ("pre", "python train.py") in page.words
    assert ("pre", '{"channels_last": {"dims": 4}}') in page.words


def test_all_events_are_shown() -> None:
    words = _page(events=[Event(step=step, text="retry") for step in range(50)]).words
    assert sum(tag == "li" for tag, _ in words) == 50


def test_report_without_numbers_renders() -> None:
    page = Page(as_page(Report()))
    assert ("h1", "no verdict yet: 0 steps seen, the search has not ended") in page.words
    assert ("p", "Not measured yet.") in page.words
    assert ("p", "None was considered yet.") in page.words
    assert page.having("svg") == []


def test_row_without_numbers_renders_dashes() -> None:
    page = Page(as_page(Report(rows=[run_reports.untried()])))
    assert [word for tag, word in page.words if tag == "td"] == ["-", "-", "-", "-", "needs reduced"]

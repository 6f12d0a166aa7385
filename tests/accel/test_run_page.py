"""The page of a run under `accel.optimize`: what it says, and that its pictures keep the ratios."""

from __future__ import annotations

from typing import Any

import pytest

from accel.report import Event, Report
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


def test_unfinished_run_is_marked() -> None:
    assert ("span", "interrupted") in _page(state="interrupted").words
    assert ("span", "done") not in _page().words


def test_bars_start_at_zero_and_keep_the_ratio() -> None:
    bars = pictures(as_page(_report()))["steps"].findall("svg")
    assert [(bar.get("x"), bar.get("width")) for bar in bars] == [("0.0%", "100.0%"), ("0.0%", "40.0%")]


def test_anatomy_segments_lie_end_to_end_on_one_scale() -> None:
    parts = pictures(as_page(_report()))["phases"].findall("svg")
    assert [(part.get("x"), part.get("width")) for part in parts] == [
        ("0.0%", "20.0%"),
        ("20.0%", "80.0%"),
        ("0.0%", "4.0%"),
        ("4.0%", "36.0%"),
    ]


def test_spans_are_the_intervals_and_one_is_marked() -> None:
    gains = pictures(as_page(_report()))["gains"]
    (one,) = (number(line, "x1") for line in gains.findall("line") if line.get("class") == "dashed")
    kept, undone = ((number(span, "x"), number(span, "width")) for span in gains.findall("svg"))
    # All of the kept strategy's interval is right of no change, all of the undone one's left of it.
    assert undone[0] + undone[1] < one < kept[0] < kept[0] + kept[1] <= 100
    assert kept[1] / undone[1] == pytest.approx(0.14 / 0.1, abs=0.01)


def test_all_events_are_shown() -> None:
    words = _page(events=[Event(step=step, text="retry") for step in range(50)]).words
    assert sum(tag == "li" for tag, _ in words) == 50

"""What a run prints when its search ends: a handful of lines, and how to see the rest."""

from __future__ import annotations

import logging

import pytest

from accel.report import Report, ReportPlace
from accel.report.optimize_document import summary
from accel.session.journal import Announcer
from tests.accel.run_reports import full, row

WHOLE = "print(accel.explain(model))"


def lines(report: Report) -> list[str]:
    return summary(report, WHOLE).splitlines()


def test_six_lines_say_what_was_won_and_where_the_rest_is() -> None:
    kept = [row(), row(name="loader_workers", setting="workers=2"), row(name="tf32", status="not applicable", why="no")]
    assert lines(full(model="Net", rows=kept)) == [
        "accel: Net 1.62x [1.58, 1.71]: 26 → 16 ms per step",
        "  training the same: gradients agree to 3e-07",
        "  kept: channels_last, loader_workers workers=2",
        "  limits the run now: convolutions, 61 % of the step; bf16 would treat it",
        "  search: 214 of 700 steps were trial steps, cost 3.2 s; paid back at step 611",
        "  all strategies: print(accel.explain(model))",
    ]


def test_a_run_in_which_nothing_won_says_what_was_tried() -> None:
    rows = [row(status="undone", why="slower"), row(name="fast", status="inconclusive", why="too noisy")]
    left = full(model="Net", plan={}, accel_ms=26.0, speedup=1.0, rows=rows)
    assert lines(left)[:2] == [
        "accel: Net left as it was: nothing tried made the step faster (26 ms)",
        "  tried: channels_last (slower), fast (too noisy)",
    ]
    left.rows = [row(status="not tried", why="too dear"), row(name="tf32", status="not applicable", why="no CUDA")]
    assert lines(left)[1] == "  tried: nothing; not tried: channels_last"
    left.rows = left.rows[1:]
    assert lines(left)[1] == "  tried: nothing, no strategy fits this run"


def test_a_replayed_plan_is_named_once() -> None:
    replayed = full(model="Net", state="replayed", speedup=None, plain_ms=None)
    assert lines(replayed)[0] == "accel: Net replayed without a trial: channels_last"
    assert sum("channels_last" in line for line in lines(replayed)) == 1


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (None, WHOLE),
        ("out.json", "accel report out.json"),
        ("out.html", "out.html"),
        ("runs/one two", "accel report 'runs/one two/report.json'"),
    ],
)
def test_where_the_whole_report_is(target: str | None, text: str) -> None:
    assert ReportPlace(target).whole == text


def test_decisions_of_the_search_are_logged_and_later_changes_printed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    announcer = Announcer()
    announcer.announce(row())
    assert caplog.messages == []
    caplog.set_level(logging.DEBUG, logger="accel")
    announcer.announce(row(name="tf32", status="undone", why="slower"))
    assert caplog.messages == ["accel: tf32 undone: 1.45x [1.38, 1.52], 26.6 → 18.4 ms; slower"]
    assert capsys.readouterr().err == ""

    announcer.search_has_ended()
    announcer.announce(row(name="tf32", status="not tried"))
    assert capsys.readouterr().err == ""
    announcer.announce(row(status="undone", why="it no longer pays"))
    assert capsys.readouterr().err.startswith("accel: channels_last undone: 1.45x")
    announcer.announce(row(name="compiled"))
    assert capsys.readouterr().err.startswith("accel: compiled kept: 1.45x")

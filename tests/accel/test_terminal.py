"""The terminal report: what it says, and that no text can break its width or colour it."""

from __future__ import annotations

import io
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from accel.commands import profile
from accel.profiler.gather import Exchange
from accel.profiler.script import Script
from accel.report import Event, Report
from accel.report.optimize_document import decision_line, summary
from accel.report.rendering import as_text as render
from accel.report.words import clean, ms_text
from tests.accel import profile_reports, run_reports
from tests.accel.run_reports import full, row

# Markup, cursor movement, right-to-left override, line separators, wide and unpaired characters.
HOSTILE = [
    "[red]x[/]",
    "[/]",
    "\x1b[31mred\x1b[0m",
    "\u202egnp",
    "a\r\nb\u2028c\x85d",
    "漢字" * 60,
    "\ud800",
    "x" * 300,
]
texts = st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(), max_size=150))


def _lines(report: Report, width: int = 100) -> list[str]:
    return render(report, width=width, color=False).splitlines()


@pytest.mark.parametrize("state", ["interrupted", "searching", "replayed", "undone"])
def test_run_that_did_not_end_is_marked(state: str) -> None:
    assert _lines(full(state=state))[0].startswith(f"accel: [{state}] 1.62x")


@pytest.mark.parametrize(
    ("output", "gradient", "text"),
    [(0.0, 0.0, "same bits"), (0.0, 2e-6, "same bits/2e-06"), (None, None, "-"), (None, 1e-3, "-/0.001")],
)
def test_numerics_say_same_bits_only_for_zero(output: float | None, gradient: float | None, text: str) -> None:
    report = full(rows=[row(output_error=output, gradient_error=gradient)])
    assert f"± 0.31  {text}  " in "\n".join(_lines(report))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "paid back at step 611"),
        ({"steps": 300}, "pays back at step 611"),
        ({"break_even_step": None}, "does not pay back"),
        ({"break_even_step": None, "state": "searching"}, "not known yet when it pays back"),
        ({"break_even_step": None, "search_s": 0.0}, "nothing to pay back"),
    ],
)
def test_search_line_says_when_it_pays_back(fields: dict[str, object], text: str) -> None:
    report = full(**fields)
    cost = "0 s" if report.search_s == 0 else "3.2 s"
    assert f"search: 214 of {report.steps} steps were trial steps, cost {cost}; {text}" in _lines(report)


def test_many_events_are_cut_to_the_latest() -> None:
    lines = _lines(full(events=[Event(step=step, text="retry") for step in range(50)]))
    assert "… 30 earlier events are in the JSON report" in lines
    assert "step 49: retry" in lines
    assert "step 29: retry" not in lines


def test_a_table_of_nothing_has_no_header() -> None:
    lines = _lines(full(rows=[row(status="not applicable", why="no")]))
    assert lines[lines.index("strategies") + 1] == "not applicable: channels_last (no)"


def test_markup_is_shown_literally_and_escapes_are_stripped() -> None:
    text = render(full(rows=[row(name="[red]x[/]", why="\x1b[31mred\x1b[0m \u202erl")]), width=100, color=False)
    assert "[red]x[/]" in text
    assert "[red]x[/]: [31mred[0m rl" in text


class _Stream(io.StringIO):
    """A stream that may be a terminal, with an encoding."""

    def __init__(self, tty: bool, encoding: str = "utf-8") -> None:
        super().__init__()
        self._tty, self._encoding = tty, encoding

    def isatty(self) -> bool:
        return self._tty

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


@pytest.mark.parametrize(
    ("tty", "no_color", "color", "expected"),
    [
        (True, "", None, True),
        (True, "1", None, False),
        (False, "", None, False),
        (False, "1", True, True),
        (True, "", False, False),
    ],
)
def test_colour_only_where_wanted(
    monkeypatch: pytest.MonkeyPatch, tty: bool, no_color: str, color: bool | None, expected: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    # A variable that rich obeys by itself must not bring colour back.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", _Stream(tty))
    text = render(full(), width=80, color=color)
    assert ("\x1b[1;32m" in text) is expected
    assert ("\x1b" in text) is expected


@pytest.mark.parametrize("tty", [True, False])
def test_colour_and_characters_follow_the_stream_that_the_text_goes_to(
    monkeypatch: pytest.MonkeyPatch, tty: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", _Stream(not tty))
    monkeypatch.setattr(sys, "stderr", _Stream(tty))
    assert ("\x1b" in render(full(), stream=sys.stderr)) is tty
    assert ("\x1b" in summary(full(), "")) is tty
    assert ("\x1b" in render(full())) is not tty
    assert not render(full(), stream=sys.stderr).isascii()
    monkeypatch.setattr(sys, "stderr", _Stream(tty, "ascii"))
    assert summary(full(model="Ünet"), "").isascii()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in summary(full(), "")


@pytest.mark.parametrize("tty", [True, False])
def test_so_does_that_of_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tty: bool) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", _Stream(not tty))
    monkeypatch.setattr(sys, "stderr", errors := _Stream(tty))
    job = profile.ProfileJob(Script("none.py", []), Exchange(), profile.ReportFiles.at(tmp_path), "", True, True)
    job._write(profile_reports.full())
    verdict, *others = errors.getvalue().splitlines()
    assert ("\x1b" in verdict) is tty
    assert ("\x1b" in "".join(others)) is tty


def test_colour_changes_no_word() -> None:
    text = render(full(), width=80, color=True)
    for code in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[1;32m", "\x1b[1;4m"):
        text = text.replace(code, "")
    assert [line.rstrip() for line in text.splitlines()] == _lines(full(), 80)


def test_stream_without_unicode_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", _Stream(False, "ascii"))
    text = render(full(model="Ünet"), width=100)
    assert text.isascii()
    assert "26 -> 16 ms per step" in text


@pytest.mark.parametrize("make", [run_reports.hostile, profile_reports.hostile], ids=["run", "profile"])
@settings(deadline=None)  # the machine may be busy
@given(text=texts, number=st.floats(), width=st.integers(20, 300))
@example(text="x", number=1e308, width=100)
@example(text="x", number=-0.0, width=60)
@example(text="[red]x[/]", number=1.0, width=100)
def test_no_text_and_no_number_breaks_the_width(
    make: Callable[[str, float], Any], text: str, number: float, width: int
) -> None:
    page = render(make(text, number), width=width, color=False)
    assert "\x1b" not in page
    page.encode("utf-8")
    for line in page.split("\n"):
        assert cell_len(line) <= min(width, 100)
        assert not {unicodedata.category(char) for char in line} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@settings(deadline=None)  # the machine may be busy
@given(text=texts)
def test_clean_text_is_one_printable_line(text: str) -> None:
    assert len(clean(text).splitlines()) <= 1
    assert "\x1b" not in clean(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.1234, "0.123"), (18.44, "18.4"), (99.96, "100"), (1234.5, "1,234"), (float("nan"), "-")],
)
def test_ms_has_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert ms_text(value) == text


def test_decision_line_of_a_kept_strategy() -> None:
    assert decision_line(row()) == (
        "accel: channels_last kept: 1.45x [1.38, 1.52], 26.6 → 18.4 ms; 53 layout conversions went away"
    )


def test_long_reason_is_cut_with_an_ellipsis() -> None:
    line = decision_line(row(why="漢字 because " * 30))
    assert line.endswith("…")
    assert 90 < cell_len(line) <= 100


def test_decision_line_is_one_line_of_plain_text() -> None:
    line = decision_line(row(name="a\nb", why="c\x1b[2Jd"))
    assert line.startswith("accel: a b kept")
    assert line.endswith("; c[2Jd")

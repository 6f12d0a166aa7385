"""Comparison of two reports: what counts as a regression, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len

from accel.errors import InvalidArgument, ReportError
from accel.profiler.report import ProfileReport
from accel.report import Machine, Report, StrategyRow
from accel.report.compare import compare
from tests.accel import profile_reports, run_reports


def _row(name: str, **fields: object) -> StrategyRow:
    base: dict[str, object] = {"summary": "", "treats": [], "exactness": "exact", "status": "kept", "gain": 1.2}
    return StrategyRow(name=name, **{**base, **fields})  # type: ignore[arg-type]


def _report(accel_ms: float | None, **fields: object) -> Report:
    return Report(accel_ms=accel_ms, **{"state": "done", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("new_ms", "threshold", "regressed"),
    [
        (10.0, 0.05, False),
        (10.5, 0.05, False),  # exactly the threshold is still the same
        (10.51, 0.05, True),
        (9.0, 0.05, False),
        (10.01, 0.0, True),
        (10.0, 0.0, False),
        (19.0, 1.0, False),
    ],
)
@pytest.mark.parametrize("make", [_report, lambda ms: ProfileReport(steps=100, step_ms=ms)], ids=["run", "profile"])
def test_regression_is_slower_than_the_threshold(
    make: Callable[[float], Any], new_ms: float, threshold: float, regressed: bool
) -> None:
    comparison = compare(make(10.0), make(new_ms), threshold=threshold)
    assert comparison.regressed is regressed
    assert comparison.ratio == pytest.approx(new_ms / 10.0)
    assert threshold != 0.05 or compare(make(10.0), make(new_ms)).regressed is regressed


@pytest.mark.parametrize("value", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_report_without_a_step_time_is_refused(value: float | None) -> None:
    with pytest.raises(ReportError, match=r"the first report has no accelerated step time.*let its search end"):
        compare(_report(value, state="interrupted"), _report(1.0))
    with pytest.raises(ReportError, match="the second report has no accelerated step time"):
        compare(_report(1.0), _report(value))
    with pytest.raises(ReportError, match="compare one with a speed-up of the whole"):
        compare(_report(1.0), _report(value, state="done"))


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf")])
def test_senseless_threshold_is_refused(threshold: float) -> None:
    with pytest.raises(InvalidArgument, match=r"threshold must be 0 or more.*Found: "):
        compare(_report(1.0), _report(1.0), threshold=threshold)


def test_verdict_is_the_first_line() -> None:
    text = compare(_report(16.2), _report(18.0)).render(width=100, color=False)
    assert text.splitlines()[0] == "regression: 16.2 → 18 ms per step, 11.1 % slower (threshold 5 %)"
    text = compare(_report(18.0), _report(18.0)).render(width=100, color=False)
    assert text.splitlines() == ["no regression: 18 → 18 ms per step, no change (threshold 5 %)"]


def test_strategies_are_matched_by_name() -> None:
    old = _report(1.0, rows=[_row("same"), _row("gone"), _row("dropped", setting="n=2")])
    new = _report(1.0, rows=[_row("same"), _row("dropped", status="undone", gain=0.9), _row("new")])
    comparison = compare(old, new)
    lines = [line.split() for line in comparison.render(width=100, color=False).splitlines()]
    assert ["same", "kept", "1.20x", "→", "1.20x"] in lines
    assert ["*", "gone", "kept", "→", "no", "row", "1.20x", "→", "-"] in lines
    assert ["*", "dropped", "kept", "n=2", "→", "undone", "1.20x", "→", "0.90x"] in lines
    assert ["*", "new", "no", "row", "→", "kept", "-", "→", "1.20x"] in lines


def test_phases_show_both_times_and_the_difference() -> None:
    old = _report(1.0, anatomy_after={"forward": 5.0, "loader": 1.0})
    new = _report(1.0, anatomy_after={"forward": 6.5, "other": 2.0})
    lines = [line.split() for line in compare(old, new).render(width=100, color=False).splitlines()]
    assert ["forward", "5", "→", "6.5", "+1.5"] in lines
    assert ["loader", "1", "→", "-", "-"] in lines
    assert ["other", "-", "→", "2", "-"] in lines


def test_other_machine_or_model_is_noted() -> None:
    old = _report(1.0, model="A", machine=Machine(device="cpu", cores=2))
    new = _report(1.0, model="B", machine=Machine(device="cpu", cores=8), samples_per_step=32.0, state="interrupted")
    assert compare(old, new).notes == (
        "model went from 'A' to 'B'",
        "samples per step went from None to 32.0",
        "cores went from 2 to 8",
        "the second run is interrupted",
    )
    assert "note: cores went from 2 to 8" in compare(old, new).render(width=100, color=False)


@pytest.mark.parametrize(
    ("batches", "new_ms", "ratio", "unit"),
    [
        ((64.0, 32.0), 9.0, 1.8, "1,000 samples"),  # a shorter step, and fewer samples a second
        ((32.0, 64.0), 19.0, 0.95, "1,000 samples"),
        ((64.0, 60.0), 10.0, 1.0, "step"),  # a mean over a run
        ((None, 32.0), 9.0, 0.9, "step"),
        ((64.0, float("nan")), 9.0, 0.9, "step"),
    ],
)
def test_where_the_batch_changed_samples_are_compared(
    batches: tuple[float | None, float], new_ms: float, ratio: float, unit: str
) -> None:
    old, new = _report(10.0, samples_per_step=batches[0]), _report(new_ms, samples_per_step=batches[1])
    comparison = compare(old, new)
    assert comparison.ratio == pytest.approx(ratio)
    assert comparison.unit == unit
    assert any("so samples/s are compared" in note for note in comparison.notes) == (unit != "step")


def test_with_another_number_of_ranks_steps_are_compared() -> None:
    old = _report(10.0, samples_per_step=64.0)
    new = _report(9.0, samples_per_step=32.0, machine=Machine(world_size=2))
    assert compare(old, new).unit == "step"
    assert "samples per step went from 64.0 to 32.0" in compare(old, new).notes


@pytest.mark.parametrize("make", [run_reports.hostile, profile_reports.hostile], ids=["run", "profile"])
@pytest.mark.parametrize("width", [60, 100, 250])
def test_hostile_names_keep_the_width(make: Callable[[str], Any], width: int) -> None:
    text = compare(make("[red]\x1b[31m漢\n" * 40), make("x")).render(width=width, color=False)
    assert "[red]" in text
    assert "\x1b" not in text
    assert all(cell_len(line) <= min(width, 100) for line in text.splitlines())

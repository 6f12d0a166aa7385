"""The demo promises what its machine can give, and waiting for a turn is none of a run's time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo, demo_promise
from benchmarks.demo_promise import Processor, elsewhere, kept, promise, wanted_text
from benchmarks.pairs import Racer


@pytest.mark.parametrize(
    ("cores", "kind", "speedups"),
    [
        (2, Processor.BF16, {"default": (1.25, 1.5), "reduced": (1.7, 2.2)}),
        (64, Processor.BF16, {"default": (1.25, 1.5), "reduced": (1.7, 2.2)}),
        (2, Processor.AMX, {"default": (1.05, 1.25), "reduced": (1.7, 2.1)}),
        (2, Processor.FLOAT32, {"default": (1.2, 1.5), "reduced": (1.2, 1.5)}),
        (1, Processor.BF16, {"default": None, "reduced": None}),
        (8, Processor.UNKNOWN, {"default": None, "reduced": None}),
    ],
)
def test_the_promise_depends_on_the_machine(
    cores: int, kind: Processor, speedups: dict[str, demo_promise.Interval | None]
) -> None:
    assert promise(cores, kind).speedups == speedups


@pytest.mark.parametrize(
    ("gave", "kind"),
    [
        # Both were called a broken promise once, as that of another kind of processor was asked of them.
        ({"default": 1.37, "reduced": 1.31}, Processor.FLOAT32),
        ({"default": 1.18, "reduced": 1.92}, Processor.AMX),
    ],
)
def test_what_a_kind_of_processor_gave_is_as_promised_there_and_not_elsewhere(
    gave: dict[str, float], kind: Processor
) -> None:
    for other in (kind, Processor.BF16):
        wanted = promise(2, other).speedups
        assert all(kept({"speedup": gave[n], "high": gave[n], "wanted": wanted[n]}) for n in gave) is (other is kind)


@pytest.mark.parametrize(("high", "held"), [(1.02, True), (0.97, False)])
def test_where_no_figure_is_promised_slower_is_not_as_promised(high: float, held: bool) -> None:
    assert kept({"speedup": 0.95, "high": high, "wanted": None}) is held
    assert wanted_text(None) == "not slower"


@pytest.mark.parametrize(("high", "held"), [(1.86, True), (1.79, False)])
def test_an_interval_that_reaches_what_is_promised_is_as_promised(high: float, held: bool) -> None:
    """1.80 [1.73, 1.86] stood beside "as promised: NO", since it was just below 1.8."""
    assert kept({"speedup": 1.7996, "high": high, "wanted": (1.8, 2.1)}) is held


def test_recorded_runs_are_told_from_the_committed_results(tmp_path: Path) -> None:
    committed = elsewhere()
    assert committed
    assert all("default" in line and "reduced" in line for line in committed)
    assert committed == sorted(committed, key=lambda line: line[:10], reverse=True)  # by their dates
    assert elsewhere(tmp_path) == []


def finished(turns: list[list[float]], report: dict[str, Any] | None = None) -> Racer:
    result = {"accuracy": 90.0, "losses": [0.5] * 9, "report": json.dumps(report or {})}
    return Racer("x", None, None, turns=turns, result=result, done=True)  # type: ignore[arg-type]


def test_times_and_speed_up_of_the_summary_are_one_estimate() -> None:
    """A machine that drifts: the medians over the run would give another ratio."""
    drift = [1.0, 1.1, 1.3, 2.0, 3.0]
    report = {"machine": {"cores": 2}, "search_s": 1.0, "break_even_step": 9, "rows": [], "speedup": 1.2}
    runs = [
        {
            "plain": finished([[0.020 * d] * 8 for d in drift]),
            "default": finished([[0.016 * d] * 8 for d in drift[:3]], report),
            "reduced": finished([[0.010 * d] * 8 for d in drift], report),
        }
    ]
    promised = promise(2, Processor.FLOAT32)

    summary = demo._summarise(runs, "digits", promised)

    for name in ("default", "reduced"):
        found = summary["variants"][name]
        assert found["plain_ms"] / found["ms"] == pytest.approx(found["speedup"])
        assert found["wanted"] == promised.speedups[name]
    assert summary["passed"]
    assert summary["promised_for"] == "a CPU without bfloat16 instructions, 2 cores"


def test_the_tables_of_the_committed_results_can_still_be_made() -> None:
    for recorded in demo_promise.RESULTS.glob("demo-*.json"):
        assert "promised" in demo.table_block(json.loads(recorded.read_text()))


@pytest.mark.parametrize(
    ("changes", "passed", "line"),
    [
        ({}, True, "as promised for a CPU without bfloat16 instructions, 2 cores: yes"),
        (
            {"speedup": 1.02, "low": 1.0, "high": 1.04},
            False,
            "2 cores: NO: reduced 1.02x [1.00, 1.04], promised 1.2x to 1.5x. Next: run it while nothing else does",
        ),
        ({"accuracy_difference": -0.8}, False, "NO: reduced accuracy -0.80, promised ±0.7. Next: "),
        (
            {"pairs": 0, "reported": [None]},
            None,
            "no verdict: the search had no verdict in time: reduced (nothing ",
        ),
        (
            {"high": 70.29, "speedup": 6.34, "low": 0.57, "reported": [None]},
            None,
            "in time: reduced (6.34x [0.57, 70.29] so far). Next: run it while nothing else does, or make demo-full",
        ),
    ],
)
def test_the_last_line_is_a_verdict_or_says_what_is_missing_and_what_to_do(
    changes: dict[str, Any], passed: bool | None, line: str
) -> None:
    figures = {"pairs": 9, "speedup": 1.3, "low": 1.2, "high": 1.4, "reported": [1.3], "accuracy_difference": 0.1}
    figures["wanted"] = (1.2, 1.5)  # type: ignore[assignment]
    summary: dict[str, Any] = {"promised_for": "a CPU without bfloat16 instructions, 2 cores"}
    summary["variants"] = {"default": figures, "reduced": {**figures, **changes}}

    demo._judge(summary, seeds=1, is_cut=False)

    assert summary["passed"] is passed
    assert line in demo._verdict(summary)


def test_a_training_that_was_cut_short_is_not_judged_by_its_accuracy() -> None:
    ended = finished([[0.02] * 8])
    assert not demo._is_cut([{"plain": ended, "default": ended}])
    other = finished([[0.02] * 8])
    other.result["losses"] = [0.5] * 3
    assert demo._is_cut([{"plain": ended, "default": other}])

"""The terminal report of a profiled run: what it says first, what adds up, and that no text can break it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from accel.profiler.evidence import OpTime, Roofline
from accel.profiler.report import ProfileReport, Saving, from_json
from accel.report import words
from accel.report.rendering import as_brief
from accel.report.rendering import as_text as render
from tests.accel import profile_reports


def _lines(report: ProfileReport, width: int = 100) -> list[str]:
    return render(report, width=width, color=False).splitlines()


@pytest.mark.parametrize(
    ("measured", "predicted", "confirmed", "text"),
    [
        (
            Saving(value=0.3, low=0.2, high=0.4),
            None,
            True,
            "saves 30 % [20, 40] of the step, confirmed by experiment",
        ),
        (
            Saving(value=0.3, low=0.2, high=0.4),
            Saving(value=0.5, low=0.4, high=0.6),
            False,
            "not confirmed: in the experiment it saved 30 % [20, 40] of the step (predicted 50 %)",
        ),
        (
            Saving(value=0.01, low=-0.02, high=0.04),
            None,
            False,
            "not confirmed: in the experiment it saved 1 % [-2, 4] of the step",
        ),
        (None, None, True, "the saving can't be estimated from what was observed"),
    ],
)
def test_only_a_shown_saving_is_called_confirmed(
    measured: Saving | None, predicted: Saving | None, confirmed: bool, text: str
) -> None:
    finding = replace(profile_reports.findings()[0], measured=measured, predicted=predicted, confirmed=confirmed)

    assert words.effect_text(finding) == text


@pytest.mark.parametrize(
    ("experiment", "effect"),
    [
        ("tried, inconclusive: it was off", "predicted, inconclusive: saves 8 % [5, 10] of the step"),
        ("could not be tried, it took no hold", "predicted, not tried: saves 8 % [5, 10] of the step"),
        ("tried, but both went", "predicted, tried only with another cause: saves 8 % [5, 10] of the step"),
    ],
)
def test_an_experiment_that_measured_nothing_is_no_measurement(experiment: str, effect: str) -> None:
    predicted = Saving(value=0.08, low=0.05, high=0.1)
    finding = replace(profile_reports.findings()[0], measured=None, predicted=predicted, experiment=experiment)

    assert words.effect_text(finding) == effect
    assert words.experiment_text(finding) == experiment


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"verdict": "no verdict: too short", "refused": "too short", "evidence": None}, "no verdict: too short"),
        ({"verdict": "it looks input-bound", "refused": "too noisy"}, "no verdict: too noisy; it looks input-bound"),
        (
            {"refused": "two causes overlap", "findings": profile_reports.findings()},
            "no verdict: two causes overlap",
        ),
        ({"verdict": "", "refused": "", "steps": 1}, "no verdict: 1 step seen"),
    ],
)
def test_refused_verdict_repeats_nothing(fields: dict[str, object], text: str) -> None:
    assert words.verdict_text(profile_reports.refused(**fields)) == text


def test_a_run_prints_one_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = as_brief(profile_reports.full()).splitlines()
    assert len(lines) <= 30
    assert "less than 1 % each: copy, host, loss, outside" in lines
    assert not any(line.startswith(("  copy", "  host")) for line in lines)


def test_what_the_first_cause_says_is_not_said_twice() -> None:
    report = profile_reports.full()
    remedy = report.findings[0].remedy
    assert "next" not in as_brief(replace(report, next=[remedy])).splitlines()
    assert "next" in as_brief(report).splitlines()


def test_one_rank_needs_no_table_of_ranks() -> None:
    assert not any(line.startswith("ranks") for line in _lines(profile_reports.full(ranks=[profile_reports.rank(0)])))


def test_of_many_ranks_the_slowest_are_shown() -> None:
    lines = _lines(profile_reports.wide(ranks=64))
    assert "… 48 faster ranks are in the JSON report" in lines
    assert any(line.startswith("17 straggler") for line in lines)
    assert any(line.startswith("63 ") for line in lines)
    assert not any(line.startswith("0 ") and "node-0" in line for line in lines)


@pytest.mark.parametrize(
    ("gflops", "gb_per_s", "intensity", "share"),
    [
        (50.0, None, 100.0, 0.5),  # under the level roof
        (50.0, None, 5.0, 1.0),  # under the slope: 5 FLOP a byte × 10 GB/s
        (None, 5.0, None, 0.5),
        (50.0, None, None, None),
        (None, None, None, None),
        (50.0, None, 0.0, None),
    ],
)
def test_share_of_the_roof(
    gflops: float | None, gb_per_s: float | None, intensity: float | None, share: float | None
) -> None:
    op = OpTime(name="op", calls=1.0, ms=1.0, share=1.0, gflops=gflops, gb_per_s=gb_per_s, intensity=intensity)
    assert words.roof_share(op, Roofline(gflops={"float32": 100.0}, gb_per_s=10.0)) == share
    assert words.roof_share(op, None) is None


def test_kernel_name_of_a_whole_template_is_cut() -> None:
    op = replace(profile_reports.ops()[0], name="void at::native::vectorized_elementwise_kernel<4, at::native::" * 20)
    line = next(line for line in _lines(profile_reports.full(ops=[op])) if line.startswith("void at::"))
    assert line.split("  ")[0].endswith("…")


@pytest.mark.parametrize("make", ["full", "refused", "hostile", "wide"])
def test_report_looks_the_same_after_its_json(make: str) -> None:
    report: ProfileReport = getattr(profile_reports, make)()
    assert json.loads(report.to_json())["kind"] == "profile"
    assert _lines(from_json(report.to_json())) == _lines(report)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.674, "67 %"), (0.0, "0 %"), (0.004, "0.4 %"), (-0.002, "-0.2 %"), (0.0099, "1 %"), (1.0, "100 %"), (None, "-")],
)
def test_percent(share: float | None, text: str) -> None:
    assert words.percent_text(share) == text
    assert words.percent_text(float("nan")) == "-"

"""Comparison of two profile reports: what counts as a regression, what became of the causes, what to beware of."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from accel.errors import ReportError
from accel.profiler.report import Node, ProfileReport
from accel.report.compare import compare
from tests.accel import profile_reports


def _report(step_ms: float, **fields: Any) -> ProfileReport:
    return ProfileReport(**{"steps": 100, "step_ms": step_ms, **fields})


def _lines(before: ProfileReport, after: ProfileReport, width: int = 100) -> list[str]:
    return compare(before, after).render(width=width, color=False).splitlines()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_report_without_a_step_time_is_refused(value: float) -> None:
    with pytest.raises(ReportError, match=r"the first report has no step time.*profile a run that trains"):
        compare(_report(value), _report(1.0))
    with pytest.raises(ReportError, match="the second report has no step time"):
        compare(_report(1.0), _report(value))


def test_findings_are_gone_new_or_stayed_with_their_shares() -> None:
    storage, straggler = profile_reports.findings()
    launch = dataclasses.replace(storage, cause="launch.small_ops", title="small operators", share=0.31)
    before = _report(200.0, findings=[storage, straggler], bottleneck="input")
    after = _report(80.0, findings=[launch, dataclasses.replace(straggler, share=0.19)], bottleneck="launch")
    lines = _lines(before, after)
    assert lines[0] == "no regression: 200 → 80 ms per step, 60 % faster (threshold 5 %)"
    assert lines[1] == "bottleneck: input → launch"
    words = [line.split() for line in lines]
    assert ["stayed", "straggler.input", "8", "%", "→", "19", "%", *straggler.title.split()] in words
    assert ["new", "launch.small_ops", "-", "→", "31", "%", "small", "operators"] in words
    assert any(line[:6] == ["gone", "input.storage", "67", "%", "→", "-"] for line in words)


def test_phases_show_both_times_and_the_difference() -> None:
    def tree(**parts: float) -> Node:
        whole = sum(parts.values())
        children = [Node(name=name, ms=ms, share=ms / whole) for name, ms in parts.items()]
        return Node(name="step", ms=whole, share=1.0, children=children)

    lines = _lines(
        _report(6.0, evidence=tree(data=5.0, forward=1.0)), _report(8.5, evidence=tree(data=6.5, backward=2.0))
    )
    words = [line.split() for line in lines]
    assert "step in ms, mean" in lines
    assert ["data", "5", "→", "6.5", "+1.5"] in words
    assert ["forward", "1", "→", "-", "-"] in words
    assert ["backward", "-", "→", "2", "-"] in words


def test_same_report_changes_nothing() -> None:
    comparison = compare(profile_reports.full(), profile_reports.full())
    assert comparison.notes == ()
    assert not comparison.regressed
    lines = comparison.render(width=100, color=False).splitlines()
    assert lines[:3] == [
        "no regression: 212 → 212 ms per step, no change (threshold 5 %)",
        "samples/s: 302, as before",
        "bottleneck: input, as before",
    ]


def test_other_machine_versions_ranks_or_model_are_noted() -> None:
    before, after = profile_reports.full(), profile_reports.full()
    after.host = dataclasses.replace(
        after.host, device="cpu", cores=2, threads=1, torch="2.14", model="Other", foreign_cores=1.5
    )
    after.ranks = [dataclasses.replace(profile_reports.rank(0), host="elsewhere")]
    after.ended = "interrupted"
    assert compare(before, after).notes == (
        "model went from 'ResNet, 25,557,032 parameters' to 'Other'",
        "device went from 'cuda (NVIDIA A100-SXM4-80GB)' to 'cpu'",
        "cores went from 16 to 2",
        "threads went from 8 to 1",
        "torch went from '2.13.0' to '2.14'",
        "number of ranks went from 2 to 1",
        "hosts went from 'node-0' to 'elsewhere'",
        "in the second run the script was interrupted; this is what was observed before",
        "in the second run other processes kept 1.5 cores busy",
    )
    assert "note: cores went from 16 to 2" in _lines(before, after)


def test_what_one_report_does_not_know_is_no_difference() -> None:
    assert not [note for note in compare(profile_reports.full(), _report(1.0)).notes if "''" in note or " 0" in note]


def test_refused_report_is_noted() -> None:
    before, after = profile_reports.full(), profile_reports.refused()
    assert (
        "the second report has no verdict: only 6 steps were seen, at least 20 are needed"
        in compare(before, after).notes
    )
    assert "bottleneck: input → no verdict" in _lines(before, after)


@pytest.mark.parametrize(("samples_per_s", "noted"), [(320.0, False), (640.0, True), (None, False), (0.0, False)])
def test_other_batch_size_is_noted(samples_per_s: float | None, noted: bool) -> None:
    # 32 samples a step of 100 ms, give or take what a mean over a run varies by.
    notes = compare(_report(100.0, samples_per_s=325.0), _report(100.0, samples_per_s=samples_per_s)).notes
    assert bool(notes) is noted
    if noted:
        assert notes == ("samples per step went from 32.5 to 64; so samples/s are compared",)


def test_runs_of_other_batch_sizes_are_compared_by_samples() -> None:
    before, after = _report(100.0, samples_per_s=320.0), _report(200.0, samples_per_s=330.0)
    found = compare(before, after)
    assert not found.regressed
    assert found.unit == "1,000 samples"
    assert compare(before, _report(200.0, samples_per_s=250.0)).regressed

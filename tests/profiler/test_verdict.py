"""One report from all ranks: who is slow, who waits, and when neither can be said."""

from __future__ import annotations

from typing import Any

import pytest

from accel.profiler import naming
from accel.profiler.conclusion import verdict
from accel.profiler.diagnose.anatomy import Anatomy
from accel.profiler.evidence import Evidence, TraceSummary
from accel.profiler.naming import Diagnosis
from accel.profiler.phases import Measurement
from accel.profiler.report import Finding, ProfileReport, Saving
from accel.report import words


def rank(number: int, forward_ms: float, wait_ms: float, *, steps: int = 40) -> tuple[Evidence, Diagnosis]:
    """A rank of a run whose step takes 100 ms."""
    phases = {"forward": forward_ms / 1e3, "backward": (100 - forward_ms) / 1e3}
    measured = [Measurement(step=n, seconds=0.1, phases=dict(phases), samples=8) for n in range(steps)]
    evidence = Evidence(
        steps=measured, cores=2, threads=1, rank=number, world_size=2, local_world_size=2, ddp_wait_share=wait_ms / 100
    )
    return evidence, naming.diagnose(evidence)


def merged(*ranks: tuple[Evidence, Diagnosis]) -> ProfileReport:
    evidence, diagnosis = ranks[0]
    told = verdict.build_report(evidence, diagnosis)
    posted: dict[int, Any] = {e.rank: verdict.rank_summary(e, d) for e, d in ranks}
    verdict.merge(told, posted, diagnosis.anatomy, 2)
    return told


def crowded(of: tuple[Evidence, Diagnosis]) -> tuple[Evidence, Diagnosis]:
    finding = Finding(cause="host.oversubscribed", bottleneck="host", title="", why=[], remedy="", share=0.4)
    return of[0], Diagnosis(anatomy=of[1].anatomy, findings=[finding], crowd=finding)


def test_what_ddp_waits_is_communication_in_every_table() -> None:
    told = merged(rank(0, 30, 40), rank(1, 30, 40))
    assert told.evidence is not None
    shares = {node.name: node.share for node in told.evidence.children}
    assert shares == pytest.approx({"forward": 0.3, "backward": 0.3, "communication": 0.4})
    for row in (*told.timeline, *told.ranks):
        assert row.phases_ms["backward"] == pytest.approx(30)
        assert row.phases_ms["communication"] == pytest.approx(40)


def test_a_slow_rank_is_named() -> None:
    told = merged(rank(0, 30, 40), rank(1, 70, 0))
    first = told.findings[0]
    assert first.cause == "straggler.rank"
    assert first.share == pytest.approx(0.4)
    assert [row.straggler for row in told.ranks] == [False, True]
    # Waiting for it is not the exchange.
    assert "communication.exposed" not in [finding.cause for finding in told.findings]


def test_equal_ranks_have_no_straggler() -> None:
    assert not merged(rank(0, 50, 5), rank(1, 50, 5)).findings


@pytest.mark.parametrize("which", [0, 1])
def test_no_straggler_is_named_beside_crowded_cores(which: int) -> None:
    ranks = [rank(0, 30, 40), rank(1, 70, 0)]
    ranks[which] = crowded(ranks[which])
    told = merged(*ranks)
    assert not [finding for finding in told.findings if finding.cause == "straggler.rank"]
    assert f"which rank is slow: other processes crowd the cores of rank {which}" in told.unseen


def test_no_straggler_is_named_after_too_few_steps() -> None:
    told = merged(rank(0, 30, 40, steps=8), rank(1, 70, 0, steps=8))
    assert "20 are needed" in told.refused
    assert not told.findings
    assert told.next == ["let it train for longer: more epochs, or a larger part of the data"]


def test_a_rank_that_posted_nothing_is_told() -> None:
    told = merged(rank(0, 30, 40))
    assert told.unseen == ["rank 1: it posted nothing before the report was made"]


@pytest.mark.parametrize(
    ("wait_ms", "took"), [(0, "forward and backward took 100%"), (60, "communication took 60%")], ids=["alone", "ranks"]
)
def test_a_busy_machine_leaves_a_provisional_word_of_what_took_the_time(wait_ms: float, took: str) -> None:
    """It said that forward and backward took 26 %, where communication took 66 %."""
    evidence, diagnosis = crowded(rank(0, 30, wait_ms))
    assert verdict.build_report(evidence, diagnosis).verdict.endswith(f"; provisionally, {took} of the step")


@pytest.mark.parametrize(("host", "words"), [("", "the 2 ranks are on one host"), ("b", "the 2 ranks are on 2 hosts")])
def test_an_exchange_says_where_the_ranks_are(host: str, words: str) -> None:
    ranks = [rank(0, 50, 40), rank(1, 50, 40)]
    told = verdict.build_report(*ranks[0])
    posted: dict[int, Any] = {e.rank: verdict.rank_summary(e, d) for e, d in ranks}
    posted[1]["row"].host = host or posted[0]["row"].host
    verdict.merge(told, posted, ranks[0][1].anatomy, 2)

    assert told.findings[0].cause == "communication.exposed"
    assert told.findings[0].why[-1] == words


def test_a_finding_says_how_its_saving_is_known() -> None:
    finding = Finding(cause="host.gc", bottleneck="host", title="", why=[], remedy="", share=0.3)
    assert verdict.saving_text(finding) == "it is part of 30% of the step"
    finding.predicted = Saving(value=0.3, low=0.2, high=0.4)
    assert verdict.saving_text(finding) == "removing it saves 30% [20%, 40%] of the step, predicted"
    finding.measured, finding.confirmed = Saving(value=0.25, low=0.2, high=0.3), True
    assert verdict.saving_text(finding).endswith("25% [20%, 30%] of the step, confirmed by experiment")


def test_nothing_found_is_a_verdict() -> None:
    told = ProfileReport()
    shares = {"forward": 0.5, "backward": 0.4, "optimizer": 0.1, "data": 0.0}
    verdict.conclude(told, Anatomy(steps=40, step_s=0.1, shares=shares))
    assert told.verdict.startswith("nothing holds the run back: forward and backward take 90%")


def test_the_kinds_of_operators_are_told_of_the_step() -> None:
    evidence, diagnosis = rank(0, 30, 0)
    evidence.trace = TraceSummary(
        steps=2, ops=[], ops_per_step=9, small_share=0, matmul_share=0.5, elementwise_share=0.5
    )
    tree = verdict.tree(evidence, diagnosis.anatomy)
    assert not any(phase.children for phase in tree.children)
    assert "of the model's operators 50% matrix products, 50% element-wise" in tree.note


def test_what_an_experiment_saved_with_the_waiting_is_not_confirmed_of_the_exchange_alone() -> None:
    told = ProfileReport()
    told.findings = [
        Finding(
            cause="communication.exposed",
            bottleneck="communication",
            title="",
            why=[],
            remedy="",
            share=0.6,
            measured=Saving(value=0.55, low=0.5, high=0.6),
            confirmed=True,
            experiment="no gradients were exchanged",
        )
    ]
    verdict._reduce_exchange(told, 0.2)
    (finding,) = told.findings

    assert (finding.measured, finding.confirmed) == (None, False)
    assert verdict.saving_text(finding) == "removing it saves 20% [14%, 22%] of the step, predicted"
    assert words.effect_text(finding).startswith("predicted, tried only with another cause: saves 20 %")
    assert words.experiment_text(finding) == (
        "tried, but that removed the waiting for the slowest rank too; this part is from the clocks of all ranks"
    )


def test_an_exchange_that_was_not_tried_says_why_as_before() -> None:
    told = ProfileReport()
    finding = Finding(cause="communication.exposed", bottleneck="", title="", why=[], remedy="", share=0.6)
    finding.experiment = "not tried: --no-confirm"
    told.findings = [finding]
    verdict._reduce_exchange(told, 0.2)

    assert told.findings[0].experiment == "not tried: --no-confirm"

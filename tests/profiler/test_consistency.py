"""No verdict contradicts its own table: over generated steps, traces, samples and claims, and all causes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.profiler import naming
from accel.profiler.conclusion import verdict
from accel.profiler.diagnose import anatomy as anatomies
from accel.profiler.diagnose import findings
from accel.profiler.diagnose.causes import CAUSES, CROWDS
from accel.profiler.diagnose.findings import BATCHES, OWN_CODE, PhaseShares
from accel.profiler.evidence import (
    Evidence,
    LineTime,
    LoaderFacts,
    OptimizerFacts,
    SyncPoint,
    TraceSummary,
)
from accel.profiler.phases import PHASES, Measurement
from accel.profiler.report import Experiment, Finding, ProfileReport, Saving
from tests.accel.agreement import shown_shares
from tests.sampling import examples

shares, times = st.floats(0.0, 1.0), st.floats(0.0, 20.0)


@st.composite
def runs(draw: st.DrawFn) -> Evidence:
    """What might be seen of a run: any phases, any trace, any samples, whether they fit or not."""
    weights = draw(st.lists(st.sampled_from([0.0, 0.01, 0.1, 1.0, 10.0]), min_size=len(PHASES), max_size=len(PHASES)))
    held = {name: weight * 1e-3 for name, weight in zip(PHASES, weights, strict=True)}
    held["forward"] += 1e-4
    every = draw(st.sampled_from([0, 2, 8]))
    steps = []
    for number in range(24):
        phases = {**held, "outside": held["outside"] * (5 if every and number % every == 0 else 1)}
        first = bool(every) and number % 8 == 0
        steps.append(Measurement(step=number, seconds=sum(phases.values()), phases=phases, first=first))
    lines = [
        LineTime(
            phase=draw(st.sampled_from(PHASES)),
            file="train.py",
            line=number,
            source="x",
            seconds=draw(st.floats(0.01, 1.0)),
            share=1.0,
            tags=draw(st.sampled_from([[], ["next batch"], ["checkpoint"]])),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    device = draw(st.sampled_from(["cpu", "cpu", "cuda"]))
    trace = TraceSummary(
        steps=2,
        ops=[],
        ops_per_step=100,
        small_share=draw(shares),
        matmul_share=0.3,
        elementwise_share=draw(st.floats(0.0, 0.7)),
        operators_ms=None if device == "cuda" else draw(st.sampled_from([None, 0.01, 1.0, 100.0])),
        busy_ms=draw(times) if device == "cuda" else None,
        copy_ms=draw(times),
        read_ms=draw(times),
        launch_ms=draw(times),
        syncs=[SyncPoint(name="item", file="train.py", line=1, calls=1, ms=draw(st.floats(0, 20)))],
    )
    return Evidence(
        steps=steps,
        cores=8,
        threads=draw(st.sampled_from([1, 8])),
        device=device,
        world_size=draw(st.sampled_from([1, 2])),
        ddp_wait_share=draw(st.sampled_from([None, 0.1, 0.9])),
        lines=lines,
        model_called=draw(st.booleans()),
        loader=draw(st.sampled_from([LoaderFacts(), LoaderFacts(kind="own iterator"), LoaderFacts(kind="DataLoader")])),
        gc_share=draw(st.sampled_from([0.0, 0.0, 0.3])),
        collate_share=draw(shares),
        optimizer=OptimizerFacts(name="Adam", tensors=100, elements=10, multi_tensor=draw(st.booleans())),
        dtype=draw(st.sampled_from(["float32", "float64"])),
        anomaly_mode=draw(st.booleans()),
        trace=draw(st.sampled_from([None, trace])),
    )


def assert_agrees(told: ProfileReport) -> None:
    """The checks of a reader: each cause against the rows of the table, the words against the findings."""
    assert told.evidence is not None
    held = shown_shares(told.evidence)
    assert sum(held.shares.values()) == pytest.approx(1.0)
    for finding in told.findings:
        room = held.room(finding.cause) + 1e-9
        assert finding.share <= room, finding
        for saving in (finding.predicted, finding.measured):
            if saving is not None:
                assert saving.low <= saving.value <= saving.high, finding
                assert saving.high <= room or not CAUSES[finding.cause].phases, finding
    first = told.findings[0] if told.findings else None
    if told.refused:
        assert told.verdict == f"no verdict: {told.refused}"
        assert told.bottleneck == ""
    else:
        assert told.bottleneck == (first.bottleneck if first else "none")
        assert told.verdict.startswith(first.cause if first else "nothing holds the run back")


@settings(max_examples=examples(100), deadline=None)
@given(runs())
def test_what_is_named_fits_the_phases(seen: Evidence) -> None:
    assert_agrees(verdict.build_report(seen, naming.diagnose(seen)))


@settings(max_examples=examples(100), deadline=None)
@given(runs(), st.sampled_from(sorted(CAUSES)), shares, shares, st.sampled_from(["keep", "inconclusive"]))
def test_any_claim_of_any_cause_is_cut_to_the_phases(
    seen: Evidence, cause: str, share: float, saved: float, outcome: str
) -> None:
    """Whatever a rule of tomorrow claims, and whatever an experiment finds."""
    found = naming.diagnose(seen)
    saving = Saving(value=saved, low=0.9 * saved, high=min(1.0, 1.1 * saved))
    claim = Finding(
        cause=cause,
        bottleneck=CAUSES[cause].bottleneck.value,
        title="claimed",
        why=[],
        remedy="do",
        share=share,
        predicted=saving,
    )
    tried = Experiment(name="x", what="y", before_ms=2, after_ms=1, saving=saving, pairs=6, verdict=outcome)
    found.findings, found.refused = [claim], ""
    verdict.judge(found, {cause: tried}, [], lambda finding: "")

    assert_agrees(verdict.build_report(seen, found))


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_every_cause_has_phases_that_exist_or_slows_the_whole_step(cause: str) -> None:
    known = CAUSES[cause]
    whole = {*CROWDS, "host.gc", "straggler.evaluation", "straggler.rank", "sync.read", "transfer.pageable"}

    assert set(known.phases) <= set(PHASES)
    assert (known.phases == ()) == (cause in whole)


def test_the_wait_of_another_phase_is_no_small_operators() -> None:
    """A loop that waits 30 ms between forward and backward; of its operators a trace tells the same as ever."""
    phases = {"forward": 0.3e-3, "loss": 30e-3, "backward": 0.5e-3, "optimizer": 0.4e-3}
    steps = [Measurement(step=n, seconds=sum(phases.values()), phases=dict(phases)) for n in range(40)]
    trace = TraceSummary(
        steps=2, ops=[], ops_per_step=60, small_share=0.6, matmul_share=0.4, elementwise_share=0.3, operators_ms=0.6
    )
    line = LineTime(phase="loss", file="t.py", line=3, source="", seconds=1.0, share=1.0, blocked=0.99)
    seen = Evidence(steps=steps, trace=trace, loader=LoaderFacts(kind="own iterator"), lines=[line])

    def first(**changes: Any) -> str:
        return naming.diagnose(dataclasses.replace(seen, **changes)).findings[0].cause

    assert first(lines=[dataclasses.replace(line, tags=["next batch"])]) == "input.iterator"
    assert first() == "host.step_code"
    assert first(lines=[]) == "host.step_code"


def test_a_part_belongs_to_one_cause() -> None:
    held = PhaseShares(shares={"loss": 0.9, "forward": 0.1}, parts={BATCHES: {"loss": 0.5}, OWN_CODE: {"loss": 0.3}})

    assert held.room("input.iterator") == pytest.approx(0.5)
    assert held.room("host.step_code") == pytest.approx(0.3)
    assert held.room("launch.small_ops") == pytest.approx(0.2)
    assert held.room("input.cpu") == 0


def test_a_claim_that_no_phase_holds_is_no_finding() -> None:
    phases = {"data": 5e-3, "forward": 5e-3}
    seen = Evidence(
        steps=[Measurement(step=n, seconds=10e-3, phases=dict(phases)) for n in range(40)],
        loader=LoaderFacts(kind="DataLoader"),
    )
    found = naming.diagnose(seen)
    optimizer = dataclasses.replace(found.findings[0], cause="optimizer.update", bottleneck="optimizer")
    found.findings = [optimizer, *found.findings]

    told = verdict.build_report(seen, found)

    assert [finding.cause for finding in told.findings] == ["input.cpu"]
    assert told.verdict.startswith("input.cpu")


@pytest.mark.parametrize("low", [0.38, 0.44, 0.81])
def test_an_experiment_may_save_more_of_its_own_steps_than_the_phases_hold_of_the_mean_step(low: float) -> None:
    """Its steps are others: with the machine busy for part of a run, 91 % were saved where 88.9 % were held."""
    finding = Finding(cause="input.cpu", bottleneck="input", title="", why=[], remedy="", share=0.4)
    finding.measured = Saving(value=low + 0.05, low=low, high=low + 0.1)

    (kept,) = findings.within_phases([finding], PhaseShares(shares={"data": 0.4}))

    assert kept.measured == Saving(value=0.4, low=pytest.approx(0.4 * low / (low + 0.05)), high=0.4)
    said = f"the experiment saved {low + 0.05:.0%} of its own steps, and the phases hold 40% of the mean step"
    assert kept.why == [said]


def test_what_an_experiment_saves_is_put_in_order_by_its_part_of_the_mean_step() -> None:
    """A loader holds up each step, and an evaluation between two epochs takes twice as long as all of them."""
    phases = {"data": 17e-3, "forward": 1e-3}
    steps = [Measurement(step=n, seconds=18e-3, phases=dict(phases)) for n in range(200)]
    for n in (49, 99, 149, 199):
        steps[n] = Measurement(step=n, seconds=1.818, phases={**phases, "evaluation": 1.8})
    seen = Evidence(steps=steps, loader=LoaderFacts(kind="DataLoader"))
    found = naming.diagnose(seen)
    saving = Saving(value=0.94, low=0.93, high=0.95)
    tried = Experiment(name="x", what="y", before_ms=18, after_ms=1, saving=saving, pairs=6, verdict="keep")
    verdict.judge(found, {"input.cpu": tried}, [], lambda finding: "")

    told = verdict.build_report(seen, found)

    assert [finding.cause for finding in told.findings] == ["outside.evaluation", "input.cpu"]
    measured = told.findings[1].measured
    assert measured is not None
    assert measured.value == pytest.approx(17 / 54, rel=0.01)
    assert measured.low < measured.value
    assert told.findings[1].confirmed


def test_parts_stay_within_their_phases() -> None:
    seen = Evidence(steps=[Measurement(step=0, seconds=0.01, phases={"loss": 0.01})])
    found = anatomies.with_parts(anatomies.of(seen.steps), seen)

    assert (found.batches, found.own_code, found.computing) == ({}, {}, 1.0)

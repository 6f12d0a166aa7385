"""What the experiments make of the findings."""

from __future__ import annotations

import pytest

from accel.profiler import naming
from accel.profiler.conclusion import verdict as verdicts
from accel.profiler.conclusion.verdict import judge
from accel.profiler.diagnose.anatomy import Anatomy
from accel.profiler.diagnose.causes import CAUSES
from accel.profiler.evidence import Evidence, LoaderFacts, OptimizerFacts, ThreadShare
from accel.profiler.naming import Diagnosis
from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment, Finding, ProfileReport, Saving


def finding(cause: str, share: float = 0.4) -> Finding:
    known = CAUSES[cause]
    return Finding(
        cause=cause,
        bottleneck=known.bottleneck.value,
        title=known.title,
        why=["seen"],
        remedy=known.remedy,
        share=share,
        predicted=Saving(value=share, low=share - 0.05, high=share + 0.05),
    )


def tried(verdict: str, value: float, *, high: float | None = None) -> Experiment:
    saving = Saving(value=value, low=value - 0.02, high=value + 0.02 if high is None else high)
    return Experiment(
        name="x",
        what="it was off",
        before_ms=2.0,
        after_ms=1.0,
        saving=saving,
        pairs=8,
        verdict=verdict,
    )


def judged(
    findings: list[Finding], experiments: dict[str, Experiment], suspected: list[Finding] | None = None
) -> tuple[Diagnosis, list[str]]:
    found = Diagnosis(
        anatomy=Anatomy(steps=60, step_s=0.01, shares={"forward": 0.4, "backward": 0.5}), findings=findings
    )
    return found, judge(found, experiments, suspected or [], lambda finding: "not tried: no time")


def test_what_an_experiment_has_shown_is_confirmed() -> None:
    found, _ = judged([finding("host.gc")], {"host.gc": tried("keep", 0.5)})

    assert found.findings[0].confirmed
    assert found.findings[0].measured == tried("keep", 0.5).saving


def test_what_gives_nothing_is_taken_off_and_told() -> None:
    found, unseen = judged([finding("host.gc")], {"host.gc": tried("drop", 0.0)})

    assert not found.findings
    assert unseen == ["host.gc looked like a cause (40% of the step); the experiment shows that removing it saves 0.0%"]


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        ("void", "could not be tried, the switch had no effect in this loop; intended: it was off"),
        ("inconclusive", "tried, inconclusive: it was off"),
    ],
)
def test_an_experiment_that_measured_nothing_leaves_the_prediction(verdict: str, text: str) -> None:
    """A true finding must not be told as 'saves -5 %' because its experiment switched nothing off."""
    rival = finding("outside.step", 0.2)
    found, unseen = judged([rival, finding("host.gc")], {"host.gc": tried(verdict, -0.05)})

    assert [f.cause for f in found.findings] == ["host.gc", "outside.step"]
    assert found.findings[0].measured is None and not found.findings[0].confirmed
    assert text in found.findings[0].experiment
    assert not unseen


def test_what_an_experiment_has_shown_is_not_forgotten() -> None:
    """The evidence of the whole run may no longer hold what was switched off with the loop, as a context's mode is."""
    found, _ = judged([], {"compute.anomaly": tried("keep", 0.75)}, [finding("compute.anomaly", 0.9)])

    assert [f.cause for f in found.findings] == ["compute.anomaly"]
    assert found.findings[0].confirmed


@pytest.mark.parametrize("verdict", ["drop", "inconclusive", "void"])
def test_what_no_experiment_has_shown_goes_with_its_evidence(verdict: str) -> None:
    found, _ = judged([], {"host.gc": tried(verdict, 0.3)}, [finding("host.gc")])

    assert not found.findings


def test_a_crowded_machine_stays_the_only_finding() -> None:
    crowd = finding("host.oversubscribed")
    found, _ = judged([crowd], {"host.gc": tried("keep", 0.5)}, [finding("host.gc")])

    assert [f.cause for f in found.findings] == ["host.oversubscribed"]
    assert found.findings[0].experiment == ""


def test_a_finding_without_an_experiment_says_why() -> None:
    found, _ = judged([finding("outside.step")], {})

    assert found.findings[0].experiment == "not tried: no time"


# -- through the report ------------------------------------------------------------------------------------------------

ASLEEP = ThreadShare(run=0.05, wait=0.0, blocked=0.95)
RUNNING = ThreadShare(run=0.97, wait=0.0, blocked=0.03)


def seen(data_thread: ThreadShare = ASLEEP, *, multi_tensor: bool = True, **phases: float) -> Evidence:
    """What sixty steps with these phases, ms, look like."""
    held = {phase: ms * 1e-3 for phase, ms in phases.items()}
    steps = [Measurement(step=n, seconds=sum(held.values()), phases=dict(held)) for n in range(60)]
    return Evidence(
        steps=steps,
        loader=LoaderFacts(kind="DataLoader"),
        optimizer=OptimizerFacts(name="Adam", tensors=100, multi_tensor=multi_tensor),
        thread=data_thread,
        data_thread=data_thread,
    )


def told(early: Evidence, late: Evidence, experiment: Experiment) -> tuple[ProfileReport, list[str]]:
    """Report on a run whose first suspect, at the time of the experiments, was tried."""
    suspected = naming.diagnose(early).findings
    found = naming.diagnose(late)
    unseen = judge(found, {suspected[0].cause: experiment}, suspected, lambda finding: "not tried: no time")
    return verdicts.build_report(late, found), unseen


EARLY = seen(ASLEEP, data=17.0, forward=1.0, backward=1.5)


@pytest.mark.parametrize(
    ("early", "late", "cause"),
    [
        (EARLY, seen(RUNNING, data=16.0, forward=1.0, backward=1.5), "input.cpu"),
        (
            seen(multi_tensor=False, forward=1.0, backward=1.5, optimizer=8.0),
            seen(forward=1.0, backward=1.5, optimizer=8.0),
            "optimizer.update",
        ),
    ],
)
def test_a_cause_that_changes_its_name_stays_one_cause(early: Evidence, late: Evidence, cause: str) -> None:
    """Files that the page cache holds after a while, for one."""
    assert naming.diagnose(early).findings[0].cause != cause
    report, _ = told(early, late, tried("keep", 0.7))

    assert [f.cause for f in report.findings] == [cause]
    assert report.findings[0].confirmed and report.verdict.startswith(cause)


def test_a_cause_that_was_dropped_does_not_come_back_under_another_name() -> None:
    report, unseen = told(EARLY, seen(RUNNING, data=16.0, forward=1.0, backward=1.5), tried("drop", 0.0))

    assert report.findings == []
    assert unseen[0].startswith("input.cpu looked like a cause (86% of the step); the experiment shows")


def test_a_cause_that_has_passed_is_told_and_is_none() -> None:
    """Data that fit into memory once they have been read, in the first epoch."""
    report, unseen = told(EARLY, seen(RUNNING, data=0.13, forward=1.0, backward=1.5), tried("keep", 0.87))

    assert report.refused == "" and report.findings == []
    assert report.verdict.startswith("nothing holds the run back")
    assert unseen == [
        "input.storage held up the steps of the experiment (removing it saved 87% of them), and not the run: "
        "it can take 5% of the mean step"
    ]


def test_a_confirmed_cause_comes_back_no_larger_than_the_run_allows() -> None:
    early = seen(multi_tensor=False, forward=1.0, backward=1.5, optimizer=8.0)
    report, unseen = told(early, seen(forward=1.0, backward=1.5, optimizer=0.34), tried("keep", 0.6))

    (found,) = report.findings
    assert found.cause == "optimizer.per_parameter"
    assert found.measured is not None and found.predicted is not None
    assert found.share == pytest.approx(found.measured.value) == pytest.approx(0.12, abs=0.001)
    assert found.predicted.high <= 0.12
    assert report.refused == "" and unseen == []


def test_the_collector_s_share_of_the_whole_run_decides() -> None:
    found = Diagnosis(anatomy=Anatomy(steps=60, step_s=0.01, shares={}))
    unseen = judge(found, {"host.gc": tried("keep", 0.5)}, [finding("host.gc")], lambda f: "", {"host.gc": 0.02})

    assert found.findings == []
    assert "and not the run: it can take 2% of the mean step" in unseen[0]

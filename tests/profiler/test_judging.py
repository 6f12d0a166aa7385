"""What the experiments make of the findings."""

from __future__ import annotations

import pytest

from accel.profiler.conclusion.judging import judge
from accel.profiler.diagnose.anatomy import Anatomy
from accel.profiler.diagnose.causes import CAUSES
from accel.profiler.naming import Diagnosis
from accel.profiler.report import Experiment, Finding, Saving


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
        changes_learning=False,
    )


def judged(
    findings: list[Finding], experiments: dict[str, Experiment], suspected: list[Finding] | None = None
) -> tuple[Diagnosis, list[str]]:
    found = Diagnosis(anatomy=Anatomy(steps=60, step_s=0.01, shares={}), findings=findings)
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
        ("refused", "tried, too noisy to tell: it was off"),
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


@pytest.mark.parametrize("verdict", ["drop", "refused", "void"])
def test_what_no_experiment_has_shown_goes_with_its_evidence(verdict: str) -> None:
    found, _ = judged([], {"host.gc": tried(verdict, 0.3)}, [finding("host.gc")])

    assert not found.findings


def test_a_crowded_machine_stays_the_only_finding() -> None:
    crowd = finding("host.oversubscribed")
    found, _ = judged([crowd], {"host.gc": tried("keep", 0.5)}, [finding("host.gc")])

    assert [f.cause for f in found.findings] == ["host.oversubscribed"]


def test_a_finding_without_an_experiment_says_why() -> None:
    found, _ = judged([finding("outside.step")], {})

    assert found.findings[0].experiment == "not tried: no time"

"""Steps that were slow once are left out of the mean step; whatever recurs is not."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.profiler import naming
from accel.profiler.conclusion import verdict
from accel.profiler.diagnose import step_times
from accel.profiler.evidence import Evidence, LoaderFacts, ThreadShare
from accel.profiler.phases import Measurement
from tests.sampling import examples

ORDINARY = {"data": 16e-3, "forward": 0.5e-3, "backward": 0.5e-3, "optimizer": 1e-3}


def step(number: int, **more_s: float) -> Measurement:
    phases = {phase: ORDINARY.get(phase, 0.0) + more_s.get(phase, 0.0) for phase in {*ORDINARY, *more_s}}
    return Measurement(step=number, seconds=sum(phases.values()), phases=phases)


def run(steps: int, slow: dict[int, dict[str, float]]) -> list[Measurement]:
    return [step(n, **slow.get(n, {})) for n in range(steps)]


@pytest.mark.parametrize("phase", ["forward", "loss", "backward", "optimizer", "host", "copy", "communication"])
def test_a_step_of_four_seconds_among_short_ones(phase: str) -> None:
    ordinary, slow = step_times.without_one_offs(run(160, {3: {phase: 4.0}}))

    assert [m.step for m in slow] == [3]
    assert [m.step for m in ordinary] == [n for n in range(160) if n != 3]
    (told,) = step_times.told_one_offs(ordinary, slow)
    assert told.startswith("step 3 took 4,018 ms, 4,00") and f"in {phase}, and an ordinary one 18 ms" in told


@pytest.mark.parametrize(
    ("steps", "slow"),
    [
        (160, {n: {"optimizer": 4.0} for n in (40, 80, 120)}),  # recurs
        (1000, {n: {"optimizer": 4.0} for n in range(100, 1000, 200)}),
        (5000, {100: {"optimizer": 4.0}, 3100: {"backward": 4.0}}),
        (160, {3: {"data": 4.0}}),  # of the loader
        (160, {3: {"outside": 4.0}}),  # of the loop
        (160, {3: {"evaluation": 4.0}}),
        (160, {3: {"optimizer": 0.02}}),  # twice as long
        (19, {3: {"optimizer": 4.0}}),  # too few steps to know
        (0, {}),
    ],
)
def test_all_else_stays_in_the_mean_step(steps: int, slow: dict[int, dict[str, float]]) -> None:
    all_steps = run(steps, slow)

    assert step_times.without_one_offs(all_steps) == (all_steps, [])


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(20, 400), st.data())
def test_one_slow_step_never_changes_what_is_named(count: int, data: st.DataObject) -> None:
    """Wherever it is, however long, in whatever phase the model works."""
    where = data.draw(st.integers(0, count - 1))
    seconds = data.draw(st.floats(0.5, 1000.0))
    phase = data.draw(st.sampled_from(["forward", "loss", "backward", "optimizer", "host"]))

    def told(steps: list[Measurement]) -> list[tuple[str, float]]:
        ordinary, slow = step_times.without_one_offs(steps)
        seen = Evidence(
            steps=ordinary,
            one_offs=slow,
            loader=LoaderFacts(kind="DataLoader"),
            data_thread=ThreadShare(run=0.1, wait=0.0, blocked=0.9),
        )
        report = verdict.build_report(seen, naming.diagnose(seen, min_steps=19))
        assert [row.step for row in report.timeline] == list(range(count))[-120:]
        return [(finding.cause, round(finding.share, 6)) for finding in report.findings]

    assert told(run(count, {where: {phase: seconds}})) == told(run(count, {})) != []


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(200, 1000), st.data())
def test_what_comes_more_than_once_stays(count: int, data: st.DataObject) -> None:
    where = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=4))
    steps = run(count, {n: {"optimizer": 40.0} for n in where})

    assert step_times.without_one_offs(steps) == (steps, [])


def test_an_epoch_s_first_step_keeps_its_wait() -> None:
    steps = [dataclasses.replace(step(n, data=1.0 if n % 40 == 0 else 0.0), first=n % 40 == 0) for n in range(160)]

    assert step_times.without_one_offs(steps) == (steps, [])

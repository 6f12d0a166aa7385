"""The steps that a diagnosis is made of: with the device's times and DDP's wait, and without one-offs."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.profiler import naming
from accel.profiler.conclusion import verdict
from accel.profiler.diagnose.step_times import (
    MIN_TIMED,
    by_device,
    level,
    told_one_offs,
    wait_as_communication,
    without_one_offs,
)
from accel.profiler.evidence import Evidence, LoaderFacts, ThreadShare
from accel.profiler.phases import PHASES, Measurement
from tests.sampling import examples


def timed(number: int, **phases: float) -> Measurement:
    return Measurement(step=number, seconds=sum(phases.values()), phases=phases)


seconds = st.floats(0.0, 1.0)
times = st.dictionaries(st.sampled_from(PHASES), seconds, min_size=1)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(times, min_size=1, max_size=40), st.lists(times, max_size=40))
def test_phases_still_add_up_to_the_step(host: list[dict[str, float]], device: list[dict[str, float]]) -> None:
    steps = [timed(number, **phases) for number, phases in enumerate(host)]
    before = [(m.seconds, dict(m.phases)) for m in steps]
    taken = dict(enumerate(device[: len(steps)]))
    seen = by_device(steps, taken)

    assert [(m.seconds, m.phases) for m in steps] == before  # evidence is asked for more than once
    for made in seen:
        assert sum(made.phases.values()) == pytest.approx(made.seconds, abs=1e-9)
        assert min(made.phases.values()) >= -1e-9
    if len(taken) < MIN_TIMED:
        assert seen is steps
    else:
        assert all(seen[n].phases[p] == taken[n].get(p, 0.0) for n in taken for p in PHASES)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(seconds, min_size=1, max_size=20), st.floats(0.0, 1.0))
def test_so_much_is_hidden_on_average(waits: list[float], part: float) -> None:
    mean = part * sum(waits) / len(waits)
    most = level(waits, mean)
    assert sum(min(wait, most) for wait in waits) / len(waits) == pytest.approx(mean, abs=1e-9)


def test_a_burst_that_the_queue_can_t_hide_is_left() -> None:
    """Three of four batches are there at once; the device hides 12 of the 32 ms of the fourth, 3 on average."""
    assert level([0, 0, 0, 32], 3) == 12
    host = [timed(n, data=32.0 if n % 4 == 3 else 0.0, forward=20.0) for n in range(80)]
    taken = {n: {"data": 20.0 if n % 4 == 3 else 0.0, "forward": 23.0} for n in range(40)}
    late = [m.phases["data"] for m in by_device(host, taken)[40:]]

    assert sum(late) / len(late) == pytest.approx(5.0)
    assert max(late) == pytest.approx(20.0)


def test_a_stall_stays_one() -> None:
    host = [timed(n, outside=0.1, forward=0.01) for n in range(40)] + [timed(40, outside=10.0, forward=0.01)]
    taken = {n: {"outside": 0.01, "forward": 0.1} for n in range(40)}

    assert by_device(host, taken)[-1].phases["outside"] == pytest.approx(9.91)


@pytest.mark.parametrize(("wait_share", "wait"), [(None, 0.0), (0.0, 0.0), (0.25, 1.0), (0.9, 2.0)])
def test_what_ddp_waits_moves_from_backward_to_communication(wait_share: float | None, wait: float) -> None:
    before = Measurement(step=0, seconds=4.0, phases={"forward": 1.5, "backward": 2.0, "communication": 0.5})
    (found,) = wait_as_communication([before], wait_share)
    assert found.phases == {"forward": 1.5, "backward": 2.0 - wait, "communication": 0.5 + wait}
    assert before.phases["backward"] == 2.0
    # A step without backward, as one cut off, has nothing to move.
    assert wait_as_communication([Measurement(step=0, seconds=1.0, phases={"data": 1.0})], 0.5)[0].phases["data"] == 1.0


ORDINARY = {"data": 16e-3, "forward": 0.5e-3, "backward": 0.5e-3, "optimizer": 1e-3}


def step(number: int, **more_s: float) -> Measurement:
    phases = {phase: ORDINARY.get(phase, 0.0) + more_s.get(phase, 0.0) for phase in {*ORDINARY, *more_s}}
    return Measurement(step=number, seconds=sum(phases.values()), phases=phases)


def run(steps: int, slow: dict[int, dict[str, float]]) -> list[Measurement]:
    return [step(n, **slow.get(n, {})) for n in range(steps)]


@pytest.mark.parametrize("phase", ["forward", "loss", "backward", "optimizer", "host", "copy", "communication"])
def test_a_step_of_four_seconds_among_short_ones(phase: str) -> None:
    ordinary, slow = without_one_offs(run(160, {3: {phase: 4.0}}))

    assert [m.step for m in slow] == [3]
    assert [m.step for m in ordinary] == [n for n in range(160) if n != 3]
    (told,) = told_one_offs(ordinary, slow)
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

    assert without_one_offs(all_steps) == (all_steps, [])


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(20, 400), st.data())
def test_one_slow_step_never_changes_what_is_named(count: int, data: st.DataObject) -> None:
    """Wherever it is, however long, in whatever phase the model works."""
    where = data.draw(st.integers(0, count - 1))
    seconds = data.draw(st.floats(0.5, 1000.0))
    phase = data.draw(st.sampled_from(["forward", "loss", "backward", "optimizer", "host"]))

    def told(steps: list[Measurement]) -> list[tuple[str, float]]:
        ordinary, slow = without_one_offs(steps)
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

    assert without_one_offs(steps) == (steps, [])


def test_an_epoch_s_first_step_keeps_its_wait() -> None:
    steps = [dataclasses.replace(step(n, data=1.0 if n % 40 == 0 else 0.0), first=n % 40 == 0) for n in range(160)]

    assert without_one_offs(steps) == (steps, [])

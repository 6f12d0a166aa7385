"""Steps get the device's times; what the queue hides is taken out of those that only the host has timed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.profiler.diagnose.step_times import MIN_TIMED, by_device, level
from accel.profiler.phases import PHASES, Measurement
from tests.sampling import examples


def step(number: int, **phases: float) -> Measurement:
    return Measurement(step=number, seconds=sum(phases.values()), phases=phases)


seconds = st.floats(0.0, 1.0)
times = st.dictionaries(st.sampled_from(PHASES), seconds, min_size=1)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(times, min_size=1, max_size=40), st.lists(times, max_size=40))
def test_phases_still_add_up_to_the_step(host: list[dict[str, float]], device: list[dict[str, float]]) -> None:
    steps = [step(number, **phases) for number, phases in enumerate(host)]
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
    host = [step(n, data=32.0 if n % 4 == 3 else 0.0, forward=20.0) for n in range(80)]
    taken = {n: {"data": 20.0 if n % 4 == 3 else 0.0, "forward": 23.0} for n in range(40)}
    late = [m.phases["data"] for m in by_device(host, taken)[40:]]

    assert sum(late) / len(late) == pytest.approx(5.0)
    assert max(late) == pytest.approx(20.0)


def test_a_stall_stays_one() -> None:
    host = [step(n, outside=0.1, forward=0.01) for n in range(40)] + [step(40, outside=10.0, forward=0.01)]
    taken = {n: {"outside": 0.01, "forward": 0.1} for n in range(40)}

    assert by_device(host, taken)[-1].phases["outside"] == pytest.approx(9.91)

"""The step clock books all time, to the right phase."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.profiler.bottleneck import Bottleneck, anatomy, name
from accel.profiler.phases import PHASES, Measurement, StepClock


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def after(self, seconds: float) -> FakeClock:
        self.time += seconds
        return self


def step(fake: FakeClock, clock: StepClock) -> Measurement:
    clock.request()
    fake.after(3)
    clock.batch(32, "shape")
    fake.after(1)
    clock.call()
    fake.after(5)
    clock.returned()
    fake.after(7)
    clock.update()
    fake.after(2)
    clock.updated()
    fake.after(4)
    clock.request()
    return clock.close(0)


def test_an_ordinary_step() -> None:
    fake = FakeClock()
    clock = StepClock(fake)

    measured = step(fake, clock)

    assert measured.phases == {"data": 3, "other": 5, "forward": 5, "backward": 7, "optimizer": 2}
    assert measured.seconds == 22
    assert (measured.samples, measured.batches, measured.shape) == (32, 1, "shape")


@given(
    st.lists(
        st.tuples(st.sampled_from(["request", "batch", "call", "returned", "update", "updated"]), st.floats(0, 10))
    )
)
def test_any_order_of_marks_books_every_moment(marks: list[tuple[str, float]]) -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    for mark, seconds in marks:
        fake.after(seconds)
        clock.batch(1, None) if mark == "batch" else getattr(clock, mark)()
    measured = clock.close(0)

    assert measured.seconds == pytest.approx(fake.time - 100.0)
    assert sum(measured.phases.values()) == pytest.approx(measured.seconds)
    assert set(measured.phases) == set(PHASES)


def test_several_batches_and_calls_make_one_step() -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    for number in range(3):
        clock.request()
        clock.batch(8, number)
        clock.call()
        clock.returned()
        fake.after(1)
    clock.update()
    clock.updated()
    measured = clock.close(5)

    assert (measured.samples, measured.batches, measured.shape, measured.step) == (24, 3, 0, 5)
    assert measured.phases["backward"] == 3


def test_restart_forgets() -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    fake.after(50)
    clock.restart(first=True)
    fake.after(1)
    clock.request()
    measured = clock.close(0)

    assert (measured.seconds, measured.first) == (1, True)


def measurements(**phases: float) -> Iterator[Measurement]:
    for number in range(5):
        yield Measurement(step=number, seconds=sum(phases.values()), phases=dict(phases))


def test_anatomy_adds_up_to_the_median_step() -> None:
    parts = anatomy(list(measurements(data=1.0, forward=2.0, backward=3.0)))

    assert sum(parts.values()) == pytest.approx(6.0)
    assert anatomy([]) == {}


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ({"data": 6, "forward": 2, "backward": 3, "optimizer": 1}, Bottleneck.INPUT),
        ({"data": 4, "forward": 2, "backward": 3, "optimizer": 1}, Bottleneck.COMPUTE),
        ({"data": 1, "forward": 1, "backward": 1, "optimizer": 9}, Bottleneck.OPTIMIZER),
    ],
)
def test_the_largest_part_is_named(phases: dict[str, float], expected: Bottleneck) -> None:
    finding = name(phases)

    assert finding is not None
    assert finding.bottleneck == expected
    assert 0 < finding.share <= 1


def test_nothing_measured_names_nothing() -> None:
    assert name({}) is None

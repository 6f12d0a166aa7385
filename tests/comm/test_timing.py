"""Records of steps, on a played clock."""

from __future__ import annotations

from accel.comm.cost_model.choice import ObservedStep
from accel.comm.selection.recorder import Times


class Clock:
    """A clock that stands where it is put."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(times: Times, clock: Clock, at: float, ready: list[float], done: list[float], sizes: list[int]) -> None:
    """Play a step that begins at `at`; times count from there."""
    clock.now = at
    times.close()
    times.open()
    ends = []
    for when, size in zip(ready, sizes, strict=True):
        clock.now = at + when
        ends.append(times.ready(size))
    for when, end in zip(done, ends, strict=True):
        clock.now = at + when
        assert end is not None
        end()


def test_medians_over_steps_count_from_the_first_bucket() -> None:
    clock = Clock()
    times = Times(clock)
    for at, late in ((0.0, 0.0), (10.0, 1.0), (20.0, 5.0)):
        play(times, clock, at, [0.0, 2.0], [3.0, 4.0 + late], [100, 50])
    clock.now = 29.0
    times.close()
    assert len(times) == 3
    assert times.observed() == ObservedStep((100, 50), (0.0, 2.0), 5.0, 10.0)


def test_steps_with_other_buckets_do_not_count() -> None:
    clock = Clock()
    times = Times(clock)
    play(times, clock, 0.0, [0.0], [90.0], [100])
    play(times, clock, 100.0, [0.0, 1.0], [1.0, 2.0], [60, 40])
    clock.now = 107.0
    times.close()
    assert times.observed() == ObservedStep((60, 40), (0.0, 1.0), 2.0, 7.0)


def test_the_hooks_own_work_is_known_apart() -> None:
    clock = Clock()
    times = Times(clock)
    times.extra(1.0)  # outside of a step
    play(times, clock, 0.0, [0.0], [1.0], [100])
    times.extra(0.25)
    times.extra(0.5)
    clock.now = 4.0
    times.close()
    assert times.observed() == ObservedStep((100,), (0.0,), 1.0, 4.0, 0.75)


def test_work_of_a_step_goes_to_the_next_steps_first_bucket() -> None:
    clock, used = Clock(), Clock()
    times = Times(clock, lambda: (used.now, used.now / 3))
    play(times, clock, 0.0, [0.0], [1.0], [100])
    used.now = 0.75
    clock.now = 4.0
    times.close()
    used.now = 9.0  # of no recorded step
    assert times.observed()[-2:] == (0.75, 0.25)


def test_nothing_is_noted_outside_of_a_step() -> None:
    times = Times(Clock())
    assert times.ready(100) is None
    times.close()
    assert len(times) == 0

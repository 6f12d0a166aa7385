"""Records of steps, on a played clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from accel.comm.cost_model.choice import ObservedStep
from accel.comm.layout import Layout
from accel.comm.selection.planner import StepRecorder


class Clock:
    """A clock that stands where it is put."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def recording(clock: Clock) -> StepRecorder:
    """Return a recorder that is on."""
    recorder = StepRecorder(torch.device("cpu"), clock, lambda: (0.0, 0.0))
    recorder.on = True
    return recorder


def average(recorder: StepRecorder, size: int, extra: float = 0.0) -> torch.futures.Future[torch.Tensor]:
    """Let a bucket of so many bytes be ready; return the future to be set when it is averaged."""
    layout = Layout(0, ("a",), (torch.Size([size]),), torch.uint8, True)
    engine: Any = SimpleNamespace(binding=SimpleNamespace(layout=lambda bucket: layout), divide_s=0.0)
    bucket: Any = SimpleNamespace(buffer=lambda: torch.empty(size, dtype=torch.uint8))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        engine.divide_s += extra
        return done

    recorder.average(engine, bucket, reduce)
    return done


def play(
    recorder: StepRecorder,
    clock: Clock,
    at: float,
    ready: list[float],
    done: list[float],
    sizes: list[int],
    extra: float = 0.0,
) -> None:
    """Play a step that begins at `at`; times count from there."""
    clock.now = at
    recorder.end_step()
    recorder.begin_step()
    ends = []
    for when, size in zip(ready, sizes, strict=True):
        clock.now = at + when
        ends.append(average(recorder, size, extra))
    for when, end in zip(done, ends, strict=True):
        clock.now = at + when
        end.set_result(torch.empty(0))


def test_medians_over_steps_count_from_the_first_bucket() -> None:
    clock = Clock()
    times = recording(clock)
    for at, late in ((0.0, 0.0), (10.0, 1.0), (20.0, 5.0)):
        play(times, clock, at, [0.0, 2.0], [3.0, 4.0 + late], [100, 50])
    clock.now = 29.0
    times.end_step()
    assert len(times) == 3
    assert times.observed() == ObservedStep((100, 50), (0.0, 2.0), 5.0, 10.0)


def test_steps_with_other_buckets_do_not_count() -> None:
    clock = Clock()
    times = recording(clock)
    play(times, clock, 0.0, [0.0], [90.0], [100])
    play(times, clock, 100.0, [0.0, 1.0], [1.0, 2.0], [60, 40])
    clock.now = 107.0
    times.end_step()
    assert times.observed() == ObservedStep((60, 40), (0.0, 1.0), 2.0, 7.0)


def test_the_hooks_own_work_is_known_apart() -> None:
    clock = Clock()
    times = recording(clock)
    play(times, clock, 0.0, [0.0, 0.0], [1.0, 1.0], [100, 100], extra=0.25)
    clock.now = 4.0
    times.end_step()
    assert times.observed() == ObservedStep((100, 100), (0.0, 0.0), 1.0, 4.0, 0.5)


def test_work_of_a_step_goes_to_the_next_steps_first_bucket() -> None:
    clock, used = Clock(), Clock()
    times = StepRecorder(torch.device("cpu"), clock, lambda: (used.now, used.now / 3))
    times.on = True
    play(times, clock, 0.0, [0.0], [1.0], [100])
    used.now = 0.75
    clock.now = 4.0
    times.end_step()
    used.now = 9.0  # of no recorded step
    assert times.observed()[-2:] == (0.75, 0.25)


def test_nothing_is_noted_outside_of_a_step() -> None:
    times = recording(Clock())
    average(times, 100)
    times.end_step()
    assert len(times) == 0
    assert len(times.layouts) == 1

"""The step clock books all time, to the right phase."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.profiler.loop.clock import (
    CUT,
    MAX_TAPE,
    MAYBE_DATA,
    MAYBE_FORWARD,
    MAYBE_HOST,
    RESUME,
    SETTLED,
    WAS,
    StepClock,
    settled,
)
from accel.profiler.phases import PHASES, Measurement


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def after(self, seconds: float) -> FakeClock:
        self.time += seconds
        return self


MARKS = ["data", "batch", "forward", "returned", "backward", "backwarded", "update", "updated"]


def mark(clock: StepClock, name: str) -> None:
    if name == "batch":
        clock.batch(1, None)
    else:
        clock.enter(name) if name in PHASES else getattr(clock, name)()


def step(fake: FakeClock, clock: StepClock) -> Measurement:
    clock.backward_is_seen = True
    clock.enter("data")
    fake.after(3)
    clock.batch(32, "shape")
    fake.after(1)
    clock.enter("forward")
    fake.after(5)
    clock.returned()
    fake.after(1)
    clock.enter("backward")
    fake.after(6)
    clock.backwarded()
    fake.after(2)
    clock.update()
    fake.after(2)
    clock.updated()
    fake.after(4)
    clock.enter("data")
    return clock.close(0)


def test_a_clock_whose_reading_was_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> Measurement:
        monkeypatch.undo()
        raise TimeoutError

    fake = FakeClock()
    clock = StepClock(fake)
    monkeypatch.setattr("accel.profiler.loop.clock.Measurement", interrupted)
    with pytest.raises(TimeoutError):
        step(fake, clock)
    clock.restart()
    assert step(fake, clock).phases == step(fake, clock).phases


def test_an_ordinary_step() -> None:
    fake = FakeClock()
    clock = StepClock(fake)

    measured = step(fake, clock)

    spent = {phase: seconds for phase, seconds in measured.phases.items() if seconds}
    assert spent == {"data": 3, "host": 3, "forward": 5, "loss": 1, "backward": 6, "optimizer": 2, "outside": 4}
    assert measured.seconds == 24
    assert (measured.samples, measured.batches, measured.shape) == (32, 1, "shape")


@given(st.lists(st.tuples(st.sampled_from(MARKS), st.floats(0, 10))))
def test_any_order_of_marks_books_every_moment(marks: list[tuple[str, float]]) -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    for name, seconds in marks:
        fake.after(seconds)
        mark(clock, name)
    measured = clock.close(0)

    assert measured.seconds == pytest.approx(fake.time - 100.0)
    assert sum(measured.phases.values()) == pytest.approx(measured.seconds)
    assert set(measured.phases) == set(PHASES)


@given(st.lists(st.tuples(st.sampled_from(MARKS), st.floats(0, 10), st.booleans())))
def test_marks_that_ctrl_c_cut_in_half_are_left_out(marks: list[tuple[str, float, bool]]) -> None:
    fake = FakeClock()
    clock, whole = StepClock(fake), StepClock(fake)
    for name, seconds, torn in marks:
        fake.after(seconds)
        if torn:
            clock.tape.append("forward")
            continue
        for each in (clock, whole):
            mark(each, name)
        assert clock.code == whole.code

    assert clock.close(0) == whole.close(0)


def test_several_batches_and_calls_make_one_step() -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    for number in range(3):
        clock.enter("data")
        clock.batch(8, number)
        clock.enter("forward")
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
    clock.enter("data")
    measured = clock.close(0)

    assert (measured.seconds, measured.first) == (1, True)


def test_without_marks_of_the_backward_pass_the_loss_belongs_to_it() -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    clock.enter("forward")
    clock.returned()
    fake.after(3)
    clock.update()

    assert clock.close(0).phases["backward"] == 3


def test_a_closure_belongs_to_the_update() -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    clock.backward_is_seen = True
    clock.update()
    clock.enter("forward")
    fake.after(1)
    clock.returned()
    clock.enter("backward")
    fake.after(2)
    clock.backwarded()
    fake.after(4)
    clock.updated()
    phases = clock.close(0).phases

    assert (phases["forward"], phases["backward"], phases["optimizer"], phases["host"]) == (1, 2, 4, 0)


def test_skipped_time_is_in_no_step() -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    clock.enter("data")
    fake.after(9)

    clock.skip()
    fake.after(1)
    clock.batch(1, None)
    measured = clock.close(0)

    assert (measured.seconds, measured.phases["data"], clock.reader.aside_s) == (1, 1, 9)


def test_a_tape_read_late_holds_the_same_steps() -> None:
    def taped(late: bool) -> list[Measurement]:
        fake, found = FakeClock(), []
        clock = StepClock(fake)
        for number in range(5):
            for name in ("data", "batch", "forward", "returned", "update", "updated"):
                fake.after(number + 1)
                mark(clock, name)
            clock.write(CUT)
            fake.after(3)
            clock.write((RESUME, clock.now()))
            found += [] if late else clock.read()
        return found + clock.read()

    assert taped(late=True) == taped(late=False)
    assert [m.step for m in taped(late=True)] == list(range(5))


def test_the_open_phase_can_be_asked_at_any_time() -> None:
    clock = StepClock(FakeClock())
    assert clock.code == "outside"
    clock.enter("data")
    clock.count(3)
    assert clock.code == "data"
    clock.read()
    assert clock.code == "data"


def test_a_loop_whose_steps_never_end_keeps_no_long_tape() -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    clock.restart()
    for _ in range(10 * MAX_TAPE):
        fake.after(1)
        clock.enter("forward")
        fake.after(1)
        clock.returned()

    assert len(clock.tape) <= MAX_TAPE + 2
    measured = clock.close(0)
    assert measured.phases["forward"] == 10 * MAX_TAPE
    assert measured.seconds == 2 * 10 * MAX_TAPE


def test_steps_in_a_tape_that_was_read_early_are_still_told() -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    for _ in range(2 * MAX_TAPE):
        clock.enter("forward")
        fake.after(1)
        clock.enter("data")
        clock.write(CUT)

    assert len(clock.read()) == 2 * MAX_TAPE


def test_a_phase_can_be_renamed_while_it_is_open() -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    clock.enter("host")
    fake.after(3)
    clock.write((WAS, "forward"))
    fake.after(2)
    clock.enter("backward")
    fake.after(1)
    clock.backwarded()

    booked = {phase: seconds for phase, seconds in clock.close(0).phases.items() if seconds}
    assert booked == {"forward": 5, "backward": 1}


@pytest.mark.parametrize("within", [True, False, None], ids=["of the step", "an evaluation", "never settled"])
def test_what_is_provisional_is_booked_when_it_is_settled(within: bool | None) -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    for code, seconds in ((MAYBE_DATA, 1), (MAYBE_HOST, 2), (MAYBE_FORWARD, 4), (MAYBE_HOST, 8)):
        clock.enter(code)
        assert (clock.code, settled(clock.code, within=False)) == (code, "evaluation")
        fake.after(seconds)
    if within is not None:
        clock.write((SETTLED, within))
    fake.after(16)  # the open phase is settled from its beginning, and goes on
    clock.enter("backward")
    measured = clock.close(0)

    booked = {phase: seconds for phase, seconds in measured.phases.items() if seconds}
    own = {"data": 1.0, "host": 26.0, "forward": 4.0}
    assert booked == (own if within else {"evaluation": 31.0})
    assert set(measured.phases) == set(PHASES)


def test_what_was_settled_once_stays_where_it_is() -> None:
    fake = FakeClock()
    clock = StepClock(fake)
    for within, seconds in ((False, 1), (True, 2)):
        clock.enter(MAYBE_DATA)
        fake.after(seconds)
        clock.write((SETTLED, within))
    clock.enter("data")
    measured = clock.close(0)

    assert (measured.phases["evaluation"], measured.phases["data"]) == (1, 2)

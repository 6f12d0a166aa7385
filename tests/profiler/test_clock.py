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


class Played(StepClock):
    """A clock whose time passes in `play` alone."""

    def __init__(self) -> None:
        self.fake = FakeClock()
        super().__init__(self.fake)

    def play(self, marks: str) -> Played:
        """Make marks, each followed by the seconds that pass after it."""
        words = marks.split()
        for name, seconds in zip(words[::2], words[1::2], strict=True):
            self.mark(name)
            self.fake.time += float(seconds)
        return self

    def mark(self, name: str) -> None:
        if name == "batch":
            self.batch(8, None)
        else:
            self.enter(name) if name in PHASES else getattr(self, name)()

    def booked(self) -> dict[str, float]:
        """End the step, and return the phases that took time."""
        return {phase: seconds for phase, seconds in self.close(0).phases.items() if seconds}


MARKS = ["data", "batch", "forward", "returned", "backward", "backwarded", "update", "updated"]
STEP = "data 3 batch 1 forward 5 returned 1 backward 6 backwarded 2 update 2 updated 4 data 0"


@pytest.fixture
def clock() -> Played:
    made = Played()
    made.backward_is_seen = True
    return made


def test_a_clock_whose_reading_was_interrupted_goes_on(clock: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> Measurement:
        monkeypatch.undo()
        raise TimeoutError

    monkeypatch.setattr("accel.profiler.loop.clock.Measurement", interrupted)
    with pytest.raises(TimeoutError):
        clock.play(STEP).close(0)
    clock.restart()
    assert clock.play(STEP).booked() == clock.play(STEP).booked()


def test_an_ordinary_step(clock: Played) -> None:
    measured = clock.play(STEP).close(0)

    spent = {phase: seconds for phase, seconds in measured.phases.items() if seconds}
    assert spent == {"data": 3, "host": 3, "forward": 5, "loss": 1, "backward": 6, "optimizer": 2, "outside": 4}
    assert (measured.seconds, measured.samples, measured.batches) == (24, 8, 1)


@given(st.lists(st.tuples(st.sampled_from(MARKS), st.floats(0, 10), st.booleans())))
def test_any_order_of_marks_books_every_moment(marks: list[tuple[str, float, bool]]) -> None:
    """Those that Ctrl-C has cut in half are left out."""
    clock, whole = Played(), Played()
    for name, seconds, torn in marks:
        clock.fake.time += seconds
        whole.fake.time += seconds
        if torn:
            clock.tape.append("forward")
            continue
        clock.mark(name)
        whole.mark(name)
        assert clock.code == whole.code
    clock.mark("data")
    whole.mark("data")
    measured = clock.close(0)

    assert measured == whole.close(0)
    assert measured.seconds == pytest.approx(clock.fake.time - 100.0)
    assert sum(measured.phases.values()) == pytest.approx(measured.seconds)
    assert set(measured.phases) == set(PHASES)


def test_several_batches_and_calls_make_one_step(clock: Played) -> None:
    for number in range(3):
        clock.enter("data")
        clock.batch(8, number)
        clock.play("forward 0 returned 1")
    measured = clock.play("update 0 updated 0").close(5)

    assert (measured.samples, measured.batches, measured.shape, measured.step) == (24, 3, 0, 5)
    assert measured.phases["loss"] == 3


def test_restart_forgets(clock: Played) -> None:
    clock.fake.time += 50
    clock.restart(first=True)
    clock.fake.time += 1
    clock.enter("data")
    measured = clock.close(0)

    assert (measured.seconds, measured.first) == (1, True)


def test_without_marks_of_the_backward_pass_the_loss_belongs_to_it(clock: Played) -> None:
    clock.backward_is_seen = False
    assert clock.play("forward 0 returned 3 update 0").booked() == {"backward": 3}


def test_a_closure_belongs_to_the_update(clock: Played) -> None:
    booked = clock.play("update 0 forward 1 returned 0 backward 2 backwarded 4 updated 0").booked()
    assert booked == {"forward": 1, "backward": 2, "optimizer": 4}


def test_skipped_time_is_in_no_step(clock: Played) -> None:
    assert clock.play("data 9 skip 1 batch 0").booked() == {"data": 1}
    assert clock.reader.aside_s == 9


def test_a_tape_read_late_holds_the_same_steps() -> None:
    def taped(late: bool) -> list[Measurement]:
        clock, found = Played(), []
        for number in range(1, 6):
            clock.play(f"data {number} batch {number} forward {number} returned {number} update {number} updated 0")
            clock.write(CUT)
            clock.fake.time += 3
            clock.write((RESUME, clock.now()))
            found += [] if late else clock.read()
        return found + clock.read()

    assert taped(late=True) == taped(late=False)
    assert [m.step for m in taped(late=True)] == list(range(5))


def test_the_open_phase_can_be_asked_at_any_time(clock: Played) -> None:
    assert clock.code == "outside"
    clock.enter("data")
    clock.count(3)
    assert clock.code == "data"
    clock.read()
    assert clock.code == "data"


def test_a_loop_whose_steps_never_end_keeps_no_long_tape(clock: Played) -> None:
    clock.restart()
    for _ in range(3 * MAX_TAPE):
        clock.play("forward 1 returned 1")

    assert len(clock.tape) <= MAX_TAPE + 2
    clock.enter("data")
    assert clock.booked() == {"forward": 3 * MAX_TAPE, "loss": 3 * MAX_TAPE}


def test_steps_in_a_tape_that_was_read_early_are_still_told(clock: Played) -> None:
    for _ in range(2 * MAX_TAPE):
        clock.play("forward 1 data 0")
        clock.write(CUT)

    assert len(clock.read()) == 2 * MAX_TAPE


def test_a_phase_can_be_renamed_while_it_is_open(clock: Played) -> None:
    clock.enter("host")
    clock.fake.time += 3
    clock.write((WAS, "forward"))
    clock.fake.time += 2
    assert clock.play("backward 1 backwarded 0").booked() == {"forward": 5, "backward": 1}


@pytest.mark.parametrize("within", [True, False, None], ids=["of the step", "an evaluation", "never settled"])
def test_what_is_provisional_is_booked_when_it_is_settled(clock: Played, within: bool | None) -> None:
    for code, seconds in ((MAYBE_DATA, 1), (MAYBE_HOST, 2), (MAYBE_FORWARD, 4), (MAYBE_HOST, 8)):
        clock.enter(code)
        assert (clock.code, settled(clock.code, within=False)) == (code, "evaluation")
        clock.fake.time += seconds
    if within is not None:
        clock.write((SETTLED, within))
    clock.fake.time += 16  # the open phase is settled from its beginning, and goes on
    clock.enter("backward")

    assert clock.booked() == ({"data": 1.0, "host": 26.0, "forward": 4.0} if within else {"evaluation": 31.0})


def test_what_was_settled_once_stays_where_it_is(clock: Played) -> None:
    for within, seconds in ((False, 1), (True, 2)):
        clock.enter(MAYBE_DATA)
        clock.fake.time += seconds
        clock.write((SETTLED, within))
    clock.enter("data")

    assert clock.booked() == {"evaluation": 1, "data": 2}

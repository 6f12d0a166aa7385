"""The mode of a run: what suspends it, rests it and closes it."""

from __future__ import annotations

from accel.session.state import Mode, RunState


def test_a_rest_ends_after_its_steps() -> None:
    state = RunState()
    state.rest(2)

    assert (state.mode, state.rested()) == (Mode.RESTING, False)
    assert (state.rested(), state.mode) == (True, Mode.MEASURING)


def test_no_rest_is_measuring() -> None:
    state = RunState()
    state.rest(0)
    assert state.mode is Mode.MEASURING


def test_who_is_woken_rests_one_step_more() -> None:
    state = RunState()
    state.wake()  # nothing rests
    assert state.mode is Mode.MEASURING
    state.rest(100)
    state.wake()
    assert state.mode is Mode.RESTING
    assert state.rested()


def test_a_suspended_rest_goes_on_afterwards() -> None:
    state = RunState()
    state.rest(3)
    with state.suspended():
        assert state.mode is Mode.SUSPENDED
    assert state.mode is Mode.RESTING


def test_what_is_closed_while_it_is_suspended_stays_closed() -> None:
    state = RunState()
    with state.suspended():
        state.close()
    assert state.mode is Mode.CLOSED

"""The race against itself: turns alternate, and each knows whether accel is on."""

from __future__ import annotations

import pytest

import accel
from benchmarks.never_slower import TURN, Turns


def test_turns_go_a_b_b_a_and_b_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    disabled: list[str] = []

    class Off:
        def __enter__(self) -> None:
            disabled.append("off")

        def __exit__(self, *error: object) -> None:
            disabled.append("on")

    monkeypatch.setattr(accel, "disabled", Off)
    turns = Turns(pairs=2)
    monkeypatch.setattr(turns, "_searched", lambda: True)
    sides = ""
    for step in range(8 * TURN):
        turns(step)
        if step % TURN == 0:
            sides += "B" if disabled[-1:] == ["off"] else "A"
    turns.close()

    assert sides == "ABBAABBA"
    assert disabled[-1] == "on"
    assert [len(turn) for turn in turns.accelerated + turns.plain][:3] == [TURN] * 3


def test_no_turn_begins_before_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(pairs=2)
    monkeypatch.setattr(turns, "_searched", lambda: False)
    for step in range(50):
        turns(step)
    assert not turns.settled and not turns.accelerated and not turns.plain

"""The switchboard: plans go on and off, what fails is dropped and reported, and a trip takes all suspects back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accel.session.switchboard import Switchboard
from accel.strategies.base import Exactness, NothingHelps, Strategy
from accel.strategies.trial_design import TrialDesign


class Logged(Strategy):
    """Writes down how it is switched."""

    summary, treats, exactness = "", frozenset(), Exactness.REORDERED
    log: list[str]
    error: Exception | None = None

    def refusal(self, run: Any) -> str:
        return ""

    def enable(self, run: Any, setting: Any) -> None:
        if self.error is not None:
            raise self.error
        self.log.append(f"+{self.name}" if setting is None else f"+{self.name}={setting}")

    def disable(self, run: Any) -> None:
        self.log.append(f"-{self.name}")


def make(**touches: str) -> tuple[Switchboard, dict[str, Any], list[str]]:
    """Return a switchboard of strategies that touch these, the strategies, and what is done to them."""
    log: list[str] = []
    kinds = {
        name: type(name, (Logged,), {"name": name, "touches": frozenset(text.split())})
        for name, text in touches.items()
    }
    strategies: dict[str, Any] = {name: kind() for name, kind in kinds.items()}
    for strategy in strategies.values():
        strategy.log = log
    run: Any = SimpleNamespace(world_size=1)
    board = Switchboard(
        run, strategies, suspected=lambda: log.append("suspected"), tripped=lambda: log.append("tripped")
    )
    return board, strategies, log


def test_only_what_differs_is_switched_the_last_one_off_first() -> None:
    board, _, log = make(a="input", b="input", c="input")
    board.switch({"a": None, "b": 1, "c": None})
    log.clear()
    board.switch({"a": None, "b": 2})
    assert log == ["-c", "-b", "+b=2"]
    assert board.active == {"a": None, "b": 2}


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError("no device"), "it could not be switched on: OSError: no device"),
        (NothingHelps("it would take longer"), "it would take longer"),
    ],
)
def test_what_can_not_be_switched_on_is_undone_reported_and_not_tried_again(error: Exception, why: str) -> None:
    board, strategies, log = make(bad="input")
    strategies["bad"].error = error
    board.switch({"bad": None})
    board.switch({"bad": None})
    assert log == ["-bad"]
    assert board.active == {}
    assert board.take_trips() == {"bad": why}
    assert board.trips == {}


def test_a_trip_takes_back_what_could_be_at_fault_and_names_the_newest() -> None:
    board, _, log = make(fetch="input", first="model", second="optimizer")
    board.switch({"fetch": None, "first": None, "second": None})
    assert log == ["+fetch", "+first", "suspected", "+second", "suspected"]
    log.clear()
    board.trip("its output is not finite")
    assert log == ["-second", "-first", "tripped"]
    assert board.active == {"fetch": None}
    assert board.trips == {"second": "its output is not finite"}


def test_a_trip_names_those_that_are_known_to_be_at_fault() -> None:
    board, _, _ = make(graphs="model", fused="optimizer")
    board.switch({"graphs": None, "fused": None})
    board.trip("it raised OutOfMemoryError", "graphs")
    assert (board.active, board.trips) == ({}, {"graphs": "it raised OutOfMemoryError"})


def test_fetching_is_dropped_alone() -> None:
    board, _, log = make(fetch="input", model="model")
    board.switch({"fetch": None, "model": None})
    log.clear()
    board.drop_fetching("fetching failed")
    assert log == ["-fetch", "tripped"]
    assert (board.active, board.trips) == ({"model": None}, {"fetch": "fetching failed"})


def test_of_a_plan_only_what_is_not_on_yet_is_new() -> None:
    board, _, _ = make(a="model", b="optimizer")
    board.switch({"a": 1})
    assert board.new_in({"a": 1, "b": None}) == ["b"]
    assert board.new_in({"a": 2}) == ["a"]
    assert board.new_in({"a": 1}) == ["a"]
    assert board.acting_on("model", {"a": 1, "b": None}) == {"a": 1}


def test_what_stops_acting_by_itself_has_tripped() -> None:
    board, strategies, log = make(first="input", second="input")
    board.switch({"first": None, "second": None})
    strategies["second"].failure = lambda run: "its samples differ"
    assert board.take_trips() == {"second": "its samples differ"}
    assert board.active == {"first": None} and log[-1] == "-second"


def test_what_prepares_itself_is_not_closed_while_it_is_off() -> None:
    board, strategies, log = make(idle="input", preparing="input", active="input")
    for name, strategy in strategies.items():
        strategy.close = lambda run, name=name: log.append(f"closed {name}")
    strategies["preparing"].trial_design = lambda run: TrialDesign(is_preparing=True)
    board.switch({"active": None})
    board.close(board.idle())
    assert log == ["+active", "closed idle"]


def test_what_a_comparison_alone_has_made_is_released() -> None:
    board, strategies, log = make(graphs="model", other="model")
    for strategy in strategies.values():
        strategy.close = lambda run, name=strategy.name: log.append(f"closed {name}")
    board.close(["graphs"])
    assert log == ["closed graphs"]

"""Candidates that wait for the loop, or for work beside it."""

from __future__ import annotations

from tests.accel.simulation import Machine, candidate, simulate


def test_what_waits_for_the_loop_is_tried_once_it_is_ready() -> None:
    machine = Machine(speed={"cache": 1.5, "other": 1.2})
    cache = candidate("cache", prepare=lambda: "it waits for two epochs" if machine.step < 1500 else "")

    early = simulate([cache, candidate("other")], machine)
    assert list(early.plan) == ["other"]
    assert (early.rows["cache"].status, early.rows["cache"].why) == ("not tried", "it waits for two epochs")

    machine = Machine(speed={"cache": 1.5, "other": 1.2})
    later = simulate([cache, candidate("other")], machine, until_settled=False, steps=5000)
    assert sorted(later.plan) == ["cache", "other"]
    assert later.closing is not None and later.closing.gain > 1.7
    assert all("cache" not in action.plan for action in machine.actions[:10])


def test_what_becomes_ready_during_the_search_is_tried_in_it() -> None:
    machine = Machine(speed={"cache": 1.5, "other": 1.2})
    cache = candidate("cache", prepare=lambda: "it waits for two epochs" if machine.step < 60 else "")

    controller = simulate([cache, candidate("other")], machine)
    assert sorted(controller.plan) == ["cache", "other"]


def test_what_waits_begins_with_the_search_whatever_the_budget() -> None:
    machine = Machine(data_share=0.5)
    asked: dict[str, list[int]] = {"data": [], "optimizer": []}

    def waits(phase: str) -> str:
        asked[phase].append(machine.step)
        return "it waits"

    cache = candidate("cache", phase="data", prepare=lambda: waits("data"))
    negligible = candidate("negligible", phase="optimizer", prepare=lambda: waits("optimizer"))
    simulate([candidate("first"), cache, negligible], machine, budget="0.001%")
    assert asked["data"][0] == machine.actions[0].steps
    assert not asked["optimizer"]


def test_what_turns_out_not_to_apply_while_it_waits_is_said_and_waits_no_more() -> None:
    machine = Machine()
    cache = candidate(
        "cache",
        prepare=lambda: "it waits for two epochs",
        refusal=lambda: "its samples differ" if machine.step > 1500 else "",
    )

    controller = simulate([cache], machine, until_settled=False, steps=5000)
    assert (controller.rows["cache"].status, controller.rows["cache"].why) == ("not applicable", "its samples differ")
    assert not any(action.check for action in machine.actions)


def test_the_reason_that_is_said_is_that_of_the_last_look() -> None:
    machine = Machine()
    measures = candidate("cache", prepare=lambda: "cores are measured" if machine.step < 60 else "cores are busy")

    controller = simulate([measures], machine, until_settled=False, steps=5000)
    assert (controller.rows["cache"].status, controller.rows["cache"].why) == ("not tried", "cores are busy")


def test_a_preparation_that_fails_leaves_the_candidate_out() -> None:
    def fails() -> str:
        raise OSError("no room")

    controller = simulate([candidate("cache", prepare=fails)], Machine(), until_settled=False, steps=2000)
    assert controller.rows["cache"].why == "its preparation failed: OSError: no room"
    assert not controller.plan

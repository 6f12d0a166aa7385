"""What may outlast its own use: judged by steps before and after it, or in turns while plain steps fault as before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from accel.report import StrategyRow
from accel.search.actions import Action, Candidate, Result
from accel.search.remembered import RememberedTrial
from tests.accel.memory import FakeMemory, day, remembered
from tests.accel.simulation import CROWDED, FAST, QUIET, Machine, candidate, simulate, step_of_first

pytestmark = pytest.mark.usefixtures("today")


class Grown(Machine):
    """Once `heap` has been on, it is as if it were on for ever."""

    has_grown = False

    def seconds(self, plan: dict[str, Any]) -> float:
        self.has_grown = self.has_grown or "heap" in plan
        return super().seconds({**plan, "heap": None} if self.has_grown else plan)


def heap(**options: Any) -> Candidate:
    return candidate("heap", is_compared=False, lasting=True, **options)


def test_a_lasting_effect_is_found_by_the_steps_before_and_after() -> None:
    controller = simulate([candidate("none"), heap(), candidate("good")], Grown(speed={"heap": 1.2, "good": 1.5}))
    assert list(controller.plan) == ["heap", "good"]
    assert controller.rows["heap"].gain == pytest.approx(1.2, rel=0.02)
    assert controller.rows["heap"].why.startswith("faster than the steps before it")
    assert controller.closing is not None
    assert controller.closing.gain == pytest.approx(1.8, rel=0.02)
    assert controller.closing.before_ms / controller.closing.after_ms == pytest.approx(1.8, rel=0.02)


def test_alone_it_needs_no_closing_trial_and_nothing_switches_it_off() -> None:
    machine = Grown(speed={"heap": 1.2}, noise=0.02)
    controller = simulate([heap(), candidate("none")], machine, until_settled=False, steps=3000, pace=FAST)
    assert controller.plan == {"heap": None}
    assert controller.closing is not None and controller.closing.gain == pytest.approx(1.2, rel=0.05)
    first = next(n for n, action in enumerate(machine.actions) if action.plan)
    assert all("heap" in action.plan for action in machine.actions[first:])


@pytest.mark.parametrize("gain", [0.9, 1.0])
def test_without_a_gain_it_is_undone_and_not_tried_again(gain: float) -> None:
    machine = Grown(speed={"heap": gain}, noise=0.05)
    controller = simulate([heap()], machine, until_settled=False, steps=3000, pace=FAST)
    assert controller.plan == {}
    assert sum(bool(action.plan) for action in machine.actions) == 1


def test_noise_seldom_keeps_it() -> None:
    kept = sum(bool(simulate([heap()], Grown(noise=0.2, seed=seed)).plan) for seed in range(200))
    assert kept <= 10


def test_what_is_worse_on_top_of_it_leaves_it_on() -> None:
    machine = Grown(speed={"heap": 1.2, "later": 1.5})
    machine.drift = lambda step: 2.0 if machine.actions[-1].plan.get("later", 0) is None and step > 250 else 1.0
    controller = simulate([heap(), candidate("later")], machine, budget="10%", until_settled=False, steps=4000)
    assert "heap" in controller.plan


def test_after_another_batch_shape_its_gain_is_still_known() -> None:
    machine = Grown(speed={"heap": 1.2}, regime=lambda step: "a" if step < 500 else "b")
    controller = simulate([heap()], machine, until_settled=False, steps=3000, pace=FAST)
    assert any("searching again" in event.text for event in controller.events)
    assert controller.plan == {"heap": None}


def test_a_remembered_lasting_effect_is_compared_with_the_steps_observed() -> None:
    offered = [candidate("heap", is_compared=False, lasting=True), candidate("good")]
    for gain, plan in ((1.2, {"heap": None, "good": None}), (1.0, {"good": None})):
        again = Machine(speed={"heap": gain, "good": 1.5}, noise=0.02)
        memory = FakeMemory(remembered(plan={"heap": None, "good": None}))
        controller = simulate(offered, again, memory=memory)
        assert controller.plan == plan
        assert controller.recollection.text.endswith("kept" if "heap" in plan else "kept, but for heap")
        assert controller.rows["heap"].steps > 0
        assert controller.closing is not None
        assert controller.closing.gain == pytest.approx(gain * 1.5, rel=0.02)
        assert step_of_first(again, lambda chosen, plan=plan: chosen == plan) <= 35  # type: ignore[misc]


def kept_again(gain: float, noise: float) -> int:
    """In how many of 20 runs a lasting effect, of 1.2 in an earlier run, stays."""
    found = 0
    for seed in range(20):
        trials = {"heap": RememberedTrial(status="kept", on=day(3), gain=1.2, low=1.15)}
        memory = FakeMemory(remembered(plan={"heap": None, "good": None}, trials=trials))
        machine = Grown(speed={"heap": gain, "good": 1.5}, noise=noise, seed=seed)
        controller = simulate([heap(), candidate("good")], machine, memory=memory)
        found += "heap" in controller.plan
    return found


def test_noise_does_not_undo_what_an_earlier_run_has_shown() -> None:
    assert kept_again(1.2, noise=0.2) >= 18  # by this run's comparison alone it would stay in five
    assert kept_again(1.2, noise=0.02) == 20
    assert kept_again(1.0, noise=0.02) <= 1
    assert kept_again(0.9, noise=0.1) == 0


def test_a_remembered_plan_of_nothing_else_that_gives_nothing_is_forgotten() -> None:
    memory = FakeMemory(remembered(plan={"heap": None}))
    controller = simulate(
        [candidate("heap", is_compared=False, lasting=True)], Machine(speed={"heap": 1.0}, noise=0.02), memory=memory
    )
    assert controller.plan == {}
    assert "not shown to be faster" in controller.recollection.text


def test_what_is_missing_of_a_remembered_plan_is_searched_anew() -> None:
    offered = [candidate("heap", is_compared=False, lasting=True), candidate("good"), candidate("better")]
    memory = FakeMemory(remembered(plan={"heap": None, "good": None}))
    again = Machine(speed={"heap": 1.2, "good": 0.99, "better": 1.4}, noise=0.02)
    controller = simulate(offered, again, memory=memory)
    assert controller.plan == {"heap": None, "better": None}
    assert "only heap was shown to be faster than plain" in controller.recollection.text
    assert controller.rows["good"].status == "undone"


def test_a_remembered_lasting_effect_that_fails_is_not_remembered() -> None:
    memory = FakeMemory(remembered(plan={"heap": None}))
    again = Machine(speed={"heap": 1.3, "good": 1.3}, trips_at={"heap": 0})
    controller = simulate([heap(), candidate("good")], again, memory=memory)
    assert controller.plan == {"good": None}
    assert "checked again: undone (its output is not finite" in controller.recollection.text
    assert memory.search is not None and memory.search.plan == {"good": None}


def test_what_gave_nothing_is_tried_again_for_another_batch_shape() -> None:
    class Helps(Machine):
        """It gives something from step 1000 on, with the other shape."""

        def seconds(self, plan: dict[str, Any]) -> float:
            return super().seconds(plan) / (1.3 if "heap" in plan and self.step >= 1000 else 1.0)

    machine = Helps(regime=lambda step: "a" if step < 1000 else "b", noise=0.01)
    controller = simulate([heap()], machine, until_settled=False, steps=3000, pace=FAST)
    assert controller.plan == {"heap": None}
    assert controller.rows["heap"].gain == pytest.approx(1.3, rel=0.02)


def test_a_trial_on_top_of_it_that_has_just_been_made_is_the_closing_trial() -> None:
    machine = Grown(speed={"heap": 1.2, "good": 1.2}, noise=0.08, seed=1)
    controller = simulate([heap(), candidate("good")], machine)
    assert controller.plan == {"heap": None, "good": None}
    own = controller.rows["heap"].gain, controller.rows["good"].gain
    assert controller.closing is not None and None not in own
    assert controller.closing.gain == pytest.approx(own[0] * own[1])  # type: ignore[operator]
    assert sum(action.plan == {"heap": None} and action.steps == 5 for action in machine.actions) <= 13


@dataclass
class Faulting(Machine):
    """Its plain steps fault, and are slower for it; once other candidates have been on, or compared, no more."""

    lasts: bool = False
    """They don't once `heap` has been on, either."""
    spoils: frozenset[str] = frozenset()
    has_grown: bool = False

    def page_faults(self, plan: dict[str, Any]) -> int:
        return 0 if "heap" in plan or self.has_grown else 2000

    def seconds(self, plan: dict[str, Any]) -> float:
        self.has_grown = self.has_grown or bool(self.spoils & plan.keys()) or (self.lasts and "heap" in plan)
        return super().seconds({**plan, "heap": None} if self.has_grown else plan)

    def answer(self, action: Action) -> Result:
        self.has_grown = self.has_grown or bool(self.spoils & (action.check or {}).keys())
        return super().answer(action)


def drifting(step: int) -> float:
    """A machine that is a third slower every other two seconds."""
    return 1.3 if step // 100 % 2 else 1.0


@pytest.mark.parametrize(("gain", "lasts"), [(1.2, False), (1.2, True), (1.0, False), (0.9, False)])
def test_plain_steps_that_fault_again_take_turns_with_it(gain: float, lasts: bool) -> None:
    machine = Faulting(speed={"heap": gain}, noise=0.03, page_fault_s=3e-6, lasts=lasts)
    controller = simulate([candidate("none"), heap()], machine)
    row = controller.rows["heap"]
    assert (row.status == "kept") == (gain > 1)
    assert row.gain == pytest.approx(gain, rel=0.06)
    if gain > 1:
        assert row.why.startswith("faster than the steps before it" if lasts else "faster in 6 pairs of interleaved")


def test_a_drift_of_the_machine_neither_hides_it_nor_makes_it_up() -> None:
    for gain in (1.15, 1.0):
        found = 0
        for seed in range(20):
            offset = 37 * seed
            machine = Faulting(speed={"heap": gain}, noise=0.05, page_fault_s=3e-6, seed=seed)
            machine.drift = lambda step, offset=offset: drifting(step + offset)  # type: ignore[misc]
            found += "heap" in simulate([heap()], machine).plan
        assert found == 20 if gain > 1 else found == 0


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("is_compared", [False, True])
def test_it_comes_before_what_would_make_the_heap_grow(crowded: bool, is_compared: bool) -> None:
    other = candidate("other", is_compared=is_compared)
    machine = Faulting(speed={"heap": 1.2}, noise=0.02, page_fault_s=3e-6, spoils=frozenset({"other"}))
    machine.thread = lambda step: CROWDED if crowded and step < 400 else QUIET
    controller = simulate([other, heap()], machine)
    assert controller.plan == {"heap": None}
    assert controller.rows["heap"].gain == pytest.approx(1.2, rel=0.04)


def test_it_is_not_tried_where_steps_hardly_fault() -> None:
    machine = Faulting(speed={"heap": 1.0}, noise=0.02, page_fault_s=2e-7)
    controller = simulate([heap()], machine)
    assert not any(action.plan for action in machine.actions)
    assert controller.rows["heap"].status == "not tried"
    assert controller.rows["heap"].why == "page faults take 2.0% of the step at most: too little to win"


def test_what_has_made_the_heap_grow_meanwhile_is_no_verdict_on_it() -> None:
    machine = Faulting(speed={"heap": 1.2, "other": 1.3}, noise=0.02, page_fault_s=3e-6, spoils=frozenset({"other"}))
    memory = FakeMemory()
    late = heap(waits=lambda: "" if machine.has_grown else "it waits")
    controller = simulate([candidate("other"), late], machine, memory=memory)
    assert list(controller.plan) == ["other"]
    assert controller.rows["heap"].why == "page faults take 0.0% of the step at most: too little to win"
    assert memory.search is not None and "heap" not in memory.search.trials


@pytest.mark.parametrize("lasts", [False, True])
def test_other_page_faults_of_each_step_don_t_change_the_verdict(lasts: bool) -> None:
    class Others(Faulting):
        """Its loader's batches fault, too, whatever is on."""

        def page_faults(self, plan: dict[str, Any]) -> int:
            return 4000 + super().page_faults(plan)

    machine = Others(speed={"heap": 1.2}, noise=0.03, page_fault_s=1e-6, lasts=lasts)
    controller = simulate([heap()], machine)
    assert controller.plan == {"heap": None}
    assert controller.rows["heap"].gain == pytest.approx(1.2, rel=0.05)
    assert controller.rows["heap"].why.startswith("faster than the steps before" if lasts else "faster in 6 pairs")


def kept_of_100(gain: float, noise: float) -> list[StrategyRow]:
    """Return the rows of a lasting effect in those of 100 runs that keep it."""
    rows = []
    for seed in range(100):
        machine = Faulting(speed={"heap": gain}, noise=noise, page_fault_s=3e-6, seed=seed, lasts=True)
        rows.append(simulate([heap()], machine).rows["heap"])
    return [row for row in rows if row.status == "kept"]


def test_what_lasts_and_is_slower_is_seldom_kept() -> None:
    assert len(kept_of_100(0.9, noise=0.1)) <= 5


def test_what_noise_leaves_open_is_kept_for_the_page_faults_that_it_saves() -> None:
    rows = kept_of_100(1.08, noise=0.2)
    assert len(rows) >= 90
    open_ones = [row for row in rows if row.gain_low is not None and row.gain_low <= 1]
    assert open_ones
    assert all(row.why.startswith("looks faster than the steps without it, and saves 2,000 page") for row in open_ones)


@pytest.mark.parametrize(("gain", "lasts"), [(1.2, False), (1.0, False), (0.9, False), (1.2, True)])
def test_after_another_batch_shape_it_is_tried_again_unless_it_has_lasted(gain: float, lasts: bool) -> None:
    class Other(Faulting):
        """With the other shape it has another gain, if it doesn't last."""

        def seconds(self, plan: dict[str, Any]) -> float:
            self.speed = {"heap": 1.3 if self.step < 500 or lasts else gain}
            return super().seconds(plan)

    machine = Other(noise=0.02, page_fault_s=3e-6, lasts=lasts, regime=lambda step: "a" if step < 500 else "b")
    controller = simulate([heap()], machine, until_settled=False, steps=3000, pace=FAST)
    assert any("searching again" in event.text for event in controller.events)
    row = controller.rows["heap"]
    assert (row.status == "kept") == (gain > 1)
    assert row.gain == pytest.approx(1.3 if lasts else gain, rel=0.05)
    if gain > 1:
        assert controller.closing is not None and controller.closing.gain == pytest.approx(row.gain)


def test_what_turns_leave_open_stays_and_is_not_tried_again() -> None:
    found = 0
    for seed in range(20):
        machine = Faulting(speed={"heap": 1.03}, noise=0.15, page_fault_s=3e-6, seed=seed)
        controller = simulate([heap()], machine)
        row = controller.rows["heap"]
        assert ("heap" in controller.plan) == (row.status == "kept")
        if row.status == "kept" and row.gain_low is not None and row.gain_low <= 1:
            found += 1
            assert controller.closing is not None and controller.closing.gain == pytest.approx(row.gain)
            first = next(n for n, action in enumerate(machine.actions) if action.plan)
            assert sum(not action.plan for action in machine.actions[first:]) <= 35
    assert found


@pytest.mark.parametrize(("gain", "stays"), [(1.2, True), (0.9, False)])
def test_a_remembered_one_takes_turns_where_one_comparison_does_not_show_it(gain: float, stays: bool) -> None:
    for seed in range(20):
        memory = FakeMemory(remembered(plan={"heap": None, "good": None}))
        machine = Faulting(speed={"heap": gain, "good": 1.5}, noise=0.1, page_fault_s=3e-6, seed=seed)
        machine.drift = lambda step: 1.0 if step < 12 else 1.3  # it would look slower than the steps observed
        controller = simulate([heap(), candidate("good")], machine, memory=memory)
        assert ("heap" in controller.plan) == stays
        assert "good" in controller.plan


def test_a_disturbance_before_it_makes_no_gain_larger_than_all_page_faults() -> None:
    class Disturbed(Faulting):
        """Its plain steps take twice as long for a while, just before the effect lasts."""

        def seconds(self, plan: dict[str, Any]) -> float:
            return super().seconds(plan) * (2.0 if not plan and not self.has_grown and self.step >= 12 else 1.0)

    machine = Disturbed(speed={"heap": 1.2}, noise=0.02, page_fault_s=2e-6, lasts=True)
    row = simulate([heap()], machine).rows["heap"]
    assert row.status == "kept"
    assert row.gain == pytest.approx(1 / (1 - 2000 * 2e-6 / 0.02), rel=0.02)  # 4 of 20 ms
    assert row.after_ms == pytest.approx(20 / 1.2, rel=0.05)


def grown(**options: Any) -> Faulting:
    """Return a machine whose heap has grown before the first step: nothing shows what `heap` gives."""
    return Faulting(noise=0.02, page_fault_s=3e-6, has_grown=True, **options)


@pytest.mark.parametrize("others", [{"good": None}, {}])
def test_what_can_t_be_shown_now_is_left_to_the_next_run(others: dict[str, Any]) -> None:
    trials = {"heap": RememberedTrial(status="kept", on=day(3), gain=1.2, low=1.15)}
    memory = FakeMemory(remembered(plan={"heap": None, **others}, trials=trials))
    machine = grown(speed={"heap": 1.2, "good": 1.5})
    controller = simulate([heap(), candidate("good")], machine, memory=memory)
    assert controller.plan == {"good": None}
    assert controller.rows["heap"].status == "not tried"
    assert memory.search is not None
    assert memory.search.plan == {"heap": None, "good": None}
    assert memory.search.trials["heap"] == trials["heap"]
    if not others:  # nothing of it was on: a run that is killed from here on has not been killed by its check
        assert memory.calls[:3] == ["recall", "begin_check", "store"]


def test_what_was_shown_in_turns_is_not_taken_for_lasting_where_nothing_faults() -> None:
    class Smaller(Faulting):
        """Batches of the other shape are served without page faults, and `heap` gives nothing then."""

        def page_faults(self, plan: dict[str, Any]) -> int:
            return super().page_faults(plan) if self.step < 500 else 0

        def seconds(self, plan: dict[str, Any]) -> float:
            self.speed = {"heap": 1.3 if self.step < 500 else 1.0}
            return super().seconds(plan)

    machine = Smaller(noise=0.02, page_fault_s=3e-6, regime=lambda step: "a" if step < 500 else "b")
    controller = simulate([heap()], machine, until_settled=False, steps=3000, pace=FAST)
    assert controller.plan == {}
    assert controller.rows["heap"].status == "not tried"
    assert controller.closing is None


def test_where_it_saves_no_page_faults_that_it_gives_nothing_is_no_verdict() -> None:
    class Loader(Faulting):
        """All faults are those of the loader's batches; the heap had grown before."""

        def page_faults(self, plan: dict[str, Any]) -> int:
            return 2000

    memory = FakeMemory()
    controller = simulate([heap()], Loader(noise=0.02, page_fault_s=3e-6), memory=memory)
    assert controller.rows["heap"].status == "refused"
    assert controller.rows["heap"].why.startswith("it saves no page faults as things are")
    assert memory.search is not None and memory.search.trials["heap"].open
    for others in ({"good": None}, {}):
        memory = FakeMemory(remembered(plan={"heap": None, **others}))
        machine = Loader(speed={"good": 1.5}, noise=0.02, page_fault_s=3e-6)
        controller = simulate([heap(), candidate("good")], machine, memory=memory)
        assert controller.plan == {"good": None}
        assert "but for heap" not in controller.recollection.text


def test_what_was_left_to_the_next_run_is_tried_if_steps_fault_again() -> None:
    class Again(Faulting):
        """Its steps fault from the twelfth on."""

        def page_faults(self, plan: dict[str, Any]) -> int:
            return super().page_faults(plan) if self.step > 12 else 0

    memory = FakeMemory(remembered(plan={"heap": None, "wrong": None}))
    machine = Again(speed={"heap": 1.2, "good": 1.3}, noise=0.02, page_fault_s=3e-6, wrong=frozenset({"wrong"}))
    controller = simulate([candidate("wrong"), heap(), candidate("good")], machine, memory=memory)
    assert controller.rows["wrong"].status == "undone"
    assert controller.plan == {"heap": None, "good": None}


def test_after_another_batch_shape_what_a_remembered_plan_has_shown_stays_if_it_lasts() -> None:
    trials = {"heap": RememberedTrial(status="kept", on=day(3), gain=1.2, low=1.15)}
    memory = FakeMemory(remembered(plan={"heap": None}, trials=trials))
    machine = Faulting(speed={"heap": 1.2}, noise=0.02, page_fault_s=3e-6, lasts=True)
    machine.regime = lambda step: "a" if step < 500 else "b"
    controller = simulate([heap()], machine, until_settled=False, steps=3000, pace=FAST, memory=memory)
    assert any("searching again" in event.text for event in controller.events)
    assert controller.plan == {"heap": None}


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("at", range(10, 220, 13))
def test_another_batch_shape_in_the_midst_of_its_trial_begins_it_anew(at: int, lasts: bool) -> None:
    machine = Faulting(speed={"heap": 1.3}, noise=0.02, page_fault_s=3e-6, lasts=lasts)
    machine.regime = lambda step: "a" if step < at else "b"
    controller = simulate([heap(), candidate("good")], machine, until_settled=False, steps=2500, pace=FAST)
    if not lasts:
        assert controller.plan == {"heap": None}
        assert controller.rows["heap"].gain == pytest.approx(1.3, rel=0.05)
    assert controller.rows["heap"].status in ("kept", "not tried")


@pytest.mark.parametrize("at", range(10, 220, 13))
def test_a_trip_in_the_midst_of_its_trial_undoes_it(at: int) -> None:
    machine = Faulting(speed={"heap": 1.3, "good": 1.4}, noise=0.02, page_fault_s=3e-6, trips_at={"heap": at})
    controller = simulate([heap(), candidate("good")], machine)
    assert controller.plan == {"good": None}
    assert controller.rows["heap"].status == "undone"

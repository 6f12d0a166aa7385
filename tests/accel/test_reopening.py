"""A verdict holds for the step that it was made on: it is reopened once the step is shorter, and not for ever."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from accel.profiler.bottleneck import Bottleneck
from accel.search.actions import Action, Result
from accel.search.state import Candidate, SearchState
from tests.accel.simulation import Machine, candidate, simulate
from tests.sampling import examples


class Saves(Machine):
    """Each strategy saves so many ms of a step of 100 ms."""

    def __init__(self, saves_ms: dict[str, float], **options: Any) -> None:
        super().__init__(**options)
        self.saves_ms = saves_ms

    def seconds(self, plan: dict[str, Any]) -> float:
        ms = 100.0 - sum(self.saves_ms.get(name, 0.0) for name in plan)
        return max(ms, 2.0) / 1e3 * super().seconds({}) / 0.020

    def trials(self) -> Counter[str]:
        """Candidate → how often it was compared."""
        return Counter(name for action in self.actions for name in set(action.check or {}) - set(action.plan))


def named(*names: str, **options: Any) -> list[Candidate]:
    return [candidate(name, **options) for name in names]


def test_what_saved_too_little_of_a_long_step_is_kept_once_the_step_is_short() -> None:
    """2 ms are 2 % of 100, and 8 % of 25."""
    machine = Saves({"fused": 2.0, "bf16": 75.0}, noise=0.002)
    state = simulate(named("fused", "bf16"), machine)
    assert state.plan == {"bf16": None, "fused": None}
    assert machine.trials()["fused"] == 2
    assert any(event.text.startswith("fused: the step has become shorter") for event in state.events)


def test_a_verdict_stands_where_the_step_is_hardly_shorter_or_it_would_save_too_little_still() -> None:
    for saves in ({"fused": 2.0, "bf16": 15.0}, {"fused": -20.0, "bf16": 40.0}):
        machine = Saves(saves, noise=0.002)
        state = simulate(named("fused", "bf16"), machine)
        assert list(state.plan) == ["bf16"]
        assert machine.trials()["fused"] == 1


def test_a_phase_that_took_too_little_is_looked_at_again() -> None:
    class Fetches(Saves):
        def answer(self, action: Action) -> Result:
            self.data_share = 2.0 / (1e3 * self.seconds(action.plan))  # 2 ms
            return super().answer(action)

    machine = Fetches({"bf16": 80.0, "workers": 1.9}, noise=0.001)
    offered = [*named("bf16"), candidate("workers", phase="data", touches=frozenset({"input"}))]
    assert set(simulate(offered, machine).plan) == {"bf16", "workers"}


def test_graphs_come_back_after_compile() -> None:
    """On the long step they cost a little; with half of the device's work gone, the host limits it."""

    class Launches(Machine):
        def seconds(self, plan: dict[str, Any]) -> float:
            device = 60.0 - 35.0 * ("compile" in plan) + 1.0 * ("graphs" in plan)
            return max(device, 5.0 if "graphs" in plan else 40.0) / 1e3 * super().seconds({}) / 0.020

    offered = [
        candidate("graphs", treats=frozenset({Bottleneck.LAUNCH})),
        candidate("compile", cost_s=1.5, is_made_for_calls=True),
    ]
    state = simulate(offered, Launches(noise=0.002))
    assert set(state.plan) == {"graphs", "compile"}


def test_what_the_guard_found_wrong_stays_out() -> None:
    machine = Saves({"wrong": 2.0, "bf16": 75.0}, noise=0.002, wrong=frozenset({"wrong"}))
    simulate(named("wrong", "bf16"), machine)
    assert machine.trials()["wrong"] == 1


@given(
    saves=st.lists(st.floats(-30.0, 60.0), min_size=2, max_size=6),
    noise=st.floats(0.0, 0.1),
    treats=st.lists(st.sampled_from([Bottleneck.LAUNCH, Bottleneck.COMPUTE]), min_size=6, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(30), deadline=None)
def test_each_verdict_is_reopened_twice_at_the_most_and_the_search_ends(
    saves: list[float], noise: float, treats: list[Bottleneck], seed: int
) -> None:
    machine = Saves({str(number): each for number, each in enumerate(saves)}, noise=noise, seed=seed)
    offered = [candidate(str(number), treats=frozenset({treats[number]})) for number in range(len(saves))]
    state: SearchState = simulate(offered, machine, steps=200_000)
    assert machine.step < 200_000
    assert all(each.times_reopened <= 2 for each in state.candidates.values())
    assert all(times <= 2 * 3 for times in machine.trials().values())  # in brief and at length, three times

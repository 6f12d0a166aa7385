"""Freed memory stays with the process while the strategy is on, and goes back to the system when it is off."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.search.actions import Action, Result
from accel.search.state import Candidate, SearchState
from accel.strategies import allocator
from accel.strategies.allocator import Allocator, ByPageFaults, mmap_threshold
from tests.accel.memory import FakeMemory, remembered
from tests.accel.simulation import CROWDED, FAST, QUIET, Machine, candidate, simulate


def run_of(device: str = "cpu") -> Any:
    return SimpleNamespace(device=torch.device(device))


pytestmark = pytest.mark.skipif(bool(allocator._refusal()), reason=f"not applicable here: {allocator._refusal()}")


def test_large_requests_come_from_the_heap_while_it_is_on() -> None:
    libc, strategy = allocator._libc(), Allocator()
    blocks: list[int] = []

    def is_mapped() -> bool:
        """Tell whether a block is mapped that is larger than any before, none of which is free; no page is touched."""
        blocks.append(libc.malloc((64 + len(blocks)) << 20))
        return allocator._is_mapped(blocks[-1])

    try:
        assert is_mapped()
        for _ in range(2):
            strategy.enable(run_of(), None)
            assert not is_mapped()
            strategy.disable(run_of())
            assert is_mapped()
        strategy.close(run_of())
    finally:
        for block in blocks:
            libc.free(block)


def test_the_thresholds_are_those_that_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(allocator, "_set", lambda parameter, value: calls.append((parameter, value)))
    strategy = Allocator()
    strategy.enable(run_of(), None)
    assert calls == [(-4, 0), (-1, 2**31 - 1)]
    strategy.disable(run_of())
    ((mmap, trim),) = allocator._thresholds
    assert calls[2:] == [(-3, mmap), (-1, trim), (-4, 65536)]


def test_thresholds_are_those_of_before() -> None:
    strategy = Allocator()
    strategy.enable(run_of(), None)
    strategy.disable(run_of())
    # What lies free at the end of the heap serves larger requests, too.
    assert mmap_threshold() >= allocator._thresholds[0][0]


@pytest.mark.parametrize("first_leaves", [False, True])
def test_it_stays_on_for_the_model_that_keeps_it(first_leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds nothing to win, as it is on already, and is undone."""
    libc, first, second = allocator._libc(), Allocator(), Allocator()
    trimmed: list[int] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            return trimmed.append if name == "malloc_trim" else getattr(libc, name)

    monkeypatch.setattr(allocator, "_libc", Noted)
    blocks: list[int] = []

    def is_mapped() -> bool:
        blocks.append(libc.malloc((64 + 128 * len(blocks)) << 20))
        return allocator._is_mapped(blocks[-1])

    first.enable(run_of(), None)
    second.enable(run_of(), None)
    leaves, stays = (first, second) if first_leaves else (second, first)
    leaves.disable(run_of())
    leaves.close(run_of())
    try:
        assert not is_mapped()
        assert trimmed == []
        assert leaves.refusal(run_of()) == "it is on already, for another model of this process"
        assert stays.refusal(run_of()) == ""
    finally:
        stays.disable(run_of())
    stays.close(run_of())
    assert is_mapped()
    assert trimmed == [0]
    for block in blocks:
        libc.free(block)


def test_it_needs_a_model_on_the_cpu() -> None:
    assert Allocator().refusal(run_of("cuda")) == "the model's memory is not the CPU's but that of cuda"
    assert Allocator().refusal(run_of()) == ""


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")]
)
def test_what_the_user_has_set_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert Allocator().refusal(run_of()) == f"{name} set the allocator's thresholds already"


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Preloaded:
        malloc = ctypes.cast(1, ctypes.CFUNCTYPE(None))

    monkeypatch.setattr(allocator, "_libc", Preloaded)
    assert Allocator().refusal(run_of()).startswith("another allocator has been put in the place of glibc's")


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("musl", "1"))
    assert Allocator().refusal(run_of()) == "the C library is not glibc"


# -- how it is judged --------------------------------------------------------------------------------------------------


@dataclass
class Faulting(Machine):
    """Its plain steps fault, and are slower for it, until the heap has grown."""

    faults: int = 2000
    """Of a plain step, of 20 ms."""
    others: int = 0
    """Page faults of each step that nothing saves: a loader's batches."""
    lasts: bool = True
    """The heap stays grown once `heap` has been on."""
    spoils: frozenset[str] = frozenset()
    """What makes it grow, too, when it is on or compared."""
    has_grown: bool = False
    count: int = 0

    def seconds(self, plan: dict[str, Any]) -> float:
        self.has_grown = self.has_grown or bool(self.spoils & plan.keys()) or (self.lasts and "heap" in plan)
        grown = self.has_grown or "heap" in plan
        self.count += self.others + (0 if grown else self.faults)
        return super().seconds({**plan, "heap": None} if grown else plan)

    def answer(self, action: Action) -> Result:
        self.has_grown = self.has_grown or bool(self.spoils & (action.check or {}).keys())
        return super().answer(action)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let faults be those of a machine, and one of them cost so much."""

    def of(machine: Faulting, seconds: float = 3e-6) -> Faulting:
        monkeypatch.setattr(allocator, "fault_count", lambda: machine.count)
        monkeypatch.setattr(allocator, "_FAULT_S", seconds)
        return machine

    return of


def heap(**options: Any) -> Candidate:
    return candidate("heap", touches=frozenset(), kind=ByPageFaults, **options)


def searched(machine: Machine, *others: Candidate, **options: Any) -> SearchState:
    return simulate([*others, heap()], machine, **options)


@pytest.mark.parametrize("lasts", [True, False])
def test_it_is_found_by_the_steps_before_and_after_it(lasts: bool, fault: Any) -> None:
    machine = fault(Faulting(speed={"heap": 1.2, "good": 1.5}, noise=0.02, lasts=lasts))
    state = searched(machine, candidate("none"), candidate("good"))
    assert list(state.plan) == ["heap", "good"]
    assert state.rows["heap"].gain == pytest.approx(1.2, rel=0.02)
    assert state.rows["heap"].why == "faster than the steps before it"
    assert state.closing is not None and state.closing.gain == pytest.approx(1.8, rel=0.03)


def test_it_stands_by_its_own_trial_and_nothing_switches_it_off(fault: Any) -> None:
    machine = fault(Faulting(speed={"heap": 1.2}, noise=0.02))
    state = searched(machine, candidate("none"), until_settled=False, steps=3000, pace=FAST)
    assert state.plan == {"heap": None}
    assert state.closing is not None and state.closing.gain == pytest.approx(1.2, rel=0.05)
    first = next(n for n, action in enumerate(machine.actions) if action.plan)
    assert all("heap" in action.plan for action in machine.actions[first:])


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("is_compared", [False, True])
def test_it_comes_before_what_would_make_the_heap_grow(crowded: bool, is_compared: bool, fault: Any) -> None:
    other = candidate("other", touches=frozenset({"model"} if is_compared else ()))
    machine = fault(Faulting(speed={"heap": 1.2}, noise=0.02, spoils=frozenset({"other"})))
    machine.thread = lambda step: CROWDED if crowded and step < 400 else QUIET
    state = searched(machine, other)
    assert state.plan == {"heap": None}
    assert state.rows["heap"].gain == pytest.approx(1.2, rel=0.04)


def test_it_is_not_on_where_steps_hardly_fault(fault: Any) -> None:
    machine = fault(Faulting(noise=0.02), 2e-7)
    state = searched(machine)
    assert not any(action.plan for action in machine.actions)
    assert state.rows["heap"].status == "not tried"
    assert state.rows["heap"].why == "page faults take 2.0% of the step at most: too little to win"


def test_where_steps_fault_later_it_has_its_turn_then(fault: Any) -> None:
    """Whether a heap is trimmed depends on what lies at its end, which may change at any step."""

    class Later(Faulting):
        def seconds(self, plan: dict[str, Any]) -> float:
            self.has_grown = self.step < 600
            return super().seconds(plan)

    machine = fault(Later(speed={"heap": 1.2}, noise=0.02, lasts=False))
    asked: list[int] = []
    candidates = [heap(has_come_back=lambda: asked.append(machine.step) or machine.step > 800)]
    state = simulate(candidates, machine, until_settled=False, steps=3000, pace=FAST)
    assert state.plan == {"heap": None}
    assert state.rows["heap"].gain == pytest.approx(1.2, rel=0.04)
    assert asked[0] < 600


def test_page_faults_have_come_back_where_they_take_some_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, now, strategy = [0], [0.0], Allocator()
    monkeypatch.setattr(allocator, "fault_count", lambda: faults[0])
    monkeypatch.setattr(allocator.time, "monotonic", lambda: now[0])
    found = []
    for more in (0, 20_000, 100, 20_000, 30_000, 100):  # of 3 µs each, in a second
        faults[0] += more
        now[0] += 1.0
        found.append(strategy._faults_again())
    assert found == [False, False, False, False, True, False]
    monkeypatch.setattr(allocator, "fault_count", lambda: None)
    assert not strategy._faults_again()


def test_where_it_saves_no_page_faults_that_it_gives_nothing_is_no_verdict(fault: Any) -> None:
    memory = FakeMemory()
    state = searched(fault(Faulting(noise=0.02, others=2000, has_grown=True)), memory=memory)
    assert (state.rows["heap"].status, state.rows["heap"].why) == ("inconclusive", allocator.SAVES_NONE)
    assert memory.search is None


@pytest.mark.parametrize(
    ("gain", "noise", "least", "most"), [(1.08, 0.2, 36, 40), (0.9, 0.1, 0, 2), (1.2, 0.05, 40, 40)]
)
def test_what_noise_leaves_open_is_kept_for_the_page_faults_that_it_saves(
    gain: float, noise: float, least: int, most: int, fault: Any
) -> None:
    rows = []
    for seed in range(40):
        rows.append(searched(fault(Faulting(speed={"heap": gain}, noise=noise, seed=seed))).rows["heap"])
    kept = [row for row in rows if row.status == "kept"]
    assert least <= len(kept) <= most
    open_ones = [row for row in kept if row.gain_low is not None and row.gain_low <= 1]
    assert all(
        row.why == "looks faster than the steps before it, and saves 2,000 page faults in each" for row in open_ones
    )


def test_a_disturbance_before_it_makes_no_gain_larger_than_all_page_faults(fault: Any) -> None:
    class Disturbed(Faulting):
        """Its plain steps take twice as long for a while, before it is on."""

        def seconds(self, plan: dict[str, Any]) -> float:
            return super().seconds(plan) * (2.0 if not plan and not self.has_grown and self.step >= 24 else 1.0)

    row = searched(fault(Disturbed(speed={"heap": 1.2}, noise=0.02), 2e-6)).rows["heap"]
    assert row.status == "kept"
    assert row.gain == pytest.approx(1 / (1 - 2000 * 2e-6 / 0.02), rel=0.02)  # 4 of 20 ms
    assert row.after_ms == pytest.approx(20 / 1.2, rel=0.05)


def test_where_the_system_counts_no_faults_times_alone_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "fault_count", lambda: None)
    for gain, plan in ((1.2, {"heap": None}), (1.0, {})):
        assert searched(Faulting(speed={"heap": gain}, noise=0.02)).plan == plan


def test_for_another_batch_shape_it_is_tried_again(fault: Any) -> None:
    machine = fault(Faulting(speed={"heap": 1.2}, noise=0.02, lasts=False))
    machine.regime = lambda step: "a" if step < 500 else "b"
    state = searched(machine, until_settled=False, steps=3000, pace=FAST)
    assert any("searching again" in event.text for event in state.events)
    assert state.plan == {"heap": None}


@pytest.mark.parametrize("at", range(10, 420, 41))
@pytest.mark.parametrize("ends", ["other batches", "a trip"])
def test_what_happens_in_the_midst_of_its_trial(at: int, ends: str, fault: Any) -> None:
    machine = fault(Faulting(speed={"heap": 1.3, "good": 1.4}, noise=0.02, lasts=False))
    if ends == "a trip":
        machine.trips_at = {"heap": at}
    else:
        machine.regime = lambda step: "a" if step < at else "b"
    state = searched(machine, candidate("good"), until_settled=False, steps=2500, pace=FAST)
    assert ("heap" in state.plan) == (ends != "a trip")
    assert state.rows["heap"].status == ("undone" if ends == "a trip" else "kept")


# -- in a remembered plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gain", "plan"), [(1.2, {"heap", "good"}), (0.9, {"good"})])
def test_of_a_remembered_plan_it_is_tried_first_and_by_itself(gain: float, plan: set[str], fault: Any) -> None:
    machine = fault(Faulting(speed={"heap": gain, "good": 1.5}, noise=0.02, spoils=frozenset({"good"})))
    memory = FakeMemory(remembered(plan={"heap": None, "good": None}))
    state = searched(machine, candidate("good"), memory=memory)
    assert set(state.plan) == plan
    assert state.recollection.text.endswith("checked again: kept")
    assert [action.check for action in machine.actions if action.check] == [{"good": None}]
    assert memory.search is not None and set(memory.search.plan) == plan


@pytest.mark.parametrize("others", [{"good": None}, {}])
def test_what_can_t_be_shown_now_is_left_to_the_next_run(others: dict[str, Any], fault: Any) -> None:
    memory = FakeMemory(remembered(plan={"heap": None, **others}))
    machine = fault(Faulting(speed={"good": 1.5}, noise=0.02, has_grown=True))
    state = searched(machine, candidate("good"), memory=memory)
    assert state.plan == {"good": None}
    assert state.rows["heap"].status == "not tried"
    assert memory.search is not None and memory.search.plan == {"heap": None, "good": None}


# -- what a page fault is ----------------------------------------------------------------------------------------------


def test_memory_that_is_touched_for_the_first_time_faults() -> None:
    before = allocator.fault_count()
    with mmap.mmap(-1, 1024 * mmap.PAGESIZE) as memory:
        memory[:: mmap.PAGESIZE] = bytes(1024)
    after = allocator.fault_count()
    assert before is not None and after is not None and after > before

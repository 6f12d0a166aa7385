"""The choice is made on a loop that is only played: each setting has its times, and a clock that they move."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes import tuner as module
from accel.dataio.passes.rounds import Setting
from accel.dataio.passes.tuner import Busy, InlineCost, LookAhead, Tuner, candidates


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    return clock


Times = Callable[[Setting], tuple[float, float]]
"""Setting → seconds waited for a batch, and of the step itself."""


def play(tuner: Tuner, clock: Clock, times: Times, batches: int, noise: float = 0.05, seed: int = 0) -> None:
    chance = random.Random(seed)
    for number in range(batches):
        wait, step = (value * chance.uniform(1 - noise, 1 + noise) for value in times(tuner.current))
        clock.now += wait + step
        capacity = 1 if tuner.current.mode == "inline" else 2 * tuner.current.workers
        tuner.served(wait, math.nan if number % 50 == 49 else step, Busy(wait), capacity)


def overlapped(fetch: float, step: float, *, ipc: float = 0.0, gil: float = 0.0) -> Times:
    """A fetch that workers share, hidden behind the step as far as it goes."""

    def times(setting: Setting) -> tuple[float, float]:
        if setting.mode == "inline":
            return fetch, step
        if setting.mode == "threads":
            return max(0.0, fetch / min(setting.workers, 4) - step) + 1e-5, step + gil
        return max(0.0, fetch / min(setting.workers, 4) - step) + ipc, step

    return times


def test_a_fetch_that_costs_next_to_nothing_stays_inline_without_a_trial(clock: Clock) -> None:
    tuner = Tuner("fork")
    play(tuner, clock, overlapped(1e-5, 0.01), 20)

    assert tuner.decided
    assert tuner.current == Setting("inline")
    assert "making a batch takes 0.01 ms of" in tuner.reason


@pytest.mark.parametrize(
    ("times", "no_threads", "expected"),
    [
        (overlapped(0.001, 0.003), "", "threads(1)"),
        (overlapped(0.001, 0.003), "an open file", "fork(1)"),
        (overlapped(0.020, 0.003, gil=0.02), "", "fork(4)"),
        (overlapped(0.0001, 0.0, ipc=0.001, gil=0.001), "", "inline"),
    ],
    ids=["threads", "no_threads", "the_lock_of_the_interpreter", "sending_costs_more"],
)
def test_the_fastest_is_chosen(clock: Clock, times: Times, no_threads: str, expected: str) -> None:
    tuner = Tuner("fork", no_threads)
    play(tuner, clock, times, 3000)

    assert tuner.decided
    assert str(tuner.current) == expected
    assert ("not used: an open file" in tuner.explain()) == bool(no_threads)


def test_the_search_is_over_in_about_a_second(clock: Clock) -> None:
    tuner = Tuner("fork")
    while not tuner.decided:
        play(tuner, clock, overlapped(0.001, 0.003), 1)

    assert clock.now < 2.0


def test_a_setting_that_fails_is_left_and_reported(clock: Clock) -> None:
    tuner = Tuner("spawn", "no")
    for _ in range(3000):
        if tuner.current.mode == "spawn":
            tuner.failed(TypeError("cannot pickle 'lambda'\nat length"))
        else:
            play(tuner, clock, overlapped(0.01, 0.003), 1)

    assert tuner.current == Setting("inline")
    assert "spawn(1)         not used: TypeError: cannot pickle 'lambda'" in tuner.explain()


def test_what_was_chosen_may_fail_later(clock: Clock) -> None:
    tuner = Tuner("fork", "no")
    play(tuner, clock, overlapped(0.001, 0.003), 3000)
    assert tuner.current.mode == "fork"
    tuner.failed(OSError("no memory"))

    assert tuner.decided
    assert tuner.current.mode != "fork" or tuner.current.workers != 1


def test_a_loop_that_waits_longer_than_before_chooses_anew(clock: Clock) -> None:
    tuner = Tuner("fork")
    play(tuner, clock, overlapped(1e-5, 0.01), 100)
    assert str(tuner.current) == "inline"
    play(tuner, clock, overlapped(0.02, 0.01), 4000)

    assert tuner.changes == 2
    assert str(tuner.current) == "threads(2)"


def test_waiting_for_storage_is_worth_more_workers_than_there_are_cores() -> None:
    waiting = candidates(InlineCost(fetch_s=0.03, run_s=0.001, line_s=0.0, step_s=0.003), 2, "fork", True)
    busy = candidates(InlineCost(fetch_s=0.03, run_s=0.03, line_s=0.0, step_s=0.003), 2, "fork", True)

    assert max(setting.workers for setting in waiting) == 16
    assert Setting("fork", 12) in waiting
    assert [str(setting) for setting in busy] == ["threads(1)", "threads(2)", "fork(1)", "fork(2)"]
    assert candidates(InlineCost(1.0, 1.0, 0.0, 0.0), 1, "spawn", False) == [Setting("spawn", 1)]


def test_a_dataset_that_draws_is_not_read_by_threads(clock: Clock) -> None:
    tuner = Tuner("fork")
    tuner.forbid_threads("fetching a sample draws random numbers")
    play(tuner, clock, overlapped(0.02, 0.01), 3000)

    assert tuner.current.mode == "fork"
    assert "threads          not used: fetching a sample draws random numbers" in tuner.explain()


def test_the_look_ahead_follows_the_wait_of_the_chosen_setting(clock: Clock) -> None:
    tuner = Tuner("fork", "no")

    def bursts(setting: Setting) -> tuple[float, float]:
        if setting.mode == "inline":
            return 0.002, 0.003
        return 0.002 / tuner.ahead.batches, 0.003

    play(tuner, clock, bursts, 8000)
    assert tuner.current.mode == "fork"
    assert tuner.ahead.batches > 2
    assert f"each {tuner.ahead.batches} batches ahead" in tuner.explain()


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (None, 4), (64, 4)])
def test_no_more_workers_than_allowed_are_tried(clock: Clock, limit: int | None, most: int) -> None:
    tuner = Tuner("fork", limit=limit)
    play(tuner, clock, overlapped(0.020, 0.003), 3000)

    assert tuner.decided
    assert max(each.setting.workers for each in tuner.tried) == most
    assert tuner.current.workers == most


def test_where_only_processes_will_do_nothing_else_is_tried(clock: Clock) -> None:
    tuner = Tuner("fork", processes_only="a worker_init_fn")
    assert tuner.current == Setting("fork", 1)
    play(tuner, clock, overlapped(0.020, 0.003), 3000)

    assert str(tuner.current) == "fork(4)"
    assert {each.setting.mode for each in tuner.tried if each.step_s} == {"fork"}
    assert "inline           not used: a worker_init_fn" in tuner.explain()
    assert "threads          not used: a worker_init_fn" in tuner.explain()


def test_a_choice_without_anything_left_says_so() -> None:
    tuner = Tuner("spawn", processes_only="a worker_init_fn", limit=2)
    tuner.failed(TypeError("cannot pickle"))
    assert not tuner.exhausted
    tuner.failed(TypeError("cannot pickle"))

    assert tuner.exhausted
    assert tuner.current.mode == "spawn"


# The look-ahead follows the loop's wait, and is put back where it doesn't help


def windows(ahead: LookAhead, wait: Callable[[int], float], workers: int = 2, count: int = 12) -> list[int]:
    """Return the batches ahead after each of `count` windows in a loop that waits as `wait` says."""
    seen = []
    for _ in range(count):
        ahead.saw(wait(ahead.batches), 0.003, workers)
        seen.append(ahead.batches)
    return seen


def test_no_wait_no_change() -> None:
    assert windows(LookAhead(2), lambda _: 0.00005) == [2] * 12


def test_bursts_are_bridged() -> None:
    assert windows(LookAhead(2), lambda batches: 0.002 / batches)[-1] == 32
    assert windows(LookAhead(2), lambda batches: 0.0 if batches > 4 else 0.002) == [8] * 12


def test_workers_that_are_too_slow_are_not_helped_by_a_longer_queue() -> None:
    assert windows(LookAhead(2), lambda _: 0.002) == [8] + [2] * 11


def test_a_second_step_that_brings_nothing_is_taken_back_alone() -> None:
    assert windows(LookAhead(2), lambda batches: 0.002 if batches < 8 else 0.001) == [8, 32] + [8] * 10


@pytest.mark.parametrize(("workers", "most"), [(1, 64), (4, 16), (16, 4), (40, 2)])
def test_the_queue_has_a_bound(workers: int, most: int) -> None:
    assert windows(LookAhead(2), lambda batches: 1 / batches, workers)[-1] == most


def test_a_requested_look_ahead_stays() -> None:
    assert windows(LookAhead(3, fixed=True), lambda batches: 1 / batches) == [3] * 12


def test_it_begins_again_with_another_way_to_make_batches() -> None:
    ahead = LookAhead(2)
    windows(ahead, lambda _: 0.002)
    ahead.reset()
    assert windows(ahead, lambda batches: 0.002 / batches)[-1] == 32


class Bursts(Dataset[Tensor]):
    """One sample in 64 takes 30 ms."""

    thread_safe = True

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Tensor:
        if index % 64 == 0:
            time.sleep(0.03)
        return torch.tensor(index)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_running_loop_gets_a_longer_queue_and_the_same_batches(prefetch: int | None) -> None:
    wrapped = DataLoader(Bursts(), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    with ContinuousLoader(wrapped, mode="auto", prefetch_factor=prefetch) as loader:
        seen, told = [], []
        began = ends = time.perf_counter()
        # Settings that bursts make nearly equal are tried for up to 20 s; the look-ahead follows within 5.
        while not told or time.perf_counter() < ends:
            assert time.perf_counter() - began < 100, loader.explain()
            seen.append([])
            for batch in loader:
                seen[-1].append(batch)
                time.sleep(0.003)
            line = loader.explain().splitlines()[0]
            if not line.startswith("trying"):  # now and then the choice is made anew
                ends = ends if told else time.perf_counter() + 5
                told.append(line)
    plain = DataLoader(Bursts(), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    for epoch in seen[:3]:
        assert [b.tolist() for b in epoch] == [b.tolist() for b in plain]
    assert all("each 2 batches ahead" in line for line in told) == (prefetch == 2), told

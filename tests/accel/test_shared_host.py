"""Fewer threads beside other processes: they are used while these are there, and no longer."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.run import Run, host_load
from accel.run.host_load import HostLoad, HostMeter
from accel.search.actions import Action, Result
from accel.search.state import Candidate, Pace
from accel.search.verdicts import remember
from accel.strategies.intraop_threads import OtherProcesses
from tests.accel.memory import FakeMemory
from tests.accel.simulation import PLAIN_S, Machine, candidate, simulate
from tests.sampling import examples

QUIET, BETWEEN, SHARED = (HostLoad(foreign_cores=cores, cores=2, threads=2) for cores in (0.05, 0.4, 1.0))
COSTS = {(False, False): 1.0, (False, True): 1.6, (True, False): 4.0, (True, True): 2.0}
"""(Host is shared, one thread) → times the step on a quiet host with all threads."""
LOOK_STEPS = int(Pace().look_s / PLAIN_S)


class Host(Machine):
    """Other processes come and go at some steps; one thread is faster beside them, and slower without."""

    def __init__(self, changes: list[int], **options: Any) -> None:
        super().__init__(load=lambda step: SHARED if self.is_shared(step) else QUIET, **options)
        self.changes, self.spent_s, self.plain_s = changes, 0.0, 0.0

    def is_shared(self, step: int) -> bool:
        return sum(change <= step for change in self.changes) % 2 == 1

    def seconds(self, plan: dict[str, Any]) -> float:
        shared = self.is_shared(self.step)
        factor = COSTS[shared, "threads" in plan]
        seconds = super().seconds({name: None for name in plan if name != "threads"}) * factor
        self.spent_s += seconds
        self.plain_s += seconds / factor * COSTS[shared, False]
        return seconds


def threads(**options: Any) -> Candidate:
    return candidate("threads", **{"settings": (1,), "depends_on_host": True, "watch": OtherProcesses(), **options})


def plan_at(machine: Machine, step: int) -> dict[str, Any]:
    """Return the plan of the action that a step belongs to."""
    end = 0
    for action in machine.actions:
        end += action.rest + action.settle + action.steps
        if end >= step:
            return action.plan
    raise AssertionError("the run was shorter")


def test_beside_other_processes_it_is_tried_before_all_else_whatever_the_budget() -> None:
    machine, said = Host([0], noise=0.1, speed={"good": 1.5}), list[str]()
    offered = [candidate("good"), threads()]
    controller = simulate(offered, machine, budget="1%", steps=200, say=said.append, startup_s=lambda: 3.0)

    tried = [name for action in machine.actions for name in {**action.plan, **(action.check or {})}]
    assert tried[0] == "threads"
    assert "threads" in controller.plan
    assert machine.spent_s < 0.7 * machine.plain_s
    assert controller.rows["threads"].why.endswith("beside other processes that keep 1.0 of 2 cores busy")
    (line,) = [line for line in said if "until they leave" in line]
    assert line == "other processes keep the machine busy: threads 1 until they leave"


@pytest.mark.parametrize("during_search", [False, True])
def test_it_goes_soon_after_they_have_left(during_search: bool) -> None:
    others = [candidate(f"other{number}") for number in range(8)]
    machine = Host([0, 300 if during_search else 5000], noise=0.02)
    left = machine.changes[1]
    controller = simulate([threads(), *others], machine, steps=left + 4000, until_settled=False)

    assert "threads" in plan_at(machine, left)
    assert "threads" not in plan_at(machine, left + LOOK_STEPS + 150)
    assert controller.plan == {}
    assert controller.rows["threads"].why == "slower"  # as it was found to be in its turn, too
    assert "threads undone" in " ".join(event.text for event in controller.events)


def test_it_comes_soon_after_they_have_come() -> None:
    machine = Host([3000])
    controller = simulate([threads(), candidate("good")], machine, steps=6000, until_settled=False)
    assert controller.plan == {"threads": 1}
    assert plan_at(machine, 3000) == {}
    assert plan_at(machine, 3000 + 3 * LOOK_STEPS) == {"threads": 1}


def test_it_stays_where_it_pays_without_them_too() -> None:
    machine = Host([0, 3000])
    machine.seconds = lambda plan: PLAIN_S / (2.0 if plan else 1.0)  # type: ignore[method-assign]
    controller = simulate([threads()], machine, steps=8000, until_settled=False)
    assert controller.plan == {"threads": 1}
    without = [action for action in machine.actions if not action.plan and action.steps]
    assert sum(action.steps for action in without) < 300


def test_what_comes_and_goes_is_believed_less_each_time() -> None:
    machine = Host(list(range(2000, 100_000, 2000)), noise=0.02)
    simulate([threads()], machine, steps=100_000, until_settled=False)
    starts = [bool(a.plan) and not b.plan for b, a in itertools.pairwise(machine.actions) if a.rest or b.rest]
    assert machine.spent_s < 1.02 * machine.plain_s
    assert sum(starts) < 10


@settings(max_examples=examples(24), deadline=None)
@given(
    spans=st.lists(st.integers(50, 6000), min_size=1, max_size=12),
    noise=st.sampled_from([0.0, 0.05, 0.2]),
    seed=st.integers(0, 9),
)
def test_whatever_others_do_the_run_hardly_becomes_longer(spans: list[int], noise: float, seed: int) -> None:
    machine = Host(list(itertools.accumulate(spans)), noise=noise, seed=seed)
    steps = sum(spans) + 3000
    simulate([threads(), candidate("none")], machine, steps=steps, until_settled=False, budget="3%")
    # Each time they leave they may be noticed a look late, and a trial takes some steps.
    late_s = len(spans) * (Pace().look_s + 100 * PLAIN_S)
    assert machine.spent_s < 1.01 * machine.plain_s + 0.4 * late_s


def test_its_trial_begins_with_it() -> None:
    machine = Host([0])
    simulate([threads()], machine, steps=100)
    (compared,) = [number for number, action in enumerate(machine.actions) if action.check]
    first, second, third = [action.plan for action in machine.actions[compared + 1 : compared + 4]]
    assert (first, second, third) == ({"threads": 1}, {}, {})


def test_one_that_gives_nothing_beside_them_has_its_turn_and_is_asked_ever_more_rarely() -> None:
    machine = Host([0])
    machine.seconds = lambda plan: PLAIN_S  # type: ignore[method-assign]
    controller = simulate([threads(), candidate("none")], machine, steps=40_000, until_settled=False)
    assert controller.rows["threads"].status == "undone"
    assert "beside" not in controller.rows["threads"].why
    assert controller.plan == {}
    assert sum("threads" in (action.check or {}) for action in machine.actions) < 10


def test_a_verdict_of_a_quiet_host_stands_again_after_one_that_was_not_kept_beside_others() -> None:
    machine = Host([3000])
    machine.seconds = lambda plan: PLAIN_S * (1.6 if plan else 1.0)  # type: ignore[method-assign]
    controller = simulate([threads(), candidate("none")], machine, steps=8000, until_settled=False)
    row = controller.rows["threads"]
    assert (row.status, row.why) == ("undone", "slower")
    assert row.steps > 20  # with those of the trials beside them


def test_what_was_kept_beside_them_has_its_turn_once_they_have_left() -> None:
    machine = Host([0, 2000])
    offered = threads(settings=(1, 2))
    seconds = machine.seconds

    def two_are_better_alone(plan: dict[str, Any]) -> float:
        alone = plan.get("threads") == 2 and not machine.is_shared(machine.step)
        return seconds(plan) / (2.0 if alone else 1.0)

    machine.seconds = two_are_better_alone  # type: ignore[method-assign]
    controller = simulate([offered], machine, steps=6000, until_settled=False)
    assert controller.plan == {"threads": 2}
    assert "beside" not in controller.rows["threads"].why
    remember(controller, ended=True)


def test_what_a_load_between_both_makes_slower_goes_at_a_recheck() -> None:
    machine = Host([0, 2000])
    machine.load = lambda step: SHARED if step < 2000 else BETWEEN
    controller = simulate([threads()], machine, steps=20_000, until_settled=False)
    assert controller.plan == {}


def test_it_goes_though_the_model_is_compiled_once_more_for_that() -> None:
    machine = Host([0, 4000], speed={"compiled": 1.5})
    compiled = candidate("compiled", is_made_for_calls=True, cost_s=0.1)
    controller = simulate([threads(), compiled], machine, steps=9000, until_settled=False)
    assert controller.plan == {"compiled": None}


@pytest.mark.parametrize("budget", [35.0, 100.0])
def test_what_compiles_is_not_compiled_once_more_for_others_beyond_the_budget(budget: float) -> None:
    machine = Host([4000], speed={"compiled": 1.5})
    answer = machine.answer

    def compiling(action: Action) -> Result:
        result = answer(action)
        result.aside_s += 20.0 if "compiled" in (action.check or {}) else 0.0
        return result

    machine.answer = compiling  # type: ignore[method-assign]
    compiled = candidate("compiled", is_made_for_calls=True, cost_s=20.0)
    controller = simulate([threads(), compiled], machine, steps=6000, until_settled=False, budget=budget)
    assert controller.plan == {"compiled": None} if budget == 35.0 else {"compiled": None, "threads": 1}


def test_an_earlier_verdict_was_of_another_load() -> None:
    memory = FakeMemory()
    simulate([threads(), candidate("good")], Host([], speed={"good": 1.5}), memory=memory)
    assert memory.search is not None and "threads" in memory.search.lost

    machine = Host([0], speed={"good": 1.5})
    controller = simulate([threads(), candidate("good")], machine, memory=memory, steps=600)
    assert set(controller.plan) == {"threads", "good"}


def test_what_is_kept_beside_them_is_not_remembered() -> None:
    memory = FakeMemory()
    machine = Host([0], speed={"good": 1.5})
    controller = simulate([threads(), candidate("good")], machine, memory=memory)
    remember(controller, ended=True)
    assert set(controller.plan) == {"threads", "good"}
    assert memory.search is not None
    assert memory.search.plan == {"good": None}
    assert "threads" not in memory.search.lost
    assert memory.search.speedup is None


@pytest.mark.parametrize("ruled_out", [False, True])
def test_nobody_looks_at_the_host_where_nothing_depends_on_it(ruled_out: bool) -> None:
    offered = [threads(ruled_out=("not allowed", "it is reordered"))] if ruled_out else []
    machine = Host([0])
    simulate([candidate("good"), *offered], machine, steps=3000, until_settled=False)
    assert not any(action.host for action in machine.actions)


@pytest.mark.parametrize(
    ("foreign_cores", "cores", "threads_used", "shared", "quiet"),
    [
        (0.0, 2, 2, False, True),
        (0.4, 2, 2, False, False),
        (0.7, 2, 2, True, False),
        (1.0, 2, 1, False, False),  # it takes a core that nobody wanted
        (6.0, 64, 64, False, True),
        (30.0, 64, 64, True, False),
        (30.0, 64, 16, False, False),
        (0.9, 1, 1, True, False),
    ],
)
def test_a_host_is_shared_where_threads_must_wait(
    foreign_cores: float, cores: int, threads_used: int, shared: bool, quiet: bool
) -> None:
    load = HostLoad(foreign_cores=foreign_cores, cores=cores, threads=threads_used)
    assert (load.is_shared, load.is_quiet) == (shared, quiet)


def test_they_have_come_once_until_they_leave() -> None:
    watch = OtherProcesses()
    assert news(watch, QUIET, BETWEEN, SHARED, SHARED, BETWEEN, SHARED) == [SHARED]
    assert news(watch, QUIET, None, SHARED) == [SHARED]
    watch.is_used = True
    assert news(watch, SHARED, BETWEEN, QUIET) == [QUIET]
    watch.left_open()
    assert news(watch, QUIET, BETWEEN, QUIET, QUIET) == [QUIET]
    watch.is_used = False
    watch.not_kept()
    assert news(watch, QUIET, SHARED, QUIET, SHARED) == []
    assert news(watch, SHARED) == [SHARED]
    assert news(watch, QUIET, SHARED, SHARED) == [SHARED]


def news(watch: OtherProcesses, *looks: HostLoad | None) -> list[HostLoad]:
    """Let the watch see some looks, and return what it has told."""
    told = []
    for look in looks:
        watch.see(look)
        told.append(watch.news)
        watch.news = None
    return [each for each in told if each is not None]


def test_a_trial_is_left_for_other_processes_that_come_and_taken_up_again() -> None:
    machine = Host([150], noise=0.3, speed={"good": 1.5})
    controller = simulate([candidate("good"), candidate("none"), threads()], machine, steps=20_000)
    first = next(n for n, action in enumerate(machine.actions) if "threads" in (action.check or action.plan))
    before = sum(action.rest + action.settle + action.steps for action in machine.actions[:first])
    assert 150 <= before < 200 + LOOK_STEPS
    assert controller.plan == {"threads": 1, "good": None}
    assert controller.rows["none"].status == "undone"


def test_the_busiest_host_of_all_ranks_counts() -> None:
    assert Result.merged([Result(load=QUIET), Result(load=SHARED), Result(load=BETWEEN)]).load == SHARED
    assert Result.merged([Result(load=QUIET), Result()]).load is None
    assert Result.merged([Result()]).load is None


class Meter:
    """A crowd meter that sees what a test says, on a clock that the test sets."""

    seen: ClassVar[list[float | None]] = []
    now_s: ClassVar[float] = 0.0

    def __init__(self, *, launched: bool = False) -> None:
        self.launched = launched

    def cores(self) -> float | None:
        Meter.now_s += 0.25
        return Meter.seen.pop(0)


@pytest.fixture
def host_of() -> Iterator[Callable[..., HostMeter]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_load, "CrowdMeter", Meter)
        patch.setattr(host_load.time, "monotonic", lambda: Meter.now_s)
        patch.setenv("LOCAL_WORLD_SIZE", "3")
        unused = cast(Any, None)
        yield lambda **run: HostMeter(Run(nn.Identity(), [], [], unused, unused, **run))


def test_a_look_is_of_a_second_or_more(host_of: Callable[..., HostMeter]) -> None:
    Meter.seen, Meter.now_s = [1.25, None, 1.5], 100.0
    host = host_of(world_size=1, cores=2, threads=2)
    host.begin(wanted=False)
    Meter.now_s += 5
    assert host.look(wanted=True) is None  # nobody has begun
    host.begin(wanted=True)
    assert host.look(wanted=True) is None
    Meter.now_s += 1
    assert host.look(wanted=False) is None
    assert host.look(wanted=True) == HostLoad(foreign_cores=1.25, cores=2, threads=2, took_s=0.25)
    assert host._run.observed.free_cores == 1
    assert host.look(wanted=True) is None
    Meter.now_s += 1
    assert host.look(wanted=True) is None  # it could not be told
    Meter.now_s += 1
    assert host.look(wanted=True) is not None
    assert not host._meter.launched  # type: ignore[union-attr]


def test_the_threads_of_all_ranks_on_the_host_count(host_of: Callable[..., HostMeter]) -> None:
    Meter.seen = [1.25]
    host = host_of(world_size=6, cores=8, threads=2)
    host.begin(wanted=True)
    Meter.now_s += 2
    assert host.look(wanted=True) == HostLoad(foreign_cores=1.25, cores=8, threads=6, took_s=0.25)
    assert host._run.observed.free_cores == 2
    assert host._meter.launched  # type: ignore[union-attr]


def test_a_search_on_a_real_loop_looks_at_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_load, "CrowdMeter", lambda **options: SimpleNamespace(cores=lambda: 8.0))
    monkeypatch.setattr(host_load, "SHORTEST_LOOK_S", 0.0)
    torch.set_num_threads(2)
    seen = list[HostLoad | None]()
    see = OtherProcesses.see
    monkeypatch.setattr(OtherProcesses, "see", lambda self, load: (seen.append(load), see(self, load))[1])
    model = nn.Linear(4, 2)
    data = DataLoader(TensorDataset(torch.randn(256, 4), torch.randint(0, 2, (256,))), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, data, optimizer = accel.optimize(model, data, optimizer, cache=False)
        for _ in range(3):
            for x, y in data:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    (load,) = [each for each in seen if each is not None]  # the next would be 5 s later
    assert load.foreign_cores == 8.0
    assert load.threads == 2

"""What goes wrong in a worker process, or with it, must come out as a clear error or not at all; nothing may hang."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.dataio.engine import worker_handle
from accel.dataio.engine.engine import BatchJob, WorkerDied, as_raised
from accel.dataio.loader import ContinuousLoader
from tests.dataio.engines import (
    Squares,
    assert_made,
    assert_nothing_gained,
    engine_of,
    expected,
    gained,
    gone,
    held,
    lists,
    loader_of,
    pids,
    ready,
    run,
)
from tests.dataio.faults import ENDS, ERRORS, GARBAGE, Once, die, only_in, throw
from tests.dataio.numbers import Numbers, indices


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are at work or stopped when they are closed end sooner."""
    monkeypatch.setattr(worker_handle, "_ENDS_S", 0.1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ERRORS)
def test_what_the_dataset_raises_comes_out(kind: str) -> None:
    error, wanted, text = ERRORS[kind]
    with engine_of(Squares(at=13, act=functools.partial(throw, error)), workers=2) as engine:
        made = run(engine)
        assert not engine.deaths
    caught = made.pop(3)

    assert type(caught) is wanted
    assert text in str(caught)
    cause = str(caught.__cause__)
    assert "worker process" in cause
    assert "Traceback" in cause
    assert "in __getitem__" in cause
    assert "sample" in cause
    if kind != "slots":
        assert "sample 13" in cause
    assert_made(made, expected(indices=[each for each in lists() if 13 not in each]))


class Unreadable:
    """Can be sent but not received."""

    def __reduce__(self) -> Any:
        return (only_in, (os.getpid(),))


def test_a_batch_that_can_not_be_received() -> None:
    with engine_of(loader=DataLoader(Squares(), collate_fn=lambda s: Unreadable() if len(s) == 1 else s)) as engine:
        made = run(engine, [[1], [2, 3]])

    assert type(made[0]) is LookupError
    assert len(made[1]) == 2


@pytest.mark.parametrize("error", [ValueError("no licence"), SystemExit(1)], ids=["error", "exit"])
def test_a_worker_init_fn_that_raises(error: BaseException) -> None:
    loader = loader_of(Squares(), num_workers=1, worker_init_fn=lambda _: throw(error))
    with engine_of(loader=loader) as engine:
        made = run(engine, lists()[:3])

    assert len(made) == 3
    for caught in made:
        assert "worker_init_fn" in str(caught.__cause__)
        assert isinstance(caught, ValueError | RuntimeError)


def test_a_worker_init_fn_that_ends_the_process() -> None:
    loader = loader_of(Squares(), num_workers=1, worker_init_fn=lambda _: os._exit(7))
    with engine_of(loader=loader) as engine:
        caught = run(engine, lists()[:2])

    for each in caught:
        assert type(each) is WorkerDied
        assert "exit code 7 at its start" in str(each)
        assert "no worker process can be started" in str(each)


def test_starting_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of processes: the jobs are kept, and made when it can start again."""
    fork, calls = os.fork, []

    def refuse() -> int:
        calls.append(1)
        if len(calls) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", refuse)
    with engine_of() as engine:
        with pytest.raises(BlockingIOError):
            engine.submit(BatchJob([1], None))
        assert not engine.pool.handles
        assert_made(run(engine))


# Processes that end


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_ends_once_is_replaced(way: str, workers: int, tmp_path: Any) -> None:
    with engine_of(Squares(at=13, act=Once(tmp_path / "once", ENDS[way])), workers) as engine:
        assert_made(run(engine))
        (told,) = engine.deaths

    assert "while fetching samples [12, 13, 14, 15]" in told
    assert {"killed": "SIGKILL", "segfault": "SIGSEGV", "exit": "exit code 3"}[way] in told


@pytest.mark.parametrize("way", ENDS)
def test_a_batch_that_ends_two_workers_is_given_up(way: str) -> None:
    with engine_of(Squares(at=13, act=ENDS[way]), workers=2) as engine:
        made = run(engine)
    caught = made.pop(3)

    assert type(caught) is WorkerDied
    assert "so did the worker before it" in str(caught)
    assert "samples [12, 13, 14, 15]" in str(caught)
    assert_made(made, expected(indices=[each for each in lists() if 13 not in each]))


def test_all_workers_are_killed_again_and_again() -> None:
    with engine_of(workers=3) as engine:
        for _ in range(4):
            ready(engine)
            for pid in pids(engine):
                os.kill(pid, signal.SIGKILL)
            assert_made(run(engine))
        assert len(engine.deaths) == 12


def test_killed_between_batches_and_closed() -> None:
    before = held()
    with engine_of(workers=2) as engine:
        ready(engine)
        for pid in pids(engine):
            os.kill(pid, signal.SIGKILL)
            assert gone(pid)
        engine.close()
    assert_nothing_gained(before)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment(seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    batches = [[n % 40, (n * 3) % 40] for n in range(150)]
    with engine_of(workers=2) as engine:
        made, submitted, kills = [], 0, 0
        for number in range(len(batches)):
            while submitted < len(batches) and submitted - number < engine.capacity:
                engine.submit(BatchJob(batches[submitted], None))
                submitted += 1
            if number % 25 == 24:  # seldom enough that no batch meets two
                victim = engine.pool.handles[int(torch.randint(2, (), generator=chance))]
                os.kill(victim.process.pid, signal.SIGKILL)
                kills += 1
            made.append(engine.collect())
        assert_made(made, expected(indices=batches))
        assert kills


def test_a_dead_worker_lets_go_of_its_changes_in_order() -> None:
    """A job of before a change is made again under the state of before, even though the change has been sent."""
    data = Squares()
    with engine_of(data, workers=1, prefetch=8) as engine:
        ready(engine)
        os.kill(pids(engine)[0], signal.SIGSTOP)
        engine.submit(BatchJob([1], None))
        engine.update({("offset",): 100})
        engine.submit(BatchJob([1], None))
        engine.update({("offset",): 200})
        engine.submit(BatchJob([1], None))
        os.kill(pids(engine)[0], signal.SIGKILL)
        made = [int(engine.collect()[0, 1]) for _ in range(3)]

    assert made == [1, 101, 201]


def _closes_everything() -> None:
    os.closerange(3, 100)


def test_a_dataset_that_closes_the_connection(tmp_path: Any) -> None:
    with engine_of(Squares(at=13, act=Once(tmp_path / "once", _closes_everything)), workers=1) as engine:
        first = pids(engine)[0]
        assert_made(run(engine))
        assert gone(first)


# Waiting


def test_the_loaders_timeout_is_kept() -> None:
    with engine_of(loader=loader_of(Squares(at=13, act=lambda: time.sleep(60)), num_workers=1, timeout=0.3)) as engine:
        ready(engine)
        made = run(engine)
    caught = made[3]

    assert isinstance(caught, RuntimeError)
    assert "has been fetching samples [12, 13, 14, 15]" in str(caught)
    assert "timeout=0.3" in str(caught)
    # What its worker had to make after it is late as well; nothing takes the place of another.
    for batch, wanted in zip(made, expected(), strict=True):
        assert isinstance(batch, RuntimeError) or torch.equal(batch, wanted)


def test_a_stopped_worker_times_out_and_goes_on() -> None:
    with engine_of(loader=loader_of(Squares(), num_workers=1, timeout=1), workers=1) as engine:
        ready(engine)
        (pid,) = pids(engine)
        os.kill(pid, signal.SIGSTOP)
        (caught,) = run(engine, [[1]])
        assert "has been fetching samples [1]" in str(caught)
        os.kill(pid, signal.SIGCONT)
        assert_made(run(engine))


def test_closing_while_fetching() -> None:
    with engine_of(Squares(at=1, act=lambda: time.sleep(60)), workers=2) as engine:
        for indices in ([1], [1], [2]):
            engine.submit(BatchJob(indices, None))
        workers = pids(engine)
        engine.close()
        assert all(gone(pid) for pid in workers)
        assert_made(run(engine, [[3], [4]]), expected(indices=[[3], [4]]))


def test_errors_from_elsewhere_keep_their_cause() -> None:
    error = as_raised(pickle.dumps(KeyError(3)), "Traceback: there", "worker process 0")

    assert type(error) is KeyError
    assert "in worker process 0:\n\nTraceback: there" in str(error.__cause__)


# What goes wrong comes through a continuous loader, which goes on after it; and nothing piles up


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise LookupError("a bad picture")
        return super().__getitem__(index)


def test_what_the_dataset_raises_comes_out_and_the_loop_may_go_on(engine: dict[str, Any]) -> None:
    with ContinuousLoader(DataLoader(Broken(), 4), **engine) as loader:
        for _ in range(2):
            seen = []
            batches = iter(loader)
            for number in range(13):
                if number == 3:
                    with pytest.raises(LookupError, match="a bad picture") as caught:
                        next(batches)
                    told = str(caught.value.__cause__) + "".join(getattr(caught.value, "__notes__", ()))
                    assert "while fetching sample 13" in told
                else:
                    seen += indices(next(batches))
            assert next(batches, None) is None
            assert seen == [*range(12), *range(16, 50)]


@pytest.mark.parametrize("kind", GARBAGE)
def test_batches_that_can_not_be_sent(engine: dict[str, Any], kind: str) -> None:
    with ContinuousLoader(DataLoader(Numbers(), 4, collate_fn=GARBAGE[kind]), **engine) as loader:
        batches = iter(loader)
        if engine["mode"] == "fork":
            with pytest.raises(TypeError, match="can't be sent to another process"):
                next(batches)
        else:
            next(batches)


def test_a_batch_that_kills_its_workers_is_told_and_the_loop_may_go_on() -> None:
    with ContinuousLoader(DataLoader(Squares(at=13, act=die), 4), mode="fork", num_workers=1) as loader:
        batches = iter(loader)
        seen = [indices(next(batches)) for _ in range(3)]
        with pytest.raises(WorkerDied, match=r"SIGKILL while fetching samples \[12, 13, 14, 15\]"):
            next(batches)
        seen += [indices(batch) for batch in batches]

    assert sum(seen, []) == [*range(12), *range(16, 40)]  # noqa: RUF017


@pytest.mark.parametrize("mode", ["threads", "fork"])
def test_nothing_is_left_of_many_epochs_that_were_left_early(mode: Any) -> None:
    before = held()
    with ContinuousLoader(DataLoader(Numbers(), 4, shuffle=True), mode=mode, num_workers=2) as loader:
        counts = []
        for epoch in range(20):
            for number, _ in enumerate(loader):
                if number == epoch % 15:
                    break
            if epoch % 15 == 4:
                counts.append(gained(before))
    assert all(count["threads"] + count["children"] == 2 for count in counts), counts
    assert counts[-1]["files"] <= counts[0]["files"] + 7  # of slots
    assert counts[-1]["slots"] <= 2 * 7
    del loader, _

    assert_nothing_gained(before, within=30)  # threads that were told to end do so


def test_killed_at_the_start() -> None:
    with engine_of(workers=2) as engine:
        for pid in pids(engine):
            os.kill(pid, signal.SIGKILL)
        assert_made(run(engine))


def test_a_stopped_worker_can_be_closed() -> None:
    with engine_of(workers=1) as engine:
        ready(engine)
        (pid,) = pids(engine)
        os.kill(pid, signal.SIGSTOP)
        engine.close()
        assert gone(pid)

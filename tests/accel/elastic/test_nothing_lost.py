"""Random schedules of SIGKILL, SIGTERM and other numbers of ranks, with changing batches: each sample comes once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.accel.elastic.scheduled_job import End, Run
from tests.accel.elastic.schedules import Schedule, Training, check_samples
from tests.conftest import Once

KILL, TERM = signal.SIGKILL, signal.SIGTERM

SEEDS = range(100)


def one(rank: int, step: int, moment: str | int, number: int) -> tuple[tuple[int, End], ...]:
    return ((rank, End(step, moment, number)),)


CHOSEN = {
    "one rank, killed and told": (
        Run(1, 4, ends=one(0, 12, "backward", KILL)),
        Run(1, 4, ends=one(0, 9, "stepped", TERM)),
        Run(1, 4),
    ),
    "rank 0 killed while it saves": (
        Run(3, 4, ends=one(0, 6, 12, KILL)),
        Run(3, 4, ends=one(1, 5, "epoch", TERM)),
        Run(3, 4),
    ),
    "the batch grows and ranks join and leave": (
        Run(2, 4, 48, tuple((rank, End(12 + rank, "forward", TERM)) for rank in range(2))),
        Run(3, 2, 24, one(2, 20, "forward", KILL)),
        Run(1, 8, 48),
    ),
    "fewer samples left than ranks": (Run(1, 2, ends=one(0, 100, "forward", TERM)), Run(3, 4)),
    "told in a save, after an epoch, after the last batch": (
        Run(1, 8, ends=one(0, 3, 9, TERM)),
        Run(1, 8, ends=one(0, 3, "epoch", TERM)),
        Run(1, 8, ends=one(0, 3, "end", TERM)),
    ),
}


def uninterrupted(run: Run, folder: Path) -> str:
    """Return how a training ends that nobody stops."""
    training = Training(folder)
    end = training.follow(Schedule((run,)))
    check_samples(training.runs)
    return end


def check(schedule: Schedule, folder: Path, once: Once) -> None:
    training = Training(folder / "stopped")
    end = training.follow(schedule)
    check_samples(training.runs)
    if schedule.is_constant:
        run = schedule.runs[-1]
        assert end == once(f"uninterrupted-{run.world}-{run.batch}", lambda: uninterrupted(run, folder / "whole"))


@pytest.mark.parametrize("name", CHOSEN)
def test_nothing_is_lost(name: str, tmp_path: Path, once: Once) -> None:
    check(Schedule(CHOSEN[name]), tmp_path, once)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_by_a_random_schedule(seed: int, tmp_path: Path, once: Once) -> None:
    check(Schedule.drawn(seed), tmp_path, once)


STOPPED = Schedule((Run(1, 4, ends=one(0, 10, "backward", TERM)), Run(1, 4)))


@pytest.mark.parametrize(
    "fault", [pytest.param("one batch is taken twice", marks=pytest.mark.slow), "one batch is left out"]
)
def test_samples_that_are_lost_or_doubled_would_be_found(fault: str, tmp_path: Path) -> None:
    training = Training(tmp_path, fault)
    training.follow(STOPPED)
    with pytest.raises(AssertionError, match="epoch 0 has samples more or less often"):
        check_samples(training.runs)


@pytest.mark.parametrize(
    "fault",
    [pytest.param("random states are not restored", marks=pytest.mark.slow), "the optimizer is not restored"],
)
def test_weights_that_differ_would_be_found(fault: str, tmp_path: Path, once: Once) -> None:
    training = Training(tmp_path / "stopped", fault)
    end = training.follow(STOPPED)
    check_samples(training.runs)
    assert end != once("uninterrupted-1-4", lambda: uninterrupted(Run(1, 4), tmp_path / "whole"))


def test_a_run_that_began_elsewhere_than_it_was_saved_would_be_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks began at steps \{0\} of a training that was saved at 11"):
        Training(tmp_path, "nothing is restored").follow(STOPPED)

"""A training on this machine is resized by one call: it goes on from where it was, and loses no sample."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel.elastic import local_job
from accel.elastic.batch_size.report import PROFILE
from accel.elastic.local_job import LocalJob
from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.goodput import BatchLimits
from accel.goodput.job import JobProfile
from accel.goodput.throughput import ThroughputModel
from tests.accel.elastic.schedules import check_samples, lines

STAND_IN = """
import pathlib, signal, subprocess, sys, time
folder, how = pathlib.Path(sys.argv[2]), sys.argv[3]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
with (folder / "starts").open("a") as starts:
    print(sys.argv[1], child.pid, file=starts)
def end(*_):
    child.kill()
    sys.exit(143)
signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "deaf" else end)
while not (folder / "end").exists():
    time.sleep(0.01)
child.kill()
"""


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class StandIn:
    """A job whose launcher is a script: it writes down each of its starts, and ends when it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._script = folder / "launcher.py"
        self._script.write_text(STAND_IN)
        self.job = self.made("hears")

    def made(self, how: str, save_s: float = 30.0) -> LocalJob:
        self.job = LocalJob(
            [str(self.folder), how], self.folder, save_s=save_s, launcher=[sys.executable, str(self._script)]
        )
        return self.job

    def starts(self) -> list[list[str]]:
        path = self.folder / "starts"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def resize(self, ranks: int) -> None:
        before = len(self.starts())
        self.job.resize(ranks)
        wait_for(lambda: len(self.starts()) > before)

    def end(self) -> None:
        (self.folder / "end").touch()


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    made = StandIn(tmp_path)
    yield made
    made.end()
    made.job.kill()


def test_it_is_started_stopped_and_started_with_another_number_of_ranks(stand_in: StandIn) -> None:
    job = stand_in.job
    assert (job.ranks, job.status) == (0, None)
    stand_in.resize(2)
    job.resize(2)  # as it is
    assert (job.ranks, job.status) == (2, None)
    stand_in.resize(3)
    job.resize(0)
    assert (job.ranks, job.status) == (0, None)
    stand_in.resize(1)
    assert [start[0] for start in stand_in.starts()] == [f"--nproc-per-node={n}" for n in (2, 3, 1)]
    stand_in.end()
    assert job.wait(30) == 0
    assert (job.ranks, job.status) == (0, 0)
    job.resize(4)  # it has ended
    assert len(stand_in.starts()) == 3


def test_ranks_that_do_not_end_in_time_are_killed(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_job, "_LONGER_S", 0.2)
    job = stand_in.made("deaf", save_s=0.3)
    stand_in.resize(2)
    rank = int(stand_in.starts()[-1][1])
    stand_in.resize(1)
    wait_for(lambda: not _runs(rank))
    assert job.status is None


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_profile_is_the_one_that_the_job_has_written(stand_in: StandIn) -> None:
    assert stand_in.job.profile() is None
    written = JobProfile(
        model=ThroughputModel(compute_fixed_s=0.01, compute_sample_s=0.001, ring_s=0.02),
        noise=NoiseInterval(500.0, 400.0, 700.0),
        base_batch=64,
        limits=BatchLimits(max_batch_size=1024),
        most_replicas=4,
        restart_s=20.0,
        progress=1500.0,
    )
    written.save(stand_in.folder / PROFILE)
    assert stand_in.job.profile() == written


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="arguments must name the script"):
        LocalJob([], tmp_path)
    with pytest.raises(InvalidArgument, match="save_s must be positive"):
        LocalJob(["train.py"], tmp_path, save_s=0.0)
    job = LocalJob(["train.py"], tmp_path)
    with pytest.raises(InvalidArgument, match=r"ranks must be at least 0\. Found: -1"):
        job.resize(-1)
    with pytest.raises(InvalidArgument, match="must run to be waited for"):
        job.wait()


def test_a_wait_has_an_end(stand_in: StandIn) -> None:
    stand_in.resize(1)
    with pytest.raises(TimeoutError, match=r"still runs after 0\.1 s"):
        stand_in.job.wait(0.1)


@pytest.mark.slow
def test_under_torchrun_no_sample_is_lost_when_it_is_resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    job = LocalJob(["-m", "tests.accel.elastic.torchrun_job", str(tmp_path)], tmp_path / "checkpoints")

    def runs() -> list[list[list[dict[str, object]]]]:
        names = sorted(os.listdir(tmp_path / "logs"))
        begins = sorted({name.partition("-")[0] for name in names}, key=int)
        return [[lines(tmp_path / "logs" / n) for n in names if n.startswith(f"{each}-")] for each in begins]

    def has_steps(number: int) -> bool:
        return len(runs()) == number and len([line for line in runs()[-1][0] if "samples" in line]) >= 6

    try:
        for number, ranks in enumerate((2, 1, 3), 1):
            job.resize(ranks)
            wait_for(lambda number=number: has_steps(number), 120)  # type: ignore[misc]
        (tmp_path / "hurry").touch()
        assert job.wait(120) == 0
    finally:
        job.kill()
    check_samples(runs())
    assert [len(ranks) for ranks in runs()] == [2, 1, 3]
    begins = [next(line["begins"] for line in ranks[0] if "begins" in line) for ranks in runs()]
    assert begins == sorted(set(begins))  # type: ignore[type-var]


def test_the_launcher_is_told_how_long_saving_may_take(tmp_path: Path) -> None:
    """By itself torchrun kills its workers after thirty seconds."""
    script = tmp_path / "launcher.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "pathlib.Path(sys.argv[2], 'told').write_text(os.environ.get('TORCH_ELASTIC_SHUTDOWN_TIMEOUT', ''))\n"
    )
    job = LocalJob([str(tmp_path)], tmp_path, save_s=299.5, launcher=[sys.executable, str(script)])
    job.resize(1)
    assert job.wait(30) == 0
    assert (tmp_path / "told").read_text() == "300"


def test_a_job_that_was_killed_can_be_started_again(stand_in: StandIn) -> None:
    stand_in.resize(1)
    stand_in.job.kill()
    assert (stand_in.job.status, stand_in.job.ranks) == (None, 0)
    stand_in.resize(2)
    assert stand_in.job.ranks == 2
    assert stand_in.job.status is None


def test_a_launcher_that_can_not_be_started_leaves_the_job_stopped(tmp_path: Path) -> None:
    job = LocalJob(["train.py"], tmp_path, launcher=[str(tmp_path / "none")])
    with pytest.raises(FileNotFoundError):
        job.resize(2)
    assert job.ranks == 0

"""Real trainings share the slots of this machine, under a scheduler that is killed now and then."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel.cluster.actuators import LOG
from accel.cluster.job_table import ENDED, JobSpec, JobTable
from tests.accel.elastic.in_place_job import EPOCHS, SAMPLES
from tests.accel.elastic.schedules import check_samples, lines


def scheduler(folder: Path, slots: int = 2) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "accel", "cluster", "up", "--cluster", str(folder), "--slots", str(slots)]
    return subprocess.Popen([*command, "--interval", "5", "--until-empty"])


def logged(folder: Path) -> list[list[list[dict[str, object]]]]:
    """Return what each rank of each start has written down."""
    names = sorted(os.listdir(folder / "logs"))
    begins = sorted({name.partition("-")[0] for name in names}, key=int)
    return [[lines(folder / "logs" / name) for name in names if name.startswith(f"{each}-")] for each in begins]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [0, 3])
def test_three_jobs_on_two_slots_see_every_sample_once(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    table = JobTable(tmp_path / "cluster")
    folders = [tmp_path / f"job-{number}" for number in range(3)]
    for folder in folders:
        (folder / "logs").mkdir(parents=True)
        (folder / "hurry").touch()
        spec = JobSpec(
            arguments=("-m", "tests.accel.elastic.torchrun_job", str(folder)),
            folder=os.getcwd(),
            checkpoint=str(folder / "checkpoints"),
            max_replicas=2,
        )
        table.submit(folder.name, spec, time.time())
    draw = random.Random(kills)
    running = scheduler(tmp_path / "cluster")
    try:
        for _ in range(kills):
            time.sleep(draw.uniform(1.0, 20.0))
            running.send_signal(signal.SIGKILL)
            running.wait()
            running = scheduler(tmp_path / "cluster")
        assert running.wait(300) == 0
    finally:
        running.terminate()
        running.wait(120)
    assert [row.state for row in table.jobs()] == ["done"] * 3
    assert all(row.state in ENDED for row in table.jobs())
    for folder in folders:
        check_samples(logged(folder))


@pytest.mark.slow
def test_jobs_are_resized_in_place_and_see_every_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folders, table = [tmp_path / name for name in ("one", "two")], JobTable(tmp_path / "cluster")
    for folder in folders:
        (folder / "logs").mkdir(parents=True)
        spec = JobSpec(
            arguments=("-m", "tests.accel.elastic.in_place_job", str(folder), "grows"),
            folder=os.getcwd(),
            checkpoint=str(folder / "checkpoints"),
            max_replicas=2,
            in_place=True,
        )
        table.submit(folder.name, spec, time.time())
    running = scheduler(tmp_path / "cluster")
    try:
        (folders[0] / "hurry").touch()
        deadline = time.monotonic() + 240
        log = folders[1] / "checkpoints" / LOG
        while not log.exists() or "1 ranks are 2 now" not in log.read_text():
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        (folders[1] / "hurry").touch()
        assert running.wait(240) == 0
    finally:
        running.terminate()
        running.wait(120)
    assert [row.state for row in table.jobs()] == ["done"] * 2
    trained = [line for name in os.listdir(folders[1] / "logs") for line in lines(folders[1] / "logs" / name)]
    for epoch in range(EPOCHS):
        seen = [index for line in trained if line.get("epoch") == epoch for index in line["fresh"]]
        assert sorted(seen) == list(range(SAMPLES))

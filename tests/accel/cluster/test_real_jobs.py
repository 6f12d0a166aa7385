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

from accel.cluster.job_table import ENDED, JobSpec, JobTable
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

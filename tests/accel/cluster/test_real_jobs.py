"""Real trainings share the slots of this machine, under a scheduler that is killed now and then."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel.cluster.actuators import LOG
from accel.cluster.job_table import JobSpec, JobTable
from accel.cluster.local_actuator import processes_of
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


def kill_a_rank(checkpoints: list[str], draw: random.Random) -> None:
    """Kill a process that a job's launchers have started, if any runs."""
    alive = {each: parent for folder in checkpoints for each, parent in processes_of(folder).items()}
    if ranks := sorted(alive.keys() & {each for each, parent in alive.items() if parent in alive}):
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(ranks), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_three_jobs_on_two_slots_see_every_sample_once(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scheduler or a rank are killed at random moments; the first schedule goes undisturbed."""
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
    draw = random.Random(seed)
    running = scheduler(tmp_path / "cluster")
    try:
        for _ in range(3 if seed else 0):
            time.sleep(draw.uniform(1.0, 20.0))
            if draw.random() < 0.5:
                kill_a_rank([str(folder / "checkpoints") for folder in folders], draw)
                continue
            running.send_signal(signal.SIGKILL)
            running.wait()
            running = scheduler(tmp_path / "cluster")
        assert running.wait(300) == 0
    finally:
        running.terminate()
        running.wait(120)
    assert [row.state for row in table.jobs()] == ["done"] * 3
    for folder in folders:
        check_samples(logged(folder))


@pytest.mark.slow
def test_jobs_are_resized_in_place_and_see_every_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
def test_the_manual_s_three_jobs_end(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "accel"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m accel "$@"\n')
    command.chmod(0o755)
    path = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd(), "GLOO_SOCKET_IFNAME": "lo"}
    environment = {**os.environ, **path, "ACCEL_CLUSTER": str(tmp_path / "cluster")}
    example = Path("examples/cluster/three_jobs.sh")
    done = subprocess.run([str(example)], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = JobTable(tmp_path / "cluster").jobs()
    assert [row.state for row in rows] == ["done"] * 3
    assert max(row.changes for row in rows) >= 1
    assert "epoch 29 on" in done.stdout
    assert "</html>" in (tmp_path / "cluster" / "page.html").read_text()

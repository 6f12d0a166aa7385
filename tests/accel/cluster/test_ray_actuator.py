"""Jobs on a Ray cluster of several raylets on this machine, with real trainings and checkpoints."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel.cluster.actuators import LOG, ClusterUnreachable
from accel.cluster.job_table import JobRow, JobSpec, JobTable
from accel.cluster.local_actuator import end_processes, processes_of
from accel.cluster.ray_actuator import RayActuator
from tests.accel.cluster.test_real_jobs import logged
from tests.accel.elastic.schedules import check_samples

pytestmark = pytest.mark.integration
ray = pytest.importorskip("ray", reason="needs Ray (pip install 'accel-train[ray]')")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a head without slots and two nodes of one slot each."""
    for name, value in {
        **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_USAGE_STATS_ENABLED": "0"},
        **{"PYTHONPATH": os.getcwd(), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONWARNINGS": "ignore"},
    }.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            started.add_node(num_cpus=1)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()


def job(folder: Path, name: str = "one", **options: Any) -> JobSpec:
    own = folder / name
    (own / "logs").mkdir(parents=True)
    (own / "hurry").touch()
    arguments = ("-m", "tests.accel.elastic.torchrun_job", str(own))
    return JobSpec(
        arguments=arguments, folder=os.getcwd(), checkpoint=str(own / "checkpoints"), max_replicas=2, **options
    )


def wait_for(holds: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def test_a_job_changes_nodes_loses_one_and_ends(cluster: Any, tmp_path: Path) -> None:
    actuator = RayActuator(cluster.address)
    names = [node.name for node in actuator.nodes()]
    assert [node.gpus for node in actuator.nodes()] == [1, 1]
    row = JobRow("one", job(tmp_path), 0.0)
    folder = tmp_path / "one"
    (folder / "hurry").unlink()
    actuator.change(row, (names[0],))
    wait_for(lambda: len(logged(folder)) == 1)
    actuator.change(row, tuple(names))
    wait_for(lambda: [len(each) for each in logged(folder)] == [1, 2])
    assert actuator.status("one") is None
    lost = next(each for each in cluster.worker_nodes if each.node_id == names[1])
    cluster.remove_node(lost, allow_graceful=False)
    wait_for(lambda: actuator.status("one") == "lost")
    (folder / "hurry").touch()
    wait_for(lambda: len(actuator.nodes()) == 1)
    actuator.change(row, (names[0],))
    wait_for(lambda: actuator.status("one") == 0)
    check_samples(logged(folder))
    assert not processes_of(row.spec.checkpoint)
    missing = JobRow("two", JobSpec(arguments=("none.py",), folder="/nowhere", checkpoint=str(tmp_path / "two")), 0.0)
    with pytest.raises(ValueError, match="nowhere"):
        actuator.change(missing, (names[0],))
    assert [node.name for node in actuator.nodes()] == names[:1]


def scheduler(folder: Path, address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "accel", "cluster", "up", "--cluster", str(folder), "--ray", address]
    return subprocess.Popen([*command, "--interval", "5", "--until-empty"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_three_jobs_see_every_sample_once_whatever_is_killed(cluster: Any, tmp_path: Path, seed: int) -> None:
    table = JobTable(tmp_path / "cluster")
    specs = {name: job(tmp_path, name) for name in ("one", "two", "three")}
    for name, spec in specs.items():
        table.submit(name, spec, time.time())
    draw = random.Random(seed)
    running = scheduler(tmp_path / "cluster", cluster.address)
    try:
        for _ in range(3):
            time.sleep(draw.uniform(2.0, 20.0))
            if draw.random() < 0.5:
                running.send_signal(signal.SIGKILL)
                running.wait()
                running = scheduler(tmp_path / "cluster", cluster.address)
            else:
                cluster.remove_node(draw.choice(list(cluster.worker_nodes)), allow_graceful=False)
                cluster.add_node(num_cpus=1)
        assert running.wait(400) == 0
    finally:
        running.terminate()
        running.wait(180)
        for spec in specs.values():
            end_processes(spec.checkpoint)
    assert [row.state for row in table.jobs()] == ["done"] * 3, (tmp_path / "one" / "checkpoints" / LOG).read_text()
    for name in specs:
        check_samples(logged(tmp_path / name))


def test_a_cluster_that_is_not_there_is_said_to_be_so() -> None:
    with pytest.raises(ClusterUnreachable, match=r"the Ray cluster \(127.0.0.1:1\) does not answer"):
        RayActuator("127.0.0.1:1")

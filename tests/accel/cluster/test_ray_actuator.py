"""Jobs on a Ray cluster of several raylets on this machine, with real trainings and checkpoints."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from accel.cluster import ray_actuator
from accel.cluster.actuators import LOG, ClusterUnreachable
from accel.cluster.job_table import JobRow, JobSpec, JobTable
from accel.cluster.local_actuator import end_processes, processes_of
from accel.cluster.ray_actuator import RayActuator
from benchmarks.cluster_resizing import lose
from tests.accel.cluster.test_real_jobs import kill_a_rank, logged
from tests.accel.elastic.schedules import check_samples

pytestmark = pytest.mark.integration
ray = pytest.importorskip("ray", reason="needs Ray (pip install 'accel-train[ray]')")


class RayNodes:
    """A head without slots and two nodes of one slot each, on this machine."""

    def __init__(self) -> None:
        self.started: Any = None
        self.start()

    def start(self) -> None:
        """Start them, at an address of their own."""
        from ray.cluster_utils import Cluster

        self.started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            self.started.add_node(num_cpus=1)

    def shutdown(self) -> None:
        """End all of them."""
        ray.shutdown()
        self.started.shutdown()

    @property
    def address(self) -> str:
        """Where the head is."""
        return str(self.started.address)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RayNodes]:
    for name, value in {
        **{"GLOO_SOCKET_IFNAME": "lo", "RAY_USAGE_STATS_ENABLED": "0"},
        **{"PYTHONPATH": os.getcwd(), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONWARNINGS": "ignore"},
        **{"RAY_gcs_rpc_server_reconnect_timeout_s": "20"},
    }.items():
        monkeypatch.setenv(name, value)
    started = RayNodes()
    try:
        yield started
    finally:
        started.shutdown()


@pytest.fixture
def cluster(nodes: RayNodes) -> Any:
    return nodes.started


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
    lose(cluster, lost, [row.spec.checkpoint])
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
    wait_for(lambda: [node.name for node in actuator.nodes()] == names[:1])  # Ray hears of the freed slot a bit later


def scheduler(folder: Path, address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "accel", "cluster", "up", "--cluster", str(folder), "--ray", address]
    return subprocess.Popen([*command, "--interval", "5", "--until-empty"])


def test_a_node_that_is_drained_is_left_while_it_is_there(cluster: Any, tmp_path: Path) -> None:
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    actuator = RayActuator(cluster.address)
    first, second = (node.name for node in actuator.nodes())
    row, folder = JobRow("one", job(tmp_path), 0.0), tmp_path / "one"
    (folder / "hurry").unlink()
    actuator.change(row, (first,))
    wait_for(lambda: any(len(rank) > 3 for start in logged(folder) for rank in start))
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + 600) * 1000)
    is_taken, why = GcsClient(address=cluster.address).drain_node(first, reason, "reclaimed", deadline_ms)
    assert is_taken, why
    wait_for(lambda: [node.name for node in actuator.nodes()] == [second])
    assert first in {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    actuator.change(row, (second,))  # it is saved there, and nothing is trained twice
    (folder / "hurry").touch()
    wait_for(lambda: actuator.status("one") == 0)
    check_samples(logged(folder))


def test_other_work_on_the_cluster_keeps_what_it_has(cluster: Any, tmp_path: Path) -> None:
    """A reservation such as that of a Ray Train job; its slot is not counted, nor asked for."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    actuator = RayActuator(cluster.address)
    others = placement_group([{"CPU": 1.0}])
    assert others.wait(60)
    wait_for(lambda: len(actuator.nodes()) == 1)
    row, (left,) = JobRow("one", job(tmp_path), 0.0), (node.name for node in actuator.nodes())
    actuator.change(row, (left,))
    for _ in range(10):
        assert [(node.name, node.gpus) for node in actuator.nodes()] == [(left, 1)]  # its own slot stays its own
        time.sleep(0.3)
    with pytest.raises(ClusterUnreachable, match="Ray has no room for 2 replicas; asked again"):
        actuator.change(JobRow("two", job(tmp_path, "two"), 0.0), tuple(ray_nodes(cluster)))
    assert placement_group_table(others)["state"] == "CREATED"
    wait_for(lambda: actuator.status("one") == 0)
    check_samples(logged(tmp_path / "one"))
    remove_placement_group(others)
    wait_for(lambda: len(actuator.nodes()) == 2)


def ray_nodes(cluster: Any) -> list[str]:
    return [each.node_id for each in cluster.worker_nodes]


class Faults:
    """Three jobs on a Ray cluster whose parts are killed.

    Args:
        folder: of all files.
        nodes: of Ray.
        draw: of what is killed, and when.
    """

    KINDS = ("scheduler", "rank", "node", "gcs", "head")

    def __init__(self, folder: Path, nodes: RayNodes, draw: random.Random) -> None:
        self._folder, self._nodes, self._draw = folder, nodes, draw
        self.table = JobTable(folder / "cluster")
        self.specs = {name: job(folder, name) for name in ("one", "two", "three")}
        for name, spec in self.specs.items():
            self.table.submit(name, spec, time.time())
        self._running = scheduler(folder / "cluster", nodes.address)

    def strike(self, kind: str) -> None:
        """Kill something after a while, and start again what a person or Kubernetes would."""
        time.sleep(self._draw.uniform(2.0, 20.0))
        started = self._nodes.started
        if kind == "rank":
            kill_a_rank([spec.checkpoint for spec in self.specs.values()], self._draw)
        elif kind == "node":
            node = self._draw.choice(list(started.worker_nodes))
            lose(started, node, [spec.checkpoint for spec in self.specs.values()])
            started.add_node(num_cpus=1)
        elif kind == "scheduler":
            self._start_again()
        else:  # its memory is lost, and with it what its raylets can do
            if kind == "gcs":
                started.head_node.kill_gcs_server()
                time.sleep(self._draw.uniform(0.0, 5.0))
            self._nodes.shutdown()
            self._nodes.start()
            self._start_again()

    def _start_again(self) -> None:
        self._running.kill()
        self._running.wait()
        self._running = scheduler(self._folder / "cluster", self._nodes.address)

    def check(self) -> None:
        """All jobs come to their end, and each has seen every sample once."""
        assert self._running.wait(400) == 0
        logs = "\n".join((Path(spec.checkpoint) / LOG).read_text()[-2000:] for spec in self.specs.values())
        assert [row.state for row in self.table.jobs()] == ["done"] * 3, logs
        for name in self.specs:
            check_samples(logged(self._folder / name))

    def end(self) -> None:
        """Leave nothing behind."""
        self._running.terminate()
        self._running.wait(180)
        for spec in self.specs.values():
            end_processes(spec.checkpoint)


def check_faults(folder: Path, nodes: RayNodes, draw: random.Random, kinds: Sequence[str]) -> None:
    faults = Faults(folder, nodes, draw)
    try:
        for kind in kinds:
            faults.strike(kind)
        faults.check()
    finally:
        faults.end()


@pytest.mark.parametrize("kind", ["rank", "node", "gcs"])
def test_what_is_killed_costs_no_sample(nodes: RayNodes, tmp_path: Path, kind: str) -> None:
    check_faults(tmp_path, nodes, random.Random(0), [kind])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_three_jobs_see_every_sample_once_whatever_is_killed(nodes: RayNodes, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    check_faults(tmp_path, nodes, draw, draw.choices(Faults.KINDS, k=3))


def test_a_group_that_went_with_the_head_is_asked_for_again() -> None:
    """The job had failed: Ray raises a plain Exception."""

    class LostGroup:
        def __init__(self, error: Exception) -> None:
            self._error = error

        def wait(self, seconds: float) -> bool:
            raise self._error

    with pytest.raises(ClusterUnreachable, match="Placement group 1 does not exist; asked again"):
        ray_actuator._is_placed(LostGroup(Exception("Placement group 1 does not exist")))
    with pytest.raises(ZeroDivisionError):
        ray_actuator._is_placed(LostGroup(ZeroDivisionError()))


def test_a_cluster_that_is_not_there_is_said_to_be_so() -> None:
    with pytest.raises(ClusterUnreachable, match=r"the Ray cluster \(127.0.0.1:1\) does not answer"):
        RayActuator("127.0.0.1:1")

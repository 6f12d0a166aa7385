"""Real torchrun, whose nodes join, are lost and leave: each sample of an epoch comes once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from accel.elastic.torchrun_nodes import VARIABLE, remedy
from tests import warm
from tests.accel.elastic.schedules import check_samples, lines, newest_step

TIMEOUT_S = 150.0


class Nodes:
    """Nodes of one job, each a torchrun with one worker, that meet at a store which outlives them all."""

    def __init__(self, folder: Path, *, shares: bool = False) -> None:
        """Let torchrun share its store with the workers, as it does by default, or not."""
        self.folder, self._shares = folder, shares
        (folder / "logs").mkdir()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._agents: list[warm.Running] = []

    def join(self) -> warm.Running:
        """Start one."""
        where = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{self._store.port} --rdzv-id=job"
        how = "--nproc-per-node=1 --max-restarts=20 --rdzv-conf=last_call_timeout=2"
        job = ["-m", "tests.accel.elastic.torchrun_job", str(self.folder)]
        # torch's own way loses the job when a node joins later: accel/elastic/torchrun_nodes.py.
        variables = {VARIABLE: "0" if self._shares else "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        variables["PET_NNODES"] = "1:3"  # as --nnodes, which workers can't read of a torchrun that was forked
        arguments = ["-m", "torch.distributed.run", *where.split(), *how.split(), "--local-addr=127.0.0.1", *job]
        self._agents.append(warm.Running(arguments, cwd=self.folder, environment=variables))
        return self._agents[-1]

    def lose(self, node: warm.Running) -> None:
        """Kill one, as when its machine fails: torchrun and its worker."""
        os.kill(node.pid, signal.SIGKILL)
        for worker in self._workers(node):
            os.kill(worker, signal.SIGKILL)

    def wait_for_steps(self, world: int, steps: int) -> None:
        """Wait until the newest run has so many ranks and has taken so many steps."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self._is_at(world, steps):
            assert time.monotonic() < deadline, f"{world} ranks did not come to step {steps}: {self._last()}"
            time.sleep(0.05)

    def runs(self) -> list[list[list[dict[str, Any]]]]:
        """Return the lines of each run's ranks."""
        files = sorted(path.name for path in (self.folder / "logs").iterdir())
        begins = sorted({name.partition("-")[0] for name in files}, key=int)
        return [
            [lines(self.folder / "logs" / name) for name in files if name.startswith(f"{begin}-")] for begin in begins
        ]

    def end(self) -> None:
        """Leave nothing running."""
        for ranks in self.runs():
            for line in (line for rank in ranks for line in rank if "pid" in line):
                if _parent(line["pid"]) in {1, *(agent.pid for agent in self._agents)} and _is_job(line["pid"]):
                    os.kill(line["pid"], signal.SIGKILL)
        for agent in self._agents:
            agent.kill()

    def _is_at(self, world: int, steps: int) -> bool:
        taken = [line for line in self._last() if "samples" in line]
        return len(taken) >= steps and taken[0]["world"] == world

    def _last(self) -> list[dict[str, Any]]:
        runs = self.runs()
        return runs[-1][0] if runs else []

    def _workers(self, node: warm.Running) -> list[int]:
        of_node = [line for ranks in self.runs() for rank in ranks for line in rank if line.get("agent") == node.pid]
        return [line["pid"] for line in of_node[-1:]]


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return -1


def _is_job(process: int) -> bool:
    return b"torchrun_job" in Path(f"/proc/{process}/cmdline").read_bytes()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    job = Nodes(tmp_path)
    yield job
    job.end()


@pytest.mark.slow
def test_a_node_joins_and_one_is_lost_and_one_leaves(nodes: Nodes) -> None:
    first, lost = nodes.join(), nodes.join()
    nodes.wait_for_steps(2, 6)
    last = nodes.join()
    nodes.wait_for_steps(3, 6)
    nodes.lose(lost)
    nodes.wait_for_steps(2, 6)
    os.kill(first.pid, signal.SIGTERM)
    nodes.wait_for_steps(1, 6)
    (nodes.folder / "hurry").touch()
    ended = last.wait(TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr

    runs = nodes.runs()
    check_samples(runs)
    assert [len(ranks) for ranks in runs] == [2, 3, 2, 1]
    begins = [next(line["begins"] for line in ranks[0] if "begins" in line) for ranks in runs]
    assert begins == sorted(set(begins)), "a run began again where the one before had"
    assert newest_step(nodes.folder / "checkpoints") > begins[-1]


@pytest.mark.slow
def test_torch_s_own_way_ends_the_job_when_a_node_joins_and_it_is_said_before(tmp_path: Path) -> None:
    """Should this fail, torch has mended it: the advice and the variable can go then."""
    nodes = Nodes(tmp_path, shares=True)
    try:
        first = nodes.join()
        nodes.wait_for_steps(1, 6)
        nodes.join()
        ended = first.wait(TIMEOUT_S)
    finally:
        nodes.end()
    assert ended.returncode != 0
    assert len(nodes.runs()) == 1, "the workers met again"
    assert f"a node that joins this job later would end it, by a fault of torch; set {VARIABLE}=1" in ended.stderr


SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
SLEEPS = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("environment", "command", "said"),
    [
        (SHARED, ["torchrun", "--nnodes=1:3", "train.py"], True),
        (SHARED, ["torchrun", "--nnodes", "2:4", "train.py"], True),
        ({**SHARED, "PET_NNODES": "1:2"}, ["torchrun", "train.py"], True),
        (SHARED, ["torchrun", "--nnodes=2", "train.py", "--ratio=1:3"], False),
        (SHARED, ["torchrun", "--nnodes=2:2", "train.py"], False),
        (SHARED, ["torchrun", "--standalone", "--nproc-per-node=2", "train.py"], False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, ["torchrun", "--nnodes=1:3", "train.py"], False),
        ({}, ["python", "train.py", "--nnodes=1:3"], False),
    ],
)
def test_the_advice_is_given_where_nodes_may_join(environment: dict[str, str], command: list[str], said: bool) -> None:
    assert bool(remedy(environment, command)) == said


def test_the_command_is_that_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPS, "--nnodes=1:3"], stdin=subprocess.PIPE) as torchrun:
        monkeypatch.setattr("os.getppid", lambda: torchrun.pid)
        try:
            deadline = time.monotonic() + 30
            while not remedy(SHARED) and time.monotonic() < deadline:
                time.sleep(0.01)  # until it has its own command line
            assert remedy(SHARED)
        finally:
            torchrun.kill()
    monkeypatch.setattr("os.getppid", lambda: 2**30)
    assert not remedy(SHARED)

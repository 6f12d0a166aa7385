"""Nodes of a real torchrun job, which join, are lost and leave; on one host, or each in a network namespace."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from accel.elastic.saving.torchrun_nodes import VARIABLE
from tests import warm
from tests.accel.elastic.schedules import check_samples, lines, newest_step

TIMEOUT_S = 150.0


class Host(NamedTuple):
    """Where a node runs."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    enter: str = ""
    """Code that a process runs first, to be there."""


class Nodes:
    """Nodes of one job, each a torchrun with one worker, that meet at a store which outlives them all.

    Args:
        folder: of the job's files.
        backend: of the rendezvous, as torchrun names it.
        endpoint: address and port of its store.
        hosts: where each node that joins runs.
        shares: torchrun shares its store with the workers, as it does by default, or not.
    """

    def __init__(
        self, folder: Path, backend: str, endpoint: str, hosts: Iterable[Host] = (), *, shares: bool = False
    ) -> None:
        self.folder, self._shares = folder, shares
        (folder / "logs").mkdir()
        self._meeting = f"--rdzv-backend={backend} --rdzv-endpoint={endpoint} --rdzv-id=job"
        self._hosts = iter(hosts or repeat(Host()))
        self._agents: list[warm.Running] = []

    def join(self) -> warm.Running:
        """Start one."""
        host = next(self._hosts)
        how = "--nproc-per-node=1 --max-restarts=20 --rdzv-conf=last_call_timeout=2"
        job = ["-m", "tests.accel.elastic.torchrun_job", str(self.folder)]
        # torch's own way loses the job when a node joins later: accel/elastic/saving/torchrun_nodes.py.
        variables = {
            VARIABLE: "0" if self._shares else "1",
            "GLOO_SOCKET_IFNAME": host.interface,
        }
        variables["PET_NNODES"] = "1:3"  # as --nnodes, which workers can't read of a torchrun that was forked
        where = [*self._meeting.split(), f"--local-addr={host.address}"]
        arguments = ["-m", "torch.distributed.run", *where, *how.split(), *job]
        self._agents.append(warm.Running(arguments, cwd=self.folder, environment=variables, before=host.enter))
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


@contextmanager
def on_one_host(folder: Path, *, shares: bool = False) -> Iterator[Nodes]:
    """Yield nodes that meet under c10d, at a store in this process; end them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Nodes(folder, "c10d", f"127.0.0.1:{store.port}", shares=shares)
    try:
        yield job
    finally:
        job.end()


def check_that_nodes_come_and_go(nodes: Nodes) -> None:
    """Let a node join, lose one, and let one leave; check that each sample of an epoch comes once."""
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

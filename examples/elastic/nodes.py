"""The same training while a node joins and another one is killed, all on this machine.

    python -m examples.elastic.nodes

Each node is a torchrun with one worker. They meet at a store that this script keeps, so that it outlives them all; on a
cluster that is an etcd, or a pod of its own (docs/kubernetes.md).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import TCPStore

LIMIT_S = 180.0


class Node:
    """A torchrun, whose lines are passed on and kept."""

    def __init__(self, name: str, port: int, folder: Path) -> None:
        where = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=example --local-addr=127.0.0.1"
        how = "--nnodes=1:3 --nproc-per-node=1 --max-restarts=10 --rdzv-conf=last_call_timeout=2"
        script = ["-m", "examples.elastic.train", str(folder), "--epochs=6", "--pause=0.03"]
        # torch's own way loses the job when a node joins later: docs/kubernetes.md.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.lines: list[str] = []
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *where.split(), *how.split(), *script],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.strip())
            print(f"  {self._name}: {line.strip()}", flush=True)

    def kill(self) -> None:
        """End it and its worker, which has a session of its own, without a word: as when a machine fails."""
        for process in (*children(self._process.pid), self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()

    def wait(self) -> int:
        """Return its exit status."""
        return self._process.wait(LIMIT_S)


def children(process: int) -> list[int]:
    """Return the processes that a process has started."""
    with contextlib.suppress(FileNotFoundError):
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


@contextlib.contextmanager
def nodes() -> Iterator[list[Node]]:
    """End all that were started."""
    started: list[Node] = []
    try:
        yield started
    finally:
        for node in started:
            node.kill()


def wait_for(started: list[Node], line: str) -> None:
    """Wait until a worker has said so, anew."""
    before, deadline = sum(node.lines.count(line) for node in started), time.monotonic() + LIMIT_S
    while sum(node.lines.count(line) for node in started) <= before:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no worker has said {line!r} within {LIMIT_S:.0f} s")
        time.sleep(0.1)


def main() -> None:
    """Start a node, let another one join, kill it, and wait for the end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder, nodes() as started:
        for name in ("node 1", "node 2"):
            print(f"{name} is started", flush=True)
            started.append(Node(name, store.port, Path(folder)))
            wait_for(started, f"workers: {len(started)}")
        time.sleep(4.0)
        print("node 2 is killed", flush=True)
        started[1].kill()
        wait_for(started, "workers: 1")
        print(f"node 1 ended with status {started[0].wait()}", flush=True)


if __name__ == "__main__":
    main()

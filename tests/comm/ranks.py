"""Ranks of one test: processes forked from a server that has imported torch once, on gloo over loopback."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import context, forkserver, popen_forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# multiprocessing has one server for a process, and what it imports is as whoever came first has said: beside the tests
# of loaders each rank imported torch, 2 s of CPU time, half of what all tests took.
_server = forkserver.ForkServer()
_server.set_forkserver_preload(["tests.comm.rank_server"])


class _Popen(popen_forkserver.Popen):
    def _launch(self, process: Any) -> None:
        usual = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = _server.connect_to_new_process
        try:
            super()._launch(process)
        finally:
            forkserver.connect_to_new_process = usual


class _RankProcess(context.ForkServerProcess):
    @staticmethod
    def _Popen(process: Any) -> _Popen:  # noqa: N802
        return _Popen(process)


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    per_host: int = 1,
    timeout_s: float = 240,
    meet: bool = True,
) -> list[Any]:
    """Return what `function(rank, world, *arguments)` returned on each rank; the exit code where a rank died.

    Args:
        per_host: ranks that share a host, by torchrun's variables.
        meet: ranks wait for each other at the end; False where some die.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            _RankProcess(target=_rank, args=(function, rank, world, per_host, folder, meet, arguments))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        late = []
        for rank, process in enumerate(processes):
            process.join(max(deadline - time.monotonic(), 0.01))
            if process.exitcode is None:
                late.append(rank)
                process.kill()
                process.join()
        assert not late, f"ranks {late} of {function.__name__} still ran after {timeout_s} s"
        found = []
        for rank, process in enumerate(processes):
            path = folder / f"{rank}.pickle"
            kind, value = pickle.loads(path.read_bytes()) if path.exists() else ("code", process.exitcode)
            assert kind != "error", f"rank {rank}:\n{value}"
            found.append(value)
        return found


def _rank(
    function: Callable[..., Any], rank: int, world: int, per_host: int, folder: Path, meet: bool, arguments: Any
) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", GROUP_RANK=str(rank // per_host), LOCAL_WORLD_SIZE=str(per_host))
    torch.set_num_threads(1)
    try:
        store = f"file://{folder / 'store'}"
        timeout = timedelta(seconds=120)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
        said: tuple[str, Any] = ("value", function(rank, world, *arguments))
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("accel-comm")]
        if left:
            said = ("error", f"threads left: {left}")
    except BaseException:
        said = ("error", traceback.format_exc())
    path = folder / f"{rank}.pickle"
    path.with_suffix(".part").write_bytes(pickle.dumps(said))
    path.with_suffix(".part").rename(path)
    if meet and said[0] == "value":
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # past gloo's own end, which waits for ranks that died

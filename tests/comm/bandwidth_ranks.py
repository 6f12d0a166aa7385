"""Run a function as several gloo ranks on this machine and collect what each returns or raises."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from accel.comm.bandwidth import Bandwidth, Row, Settings, measure
from accel.comm.bandwidth import links as bandwidth_links


def spawn(target: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Return what each rank returned: a result, an exception, or None where the rank died."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=_run, args=(target, rank, ranks, folder, arguments)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(90)
        for process in processes:
            if process.is_alive():
                process.kill()
        files = [Path(folder, str(rank)) for rank in range(ranks)]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def _run(target: Callable[..., Any], rank: int, ranks: int, folder: str, arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        result = target(*arguments)
    except Exception as error:
        result = error
    partial = Path(folder, f"{rank}.part")
    partial.write_bytes(pickle.dumps(result))
    partial.rename(Path(folder, str(rank)))
    os._exit(0)  # a group that was broken on purpose may never end


def plain(operations: list[str], sizes: list[int], options: dict[str, Any], settings: dict[str, Any]) -> Bandwidth:
    """Measure."""
    return measure(operations, sizes, settings=Settings(**settings), **options)


def two_nodes(operations: list[str], sizes: list[int]) -> Bandwidth:
    """Measure four ranks as if ranks 0 and 1 were one node, 2 and 3 another."""
    bandwidth_links.node_key = lambda: f"node{dist.get_rank() // 2}"
    return measure(operations, sizes, settings=Settings(runs=2))


def corrupted() -> Bandwidth:
    """Measure an all_reduce that gives one wrong element on rank 1."""
    honest = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        done = honest(tensor, *arguments, **options)
        if dist.get_rank() == 1:
            tensor[3] += 1
        return done

    dist.all_reduce = all_reduce
    return measure(["all_reduce"], [4096], settings=Settings(runs=2))


def unsupported() -> Bandwidth:
    """Measure on a backend that lacks all_to_all."""

    def all_to_all_single(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("Backend gloo does not support all_to_all_single")

    dist.all_to_all_single = all_to_all_single
    return measure(["all_to_all", "broadcast"], [1024, 4096], settings=Settings(runs=2))


def dying() -> Any:
    """Measure until rank 1 dies after its first row."""

    def on_row(row: Row) -> None:
        if dist.get_rank() == 1:
            os._exit(9)

    return measure(["all_reduce"], [4096, 65536], on_row=on_row, settings=Settings(runs=2, timeout_s=5))


def failing_alone() -> Any:
    """Measure a broadcast that fails on rank 1 only, so that rank 0 has nobody to send to."""
    honest = dist.broadcast

    def broadcast(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("out of luck")
        return honest(tensor, *arguments, **options)

    dist.broadcast = broadcast
    # Larger than the buffers of the sockets, which would take it without a receiver.
    return measure(["broadcast"], [64 << 20], settings=Settings(runs=2, timeout_s=2))

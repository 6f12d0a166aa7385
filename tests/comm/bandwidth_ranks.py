"""What the ranks of the bandwidth table's tests do. Nothing here asserts: ranks return what they measured or raised."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import torch
import torch.distributed as dist
from click.testing import CliRunner

from accel.comm.bandwidth import PeerLost, Row, Settings, measure_links
from accel.commands.bench import Request, _measured
from accel.commands.cli import main


def row(operation: str, size_bytes: int, time_s: float, link: str = "intra", ranks: int = 2) -> Row:
    """Return a row of float32 that was measured."""
    settings = {"link": link, "operation": operation, "ranks": ranks, "size_bytes": size_bytes}
    return Row(**settings, count=size_bytes // 4, dtype="float32", time_s=time_s)  # type: ignore[arg-type]


def alone(rank: int, world: int, request: Request) -> str:
    """Return what the command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        _measured(request, rank, world, "gloo")
    return printed.getvalue()


def command(rank: int, world: int, *options: str) -> tuple[int, str, str]:
    """Run the command as a rank of torchrun does; return its status, what it prints, and its errors."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), COLUMNS="80")
    dist.init_process_group = lambda *_, **__: None  # there is one
    done = CliRunner().invoke(main, ["bench", "comm", *options])
    return done.exit_code, done.stdout, done.stderr


def dying(rank: int, world: int) -> PeerLost | None:
    """Measure until rank 1 dies after its first row."""

    def on_row(row: Row) -> None:
        if rank == 1:
            os._exit(9)

    return _cut_off(["all_reduce"], [4096, 65536], on_row=on_row, settings=Settings(runs=2, timeout_s=5))


def failing_alone(rank: int, world: int) -> PeerLost | None:
    """Measure a broadcast that fails on rank 1 only, so that rank 0 has nobody to send to."""
    honest = dist.broadcast

    def broadcast(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if rank == 1:
            raise RuntimeError("out of luck")
        return honest(tensor, *arguments, **options)

    dist.broadcast = broadcast
    # Larger than the buffers of the sockets, which would take it without a receiver.
    return _cut_off(["broadcast"], [64 << 20], settings=Settings(runs=2, timeout_s=1))


def _cut_off(operations: list[str], sizes: list[int], **options: Any) -> PeerLost | None:
    """Return the error that ends the measurement."""
    try:
        measure_links(operations, sizes, **options)
    except PeerLost as error:
        return error
    return None

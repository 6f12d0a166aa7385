"""What the ranks of the bandwidth table's tests do. Nothing here asserts: ranks return what they measured or raised."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import torch
import torch.distributed as dist
from click.testing import CliRunner

from accel.comm.bandwidth import Bandwidth, PeerLost, Row, Settings, measure, table
from accel.comm.bandwidth import links as bandwidth_links
from accel.commands.bench import _measured
from accel.commands.bench_table import Request
from accel.commands.cli import main
from tests.comm import tcp_bytes


def plain(
    rank: int, world: int, operations: list[str], sizes: list[int], options: dict[str, Any], settings: dict[str, Any]
) -> Bandwidth | ValueError:
    """Measure, or return why not."""
    try:
        return measure(operations, sizes, settings=Settings(**settings), **options)
    except ValueError as error:
        return error


def counting_own(rank: int, world: int, operations: list[str], sizes: list[int]) -> Bandwidth:
    """Measure with the bytes of these ranks' connections for those of loopback, which other processes use as well."""

    def sent_bytes(loopback: bool) -> int:
        total = torch.tensor(sum(tcp_bytes.sockets().values()))
        dist.all_reduce(total)
        return int(total)

    bandwidth_links.sent_bytes = sent_bytes
    return measure(operations, sizes)


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


def two_nodes(rank: int, world: int, operations: list[str], sizes: list[int]) -> Bandwidth:
    """Measure four ranks as if ranks 0 and 1 were one node, 2 and 3 another."""
    table.identity = lambda: {"machine": f"node{rank // 2}"}
    return measure(operations, sizes, settings=Settings(runs=2))


def corrupted(rank: int, world: int) -> Bandwidth:
    """Measure an all_reduce that gives one wrong element on rank 1."""
    honest = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        done = honest(tensor, *arguments, **options)
        if rank == 1:
            tensor[3] += 1
        return done

    dist.all_reduce = all_reduce
    return measure(["all_reduce"], [4096], settings=Settings(runs=2))


def unsupported(rank: int, world: int) -> Bandwidth:
    """Measure on a backend that lacks all_to_all."""

    def all_to_all_single(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("Backend gloo does not support all_to_all_single")

    dist.all_to_all_single = all_to_all_single
    return measure(["all_to_all", "broadcast"], [1024, 4096], settings=Settings(runs=2))


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
    return _cut_off(["broadcast"], [64 << 20], settings=Settings(runs=2, timeout_s=2))


def _cut_off(operations: list[str], sizes: list[int], **options: Any) -> PeerLost | None:
    """Return the error that ends the measurement."""
    try:
        measure(operations, sizes, **options)
    except PeerLost as error:
        return error
    return None

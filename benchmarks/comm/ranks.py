"""What the ranks of the benchmarks share: a process group, a small model, a line of results, and equal replicas."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.comm.lab import Lab

_MARK = "RESULT "


@contextlib.contextmanager
def group(timeout_s: float, **options: Any) -> Iterator[None]:
    """Be a rank of a gloo group, on one thread; all leave it together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s), **options)
    yield
    dist.barrier()
    dist.destroy_process_group()


def report(result: dict[str, Any]) -> None:
    """Print a result for the process that started the ranks; only rank 0 does."""
    if dist.get_rank() == 0:
        print(_MARK + json.dumps(result), flush=True)


def reported(line: str) -> dict[str, Any] | None:
    """Return the result that stands in a line of output; None if the line is another."""
    result: dict[str, Any] | None = json.loads(line[len(_MARK) :]) if line.startswith(_MARK) else None
    return result


def run_in_lab(hosts: int, rate: str | None, ranks: int, arguments: list[str], rounds: int) -> dict[str, Any]:
    """Run a benchmark's ranks on hosts of a lab and return the result of rank 0."""
    with Lab(hosts, rate) as lab:
        command = ["-m", *arguments, "--rounds", str(rounds)]
        output = lab.run(command, ranks, timeout_s=900 + 150 * rounds)[0].output
    return next(result for line in output.splitlines() if (result := reported(line)) is not None)


def mlp(width: int, depth: int) -> nn.Module:
    """Return layers of width x width, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


def replicas_equal(model: nn.Module) -> bool:
    """Tell whether the weights are the same bits on all ranks."""
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = own.clone()
    dist.broadcast(first, 0)
    same = torch.tensor([int(torch.equal(own, first))])
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return bool(same)


def slowest(seconds: float) -> float:
    """Return the time of the slowest rank."""
    longest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()

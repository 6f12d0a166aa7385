"""Muon against torch's: `accel.optim.Muon`, and torch's own under the strategy `batched_muon`.

    python -m benchmarks.muon [--rounds 5] [--threads 2] [--device cuda] [--record]

24 weights of 256 x 256, and tall and wide ones, as a transformer's layers have. The two of a race run in turns, rival
ours ours rival; each round gives a ratio. Before anything is timed the weights must agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import click
import torch
from torch import nn

from accel.optim import Muon
from accel.strategies.batched_muon import BatchedMuon
from benchmarks.kernels.optimizer_rivals import Step, params_of
from benchmarks.optimizers import LINE, in_turns
from benchmarks.optimizers import RECORD as OPTIMIZERS
from benchmarks.record import Record
from benchmarks.render import Row

RECORD = Record("muon", "a step of Muon against torch.optim.Muon", OPTIMIZERS.columns, head=OPTIMIZERS.head)
SHAPES = {"24 of 256": [(256, 256)] * 24, "12 of 128 x 512 and back": [(128, 512), (512, 128)] * 6}


def _ours(params: list[nn.Parameter]) -> Step:
    return Muon(params).step


def _switched(params: list[nn.Parameter]) -> Step:
    optimizer: Any = torch.optim.Muon(params)
    strategy = BatchedMuon()
    run: Any = SimpleNamespace(optimizers=[optimizer])

    def step() -> None:
        strategy.enable(run, None)
        optimizer.step()
        strategy.disable(run)

    return step


_NEAR = 2e-5
"""A tenth of what three updates are: both round to bfloat16, and sum in another order."""
WAYS: dict[str, Callable[[list[nn.Parameter]], Step]] = {"accel.optim.Muon": _ours, "batched_muon": _switched}


def races(
    rounds: int,
    shapes: dict[str, list[tuple[int, int]]] = SHAPES,
    clock: Callable[[], float] = time.perf_counter,
    device: str = "cpu",
) -> Iterator[Row]:
    """Yield a row for each way and set of weights."""
    for own in shapes.values():
        for name, way in WAYS.items():
            ours, theirs = (params_of(own, device, torch.float32) for _ in range(2))
            rival = torch.optim.Muon(theirs).step
            yield in_turns(name, "torch.optim.Muon", (way(ours), ours), (rival, theirs), rounds, clock, _NEAR)


def _when_done() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=torch.get_num_threads, type=int, help="Of torch.  [default: cores]")
@click.option("--device", default="cpu", show_default=True, help="Where the weights are, waited for at each look.")
@click.option("--record", is_flag=True, help="Write the figures to benchmarks/results/.")
def main(rounds: int, threads: int, device: str, record: bool) -> None:
    """Measure."""
    torch.set_num_threads(threads)
    measured = []
    for row in races(rounds, clock=time.perf_counter if device == "cpu" else _when_done, device=device):
        measured.append(row)
        print(LINE.format_map(row), flush=True)
    if record:
        RECORD.write(measured, threads=threads, rounds=rounds)


if __name__ == "__main__":
    main()
